"""What counts calls, in a loss, a hook or a variable, is said before it acts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.api.probes.carried_state import probe_carried_state
from headrace.api.probes.parts.sample import Sample
from headrace.training.user_code.objective import Objective

BATCH = torch.rand(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
ENTROPY = nn.functional.cross_entropy
CALLS = 0


class OfAll:
    """A loss that counts in its class."""

    calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        OfAll.calls += 1
        return nn.functional.cross_entropy(output, target) * (2 if OfAll.calls > 99 else 1)


def globally(output: Tensor, target: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return nn.functional.cross_entropy(output, target) * (2 if CALLS > 99 else 1)


def counting_by(counts: Iterator[int]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: nn.functional.cross_entropy(output, target) * (2 if next(counts) > 99 else 1)


def hooked(how: str) -> nn.Module:
    model, calls = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), [0]

    def change(*given: Any) -> None:
        calls[0] += 1
        if calls[0] > 99:
            handle.remove()

    def hang(*given: Any) -> None:
        if given[2].requires_grad:
            given[2].register_hook(change)

    register = model[1].register_forward_hook if how == "tensor" else getattr(model[1], f"register_{how}_hook")
    handle = register(hang if how == "tensor" else change)
    return model


@pytest.mark.parametrize(
    ("model", "loss", "where"),
    [
        (nn.Linear(4, 3), OfAll(), ["the loss's 'calls'"]),
        (nn.Linear(4, 3), globally, ["the loss's 'CALLS'"]),
        (nn.Linear(4, 3), counting_by(itertools.count()), ["the loss's 'counts'"]),
        *((hooked(how), ENTROPY, ["the model's 'calls'"]) for how in ("forward", "full_backward", "tensor")),
        (nn.BatchNorm1d(4), ENTROPY, []),
    ],
)
def test_what_counts_calls_is_said_wherever_it_is(model: nn.Module, loss: Any, where: list[str]) -> None:
    found = probe_carried_state(Sample(model, BATCH, Objective(loss)))
    assert [each.where for each in found if "each call changes this number" in each.what] == where
    assert (CALLS, OfAll.calls) == (0, 0)
