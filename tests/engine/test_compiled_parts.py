"""A model with a part that the user has compiled trains under several workers as on one, and does not stand still."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine

TIMEOUT_S = 10.0


class PartlyCompiled(nn.Module):
    """Under three workers it stood still once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), backend="aot_eager")
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def trained(strategy: hr.Strategy, engine: LocalEngine) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    data = (
        torch.randn(24, 4, generator=generator, dtype=torch.float64),
        torch.randn(24, 1, generator=generator, dtype=torch.float64),
    )
    job = hr.Job(
        lambda: PartlyCompiled().double(),
        loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=data,
        global_batch_size=12,
        steps=4,
    )
    run = hr.fit(job, strategy, engine=engine, timeout_s=TIMEOUT_S, checkpoints=False)
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: LocalEngine) -> dict[str, Tensor]:
    return trained(hr.OneDevice(), engine)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "strategy",
    [
        hr.Mirrored(3),
        hr.TensorParallel(3),
        pytest.param(hr.CentralStorage(3), marks=pytest.mark.full),
        pytest.param(hr.ParameterServer(3, staleness_bound=0), marks=pytest.mark.full),
    ],
    ids=lambda strategy: strategy.name,
)
def test_three_workers_train_as_one(strategy: hr.Strategy, engine: LocalEngine, expected: dict[str, Tensor]) -> None:
    found = trained(strategy, engine)
    assert all(torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12) for name, tensor in found.items())
