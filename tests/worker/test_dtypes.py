"""Types and layouts of tensors that are rare in models, in training, checkpoints and servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr

THREADS = hr.ThreadEngine()
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")]


class Rare(nn.Module):
    """A linear layer, with a parameter of one type, and buffers of many."""

    factor: nn.Parameter
    graph: Tensor

    def __init__(self, dtype: torch.dtype, compressed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, dtype=torch.float64)
        self.factor = nn.Parameter(torch.ones(4, dtype=dtype))
        eye = torch.eye(4, dtype=torch.float64)
        self.register_buffer("graph", eye.to_sparse_csr() if compressed else eye.to_sparse())
        self.register_buffer("turn", torch.full((1,), 1j, dtype=torch.complex128))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("index", torch.arange(4, dtype=torch.uint8))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        seen = (self.graph @ x.T).T * self.mask
        changed = seen * (self.factor * self.turn).abs().double() + seen * self.factor.real.double()
        out: Tensor = self.layer(changed)
        return out

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "index": self.index}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def trained(
    model: partial[Rare], strategy: hr.Strategy, run_dir: Path | None = None, steps: int = 4, resume: bool = False
) -> dict[str, Any]:
    inputs = torch.randn(22, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    job = hr.Job(
        model=model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        data=(inputs, inputs.sum(1, keepdim=True)),
        global_batch_size=6,
        steps=steps,
    )
    run = hr.fit(job, strategy, engine=THREADS, check=False, run_dir=run_dir, resume=resume)
    assert run.model.steps == steps
    return {name: each.to_dense() for name, each in run.model.state_dict().items() if isinstance(each, Tensor)}


MODELS = [
    partial(Rare, torch.complex128),
    partial(Rare, torch.complex64, compressed=True),
    partial(Rare, torch.bfloat16),
    partial(Rare, torch.float16, compressed=True),
]
NAMES = ["complex128", "complex64", "bfloat16", "float16"]
STRATEGIES = [
    hr.Mirrored(2),
    hr.CentralStorage(2),
    hr.ParameterServer(2, staleness_bound=0),
    hr.TensorParallel(2),
    hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
]


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_rare_types_train_as_on_one_device(model: partial[Rare], strategy: hr.Strategy) -> None:
    alone, several = trained(model, hr.OneDevice()), trained(model, strategy)
    # One unit in the last place of a sum of gradients of shares.
    rounding = {torch.bfloat16: 5e-2, torch.float16: 5e-3, torch.complex64: 1e-5}.get(alone["factor"].dtype, 1e-12)
    for name, expected in alone.items():
        torch.testing.assert_close(several[name], expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("strategy", [hr.Mirrored(2), hr.ParameterServer(2, staleness_bound=0)], ids=lambda s: s.name)
@pytest.mark.parametrize("model", MODELS[:2], ids=NAMES[:2])
def test_rare_types_resume(model: partial[Rare], strategy: hr.Strategy, tmp_path: Path) -> None:
    whole = trained(model, strategy, tmp_path / "whole")
    trained(model, strategy, tmp_path / "halves", steps=2)
    resumed = trained(model, strategy, tmp_path / "halves", resume=True)
    for name, expected in whole.items():
        torch.testing.assert_close(resumed[name], expected, rtol=1e-12, atol=1e-12)


def test_averaged_workers_take_them() -> None:
    for strategy in (hr.ParameterAveraging(2, period=2), hr.Gossip(2)):
        assert trained(MODELS[0], strategy)["factor"].dtype == torch.complex128
