"""What an optimizer keeps of a model's own parameters, in their sizes and types: small ones may not show it.

Quantised state comes in blocks, of large tensors alone, and rounding to half a precision draws, of half ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.spec.plan import Segment
from headrace.training.optimizer import Factory, build, state_pieces, state_stores
from headrace.trees import Wrapper, tensors_of

WRAPPED = "wrapped"
"""The form of a tensor that is made of others."""


def forms_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Returns the forms of the tensors that it keeps of its parameters, beside the parameters' own."""
    return {
        _form(each, parameter)
        for _, store in state_stores(optimizer)
        for parameter, state in store.items()
        for each in tensors_of(state)
    }


def _form(kept: Tensor, parameter: Tensor) -> str:
    if isinstance(kept, Wrapper):
        return WRAPPED
    kind = "" if kept.is_floating_point() or kept.is_complex() else "whole numbers, "
    if kept.dim() == 0:
        return f"{kind}one"
    return kind + ("every element" if kept.shape in (parameter.shape, (parameter.numel(),)) else f"{kept.dim()} dims")


def without_values(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> tuple[set[str], str] | None:
    """Makes a step over all parameters as they are, but without their memory.

    Returns:
        The forms of what it keeps, and why no checkpoint can hold it, if so; None where a step needs values.
    """
    parameters = [
        (name, nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)) for name, each in named
    ]
    owned = [(Segment(name, 0, each.numel(), 0), each) for name, each in parameters]
    try:
        optimizer = build(factory, parameters)
        for _, each in owned:
            each.grad = torch.empty_like(each) if each.requires_grad else None
        optimizer.step()
        forms = forms_of(optimizer)
    except Exception:  # whatever a step does with values that there are not
        return None
    try:
        state_pieces(optimizer, owned)
    except UsageError as error:
        return forms, str(error)
    return forms, ""
