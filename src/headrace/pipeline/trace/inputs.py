"""What a model is called with: the tensors of a batch by their places, and batches of another size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batches import call, examples_of
from headrace.trees import map_leaves, map_tensors, tensors_of


def arguments(batch: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what the model is called with for a batch; `inputs` is as in `Job`."""
    given: tuple[tuple[Any, ...], dict[str, Any]] = call(lambda *args, **kwargs: (args, kwargs), batch, inputs)
    return given


def places(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors in the arguments of a forward, and what else there is, by their places."""
    found: dict[str, Tensor] = {}
    settled: dict[str, Any] = {}

    def put(name: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            found[name] = leaf
        else:
            settled[name] = leaf

    for name, value in inspect.signature(module.forward).bind(*args, **kwargs).arguments.items():
        map_leaves(put, value, name)
    return found, settled


def longer_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the arguments with one example more: the first one again."""
    examples = examples_of([*args, *kwargs.values()])

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:1]]) if tensor.dim() and len(tensor) == examples else tensor

    changed: tuple[tuple[Any, ...], Mapping[str, Any]] = map_tensors(longer, (args, kwargs))
    return changed


def masked_otherwise(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Returns the arguments with other masks: without padding, with some at the end, and with some at the beginning.

    A mask is a tensor `(examples, n)` of zeros and ones. There are none where there is no mask.
    """

    def is_mask(tensor: Tensor) -> bool:
        if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex() or tensor.shape[1] < 3:
            return False
        return bool(((tensor == 0) | (tensor == 1)).all())

    def without(tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor) if is_mask(tensor) else tensor

    def padded(tensor: Tensor, column: int) -> Tensor:
        if not is_mask(tensor):
            return tensor
        made = torch.ones_like(tensor)
        made[0, column] = 0
        return made

    if not any(is_mask(tensor) for tensor in tensors_of((args, kwargs))):
        return []
    return [
        map_tensors(change, (args, kwargs))
        for change in (without, lambda each: padded(each, -1), lambda each: padded(each, 0))
    ]


def form(tensors: Mapping[str, Any], settled: Mapping[str, Any]) -> str:
    others = [f"{name}={value!r:.40}" for name, value in settled.items()]
    return ", ".join([*tensors, *others]) or "nothing"
