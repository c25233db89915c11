"""What callbacks and loops put into parameters or in their place: kept, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import headrace as hr
from headrace.errors import UsageError

STRATEGIES: tuple[hr.Strategy, ...] = (
    hr.Mirrored(2),
    hr.CentralStorage(2),
    hr.ParameterServer(2, staleness_bound=0),
    hr.Pipeline(2),
    hr.TensorParallel(2),
    hr.FullySharded(2),
)


def make_job() -> hr.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(29, 4, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double(),
        loss=functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(x, x.square().sum(1, keepdim=True)),
        global_batch_size=8,
        epochs=2,
    )


def fit(strategy: hr.Strategy, *callbacks: hr.Callback) -> dict[str, torch.Tensor]:
    run = hr.fit(make_job(), strategy, engine=hr.ThreadEngine(), check=False, callbacks=callbacks)
    return run.model.state_dict()


class Writes(hr.Callback):
    """Changes a parameter of rank 0 in a way that its version does not tell, when not all elements are compared."""

    def on_step(self, moment: hr.Moment) -> None:
        if moment.step == 6:
            next(moment.model.parameters()).data.mul_(0.5)


class Freezes(hr.Callback):
    """Freezes a parameter of rank 0."""

    def on_step(self, moment: hr.Moment) -> None:
        next(moment.model.parameters()).requires_grad_(False)


class WritesAtTheEnd(hr.Callback):
    """Changes the trained model."""

    def on_end(self, moment: hr.Moment) -> None:
        rebind(moment)


def rebind(holder: Any) -> None:
    for parameter in holder.model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


@pytest.mark.parametrize("callback", [Writes(), Freezes()], ids=["writes", "freezes"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
def test_what_a_callback_changes_on_one_worker_alone_is_refused(strategy: hr.Strategy, callback: hr.Callback) -> None:
    with pytest.raises(UsageError, match=r"a callback has changed '0.weight'"):
        fit(strategy, callback)


@pytest.mark.parametrize("strategy", [hr.OneDevice(), *STRATEGIES], ids=lambda each: each.name)
def test_what_a_callback_writes_at_the_end_is_in_the_model_or_refused(strategy: hr.Strategy) -> None:
    if isinstance(strategy, hr.Pipeline | hr.TensorParallel | hr.FullySharded):
        with pytest.raises(UsageError, match=r"a callback has changed '0.weight'"):
            fit(strategy, WritesAtTheEnd())
        return
    trained = fit(strategy, WritesAtTheEnd())
    expected = {name: each.clamp(-0.2, 0.2) for name, each in fit(strategy).items()}
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", [hr.ParameterAveraging(2, period=2), hr.Gossip(2)], ids=lambda each: each.name)
def test_tensors_in_the_place_of_parameters_are_averaged_as_what_is_written_into_them(strategy: hr.Strategy) -> None:
    def launch(change: Any) -> dict[str, torch.Tensor]:
        def loop(worker: hr.Worker) -> None:
            for batch in worker.batches():
                worker.step(batch)
                change(worker)

        run = hr.launch(loop, make_job(), strategy, engine=hr.ThreadEngine(), check=False)
        return run.model.state_dict()

    def write(worker: Any) -> None:
        for parameter in worker.model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    def replace(worker: Any) -> None:
        worker.model[0].weight = nn.Parameter(worker.model[0].weight.detach() * 0.5)

    torch.testing.assert_close(launch(rebind), launch(write), rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"another parameter was put in the place of '0.weight'"):
        launch(replace)
