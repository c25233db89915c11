"""Which values of a batch have tokens, and where: what goes to the model is divided, what comes back is joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import Collective
from headrace.context_parallel.placement import Zigzag
from headrace.errors import DataError, UsageError
from headrace.trees import as_bytes, map_leaves, tensors_of

_REMEDY = "leave it out, or use mirrored"


def form_of(given: Any) -> tuple[int, int]:
    """Returns `(examples, tokens)` of what a model is given: those of its first tensor with two dims.

    Raises:
        UsageError: there is none.
    """
    first = next((tensor for tensor in tensors_of(given) if tensor.dim() > 1), None)
    if first is None:
        raise UsageError(
            "context_parallel divides the second dim of what the model is given, (examples, tokens, ...), and it is "
            "given no tensor with two dims; use mirrored"
        )
    return len(first), first.shape[1]


def dim_of(name: str, tensor: Tensor, examples: int, tokens: int) -> int | None:
    """Returns the dim of a tensor in which a sequence is divided; None where it stays whole.

    Raises:
        DataError: it is not known, from the shape.
    """
    shape = tuple(tensor.shape)
    if not shape or (len(shape) == 1 and len(tensor) == examples != tokens):
        return None
    if len(shape) == 1 and tokens == len(tensor) != examples:
        return 0
    # A mask of pairs keeps all its columns: they are the keys.
    pairs = len(shape) != 3 and shape[-2:] == (tokens, tokens)
    found = {dim for dim in (1, len(shape) - 2) if shape[dim] == tokens and (dim == 1 or pairs)} if shape[1:] else set()
    if len(shape) == 2 and pairs:
        found = {1} if examples == tokens else {0}
    if len(found) == 1:
        return found.pop()
    raise DataError(
        f"{name} has the shape {shape}, and context_parallel divides sequences of {tokens} tokens of {examples} "
        f"examples: it is not known which dim they are; {_REMEDY}"
    )


def counted(args: Any, kwargs: Any) -> int | None:
    """Returns n where `torch.arange` is called for the numbers from 0 to n - 1; None where it is for others."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    values = {"start": 0, "step": 1} | dict(zip(names, args, strict=False)) | kwargs
    end = values.get("end")
    whole = isinstance(end, int) and (values["start"], values["step"]) == (0, 1)
    return end if whole else None


def divide(given: Any, place: Zigzag, examples: int) -> Any:
    """Returns what this rank's model is given of a whole batch."""

    def part(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = dim_of(name, leaf, examples, place.length)
        return leaf if dim is None else place.take(leaf, dim)

    return map_leaves(part, given, "the model's input")


def join(output: Any, place: Zigzag, collective: Collective, dims: Sequence[int]) -> Any:
    """Returns a model's output with all ranks' tokens, of each tensor in its dim; a rank's gradient comes of its own.

    Raises:
        UsageError: something has no tokens.
    """
    left = iter(dims)

    def whole(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = next(left, 1)
        require_tokens(name, leaf, place, dim)
        return _Joined.apply(leaf, place, collective, dim)  # type: ignore[no-untyped-call]

    return map_leaves(whole, output, "the model's output")


def dims_of(output: Any, whole: Sequence[Tensor], place: Zigzag) -> tuple[int, ...]:
    """Returns in which dim each tensor of a divided output has tokens, by the whole one; 1 where it has none."""
    found = []
    for part, right in zip(tensors_of(output), whole, strict=False):
        differ = [dim for dim, sizes in enumerate(zip(part.shape, right.shape, strict=False)) if sizes[0] != sizes[1]]
        found.append(differ[0] if differ and part.dim() == right.dim() else 1)
    return tuple(found)


def require_tokens(name: str, leaf: Tensor, place: Zigzag, dim: int = 1) -> None:
    """Raises a UsageError unless an output has this rank's tokens in a dim."""
    if leaf.dim() <= dim or leaf.shape[dim] != place.local:
        raise UsageError(
            f"{name} has the shape {tuple(leaf.shape)}, and context_parallel needs one entry for each token, "
            f"(examples, tokens, ...): this worker has {place.local} of {place.length}; a model that ends in one "
            "vector an example, or computes its own loss, needs mirrored (of a language model leave out labels, and "
            "use hr.tasks.language_model())"
        )


def sum_of_parts(part: Tensor, collective: Collective) -> Tensor:
    """Returns the sum of all ranks' parts of a number; each rank's gradient comes of its own."""
    total: Tensor = _SumOfParts.apply(part, collective)  # type: ignore[no-untyped-call]
    return total


def require_last_derivative() -> None:
    """Raises a UsageError in a backward pass that is to be differentiated, whose graph would lack other ranks' part."""
    if torch.is_grad_enabled():
        raise UsageError(
            "a derivative of a derivative (torch.autograd.grad(..., create_graph=True), a penalty on gradients) goes "
            "through tokens of all workers, and context_parallel has none for that; use mirrored"
        )


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, place: Zigzag, collective: Collective, dim: int) -> Tensor:
        ctx.place, ctx.dim = place, dim
        dense = local.contiguous()
        every = collective.gather(as_bytes(dense))
        return place.join([each.view(dense.dtype).view(dense.shape) for each in every.unbind()], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        require_last_derivative()
        place: Zigzag = ctx.place
        added = place.positions(gradients[0].device) >= place.length
        own = place.take(gradients[0], ctx.dim)
        return own.masked_fill(added.view(-1, *[1] * (own.dim() - 1 - ctx.dim)), 0.0), None, None, None


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, collective: Collective) -> Tensor:
        total = part.clone()
        collective.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        require_last_derivative()
        return gradients[0], None
