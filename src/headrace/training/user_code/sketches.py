"""Gradients of a trial, of which large ones are kept as few numbers: no two of them are in memory at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor

Sketch = tuple[Tensor, ...]
"""A gradient, or for each of its dims a vector: the sums over all others, with a weight an element of them."""


def gradients_of(total: Tensor, parameters: Mapping[str, Tensor], large: Collection[str]) -> dict[str, Sketch | None]:
    """Returns the gradient of each parameter, None where it has none; of those that are `large` the vectors."""
    if not large:
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return {name: None if each is None else (each,) for name, each in zip(parameters, found, strict=True)}
    every = list(parameters.values())
    before = [each.grad for each in every]
    sketched: dict[str, Sketch] = {}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        sketched[name] = along(parameter.grad)
        parameter.grad = None

    handles = [
        parameters[name].register_post_accumulate_grad_hook(partial(keep, name))
        for name in parameters.keys() & {*large}
    ]
    for each in every:
        each.grad = None
    try:
        torch.autograd.backward([total], inputs=every)
        whole = {name: (each.grad,) for name, each in parameters.items() if each.grad is not None}
        return {name: sketched.get(name, whole.get(name)) for name in parameters}
    finally:
        for handle in handles:
            handle.remove()
        for each, gradient in zip(every, before, strict=True):
            each.grad = gradient


def along(gradient: Tensor) -> Sketch:
    """Returns the vectors of a gradient: part `i` of that of a dim is of all elements with the place `i` there."""
    return tuple(_vector(gradient, dim) for dim in range(gradient.dim()))


def _vector(gradient: Tensor, kept: int) -> Tensor:
    found = gradient
    for dim in reversed(range(gradient.dim())):
        if dim != kept:
            place = torch.arange(gradient.shape[dim], device=gradient.device, dtype=torch.float32)
            found = torch.tensordot(found, torch.cos(place + dim).to(gradient.dtype), ([dim], [0]))
    return found
