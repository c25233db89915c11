"""Can each process of a script update some of the parameters? An optimizer may look at all of them together."""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UsageError

_REMEDY = "use strategy='mirrored', where each process updates all"
_STEPS = 2
"""The second has the state of the first."""


def require_separable(optimizer: torch.optim.Optimizer, owned: Container[int]) -> None:
    """Tries a copy of an optimizer over all parameters, and one over those with the ids `owned`.

    Raises:
        UsageError: they update these in different ways, or cannot be tried.
    """
    # torch's own, but for LBFGS, update each parameter by itself.
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    name = type(optimizer).__name__
    try:
        every, before, _ = _stepped(optimizer, None)
        alone, _, places = _stepped(optimizer, owned)
    except Exception as error:
        said = " ".join(str(error).split())
        raise UsageError(
            f"{name} cannot be tried before the start ({type(error).__name__}: {said:.200}), so whether each process "
            f"may update some of the parameters by itself is not known; {_REMEDY}"
        ) from error
    if any(not torch.equal(alone[place], (every if place in places else before)[place]) for place in range(len(alone))):
        raise UsageError(
            f"{name} updates a parameter by what it sees of others, or without a gradient, and under central_storage "
            f"each process has the gradients of those that it updates; {_REMEDY}"
        )


def _stepped(
    optimizer: torch.optim.Optimizer, owned: Container[int] | None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Returns copies of the parameters after steps on random gradients and before, and the places of the gradients."""
    memo: dict[int, Any] = {}
    other = object.__new__(type(optimizer))
    # A schedule stands in for `step`, and would step the original.
    vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items() if name != "step"})
    originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = [parameter for group in other.param_groups for parameter in group["params"]]
    places = [place for place, original in enumerate(originals) if owned is None or id(original) in owned]
    drawn = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        gradients = [torch.randn(each.shape, generator=drawn, dtype=torch.float64).to(each.dtype) for each in copies]
        for place, parameter in enumerate(copies):
            parameter.grad = gradients[place] if place in places else None
        other.step()
    return [parameter.detach() for parameter in copies], [original.detach() for original in originals], places
