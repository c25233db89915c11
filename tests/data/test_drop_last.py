"""Jobs whose last batch of an epoch is left out, beside a plain loop over a `DataLoader` that leaves it out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import headrace as hr
from headrace.spec.events import RunStarted, Stepped

pytestmark = pytest.mark.slow
X = torch.randn(29, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.square().sum(1, keepdim=True))
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def model() -> nn.Module:
    torch.manual_seed(0)
    # Of one example, which the last batch has, BatchNorm computes nothing.
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def plain(epochs: int) -> dict[str, torch.Tensor]:
    module = model()
    optimizer = SGD(module.parameters())
    schedule = halved(optimizer)
    for _ in range(epochs):
        for x, y in DataLoader(DATA, 7, drop_last=True):
            optimizer.zero_grad()
            functional.mse_loss(module(x), y).backward()
            optimizer.step()
        schedule.step()
    return module.state_dict()


def job(epochs: int = 2) -> hr.Job:
    return hr.Job(
        model=model,
        loss=functional.mse_loss,
        optimizer=SGD,
        data=hr.data.from_torch(DataLoader(DATA, 7, drop_last=True)),
        eval_data=DataLoader(DATA, 7, drop_last=True),
        global_batch_size=7,
        epochs=epochs,
        options=hr.Options(batch_norm="sync", schedule=halved, schedule_every="epoch"),
    )


@pytest.mark.parametrize(
    "strategy",
    [hr.OneDevice(), hr.Mirrored(2), hr.FullySharded(3), hr.Mirrored(2, balance="speed")],
    ids=str,
)
def test_the_last_batch_is_in_no_epoch(strategy: hr.Strategy) -> None:
    run = hr.fit(job(), strategy, device="cpu", engine=hr.ThreadEngine())
    right = plain(2)
    assert all((each - right[name]).abs().max() < 1e-9 for name, each in run.model.state_dict().items())
    steps = {each.step for each in run.events if isinstance(each, Stepped)}
    assert len(steps) == 8
    assert [each.examples_per_epoch for each in run.events if isinstance(each, RunStarted)] == [28]


def test_servers_know_how_long_an_epoch_is() -> None:
    # Their schedule follows epochs.
    given = hr.Job(
        model=partial(nn.Linear, 4, 1, dtype=torch.float64),
        loss=functional.mse_loss,
        optimizer=SGD,
        data=hr.data.from_torch(DataLoader(DATA, 7, drop_last=True)),
        global_batch_size=7,
        epochs=3,
        seed=1,
        options=hr.Options(schedule=halved, schedule_every="epoch"),
    )
    one, served = (
        hr.fit(given, strategy, device="cpu", engine=hr.ThreadEngine())
        for strategy in (hr.OneDevice(), hr.ParameterServer(1))
    )
    assert torch.allclose(one.model.state_dict()["weight"], served.model.state_dict()["weight"], atol=1e-9)
