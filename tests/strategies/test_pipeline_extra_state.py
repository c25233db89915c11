"""Modules with `get_extra_state` in stages: what forward has counted is in checkpoints and in the trained model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.strategies import Strategy
from strategies.contract_models import SGD


class Counting(nn.Module):
    """Counts its forwards in an attribute, and in a dictionary, which no recorder sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forwards = 0
        self.seen = {"examples": 0, "last": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.seen["examples"] += len(x)
        self.seen["last"] = x.detach().mean()
        return torch.tanh(self.linear(x))

    def get_extra_state(self) -> dict[str, Any]:
        return {"forwards": self.forwards, "seen": dict(self.seen)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.forwards, self.seen = state["forwards"], dict(state["seen"])


class Twice(nn.Module):
    """Calls one of its counting modules twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.counting = Counting(6)
        self.between = nn.Linear(6, 6)
        self.other = Counting(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.counting(self.counting(self.first(x))))
        return self.last(self.other(hidden))


class Stateful(nn.Module):
    """Has extra state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.counting, self.last = nn.Linear(4, 6), Counting(6), nn.Linear(6, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.last(self.counting(self.first(x)))

    def get_extra_state(self) -> int:
        return self.forwards

    def set_extra_state(self, state: int) -> None:
        self.forwards = state


def states(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if isinstance(part, Counting):
            last = float(part.seen["last"])
            found[name] = (part.forwards, part.seen["examples"], pytest.approx(last, abs=1e-6))
        elif isinstance(part, Stateful):
            found[name] = part.forwards
    return found


def resumed(model: type[nn.Module], strategy: Strategy, run_dir: Path) -> dict[str, Any]:
    """Trains an epoch, and another one from the checkpoint."""
    draw = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, generator=draw), torch.tensor(index % 3)) for index in range(11)]
    job = partial(hr.Job, model=model, loss=nn.functional.cross_entropy, data=rows, global_batch_size=4, optimizer=SGD)
    run = partial(hr.fit, strategy=strategy, device="cpu", engine=hr.ThreadEngine(), run_dir=run_dir, check=False)
    run(job(epochs=1))
    return states(run(job(epochs=2), resume=True).model)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Twice, Stateful])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_extra_state_of_all_stages_is_saved_and_resumed(model: type[nn.Module], recompute: str, tmp_path: Path) -> None:
    staged = resumed(model, hr.Pipeline(3, micro_batches=1, recompute=recompute), tmp_path / "staged")
    assert staged == resumed(model, hr.OneDevice(), tmp_path / "one")
