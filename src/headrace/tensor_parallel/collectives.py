"""Where activations go from one device's to all devices', or back: collectives with a gradient.

A value is *whole* (the same on every rank) or *split* (each rank has its slice along one dim). Each crossing changes
the one into the other, and its backward changes gradients back (Shoeybi et al., "Megatron-LM", 2019, section 3, calls
the first two f and g):

    crossing   forward                          backward
    copy_to        whole -> whole: nothing         sum over ranks
    reduce_from    parts of a sum -> whole: sum    nothing
    gather_from    split -> whole: all-gather      take one's slice: every rank has the same gradient
    scatter_to     whole -> split: take one's      all-gather
    all_gather_to  split -> whole: all-gather      sum over ranks, each gets its slice (reduce-scatter)
    reduce_scatter_from  parts of a sum -> split: reduce-scatter    all-gather

After `copy_to` and `all_gather_to` each rank computes something else from the whole value, so the gradients differ and
are summed. After `reduce_from` and `gather_from` all ranks compute the same. Each backward is the crossing of the other
direction, with a gradient of its own, so that forward may differentiate (`create_graph=True`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import Collective
from headrace.trees import as_bytes


def copy_to(x: Tensor, group: Collective) -> Tensor:
    """Returns a whole value whose gradients are summed over ranks."""
    entered: Tensor = _CopyTo.apply(group, x)[0]  # type: ignore[no-untyped-call]
    return entered


def copy_all_to(tensors: Sequence[Tensor], group: Collective) -> tuple[Tensor, ...]:
    """Does so for several whole values, whose gradients travel as one."""
    entered: tuple[Tensor, ...] = _CopyTo.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return entered


def reduce_from(x: Tensor, group: Collective) -> Tensor:
    """Returns the sum of all ranks' tensors."""
    total: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def gather_from(x: Tensor, dim: int, group: Collective, length: int | None = None) -> Tensor:
    """Returns all ranks' slices along `dim` as one; `length` is that of the whole where slices may differ by one."""
    whole: Tensor = _GatherFrom.apply(x, dim, group, length, False)  # type: ignore[no-untyped-call]
    return whole


def all_gather_to(x: Tensor, dim: int, group: Collective, length: int | None = None) -> Tensor:
    """Does so where each rank goes on with other work."""
    whole: Tensor = _GatherFrom.apply(x, dim, group, length, True)  # type: ignore[no-untyped-call]
    return whole


def scatter_to(x: Tensor, dim: int, group: Collective) -> Tensor:
    """Returns this rank's slice along `dim` of a whole value."""
    own: Tensor = _ScatterTo.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return own


def reduce_scatter_from(x: Tensor, dim: int, group: Collective) -> Tensor:
    """Returns this rank's slice along `dim` of the sum of all ranks' tensors."""
    own: Tensor = _ReduceScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return own


def rows(length: int, rank: int, world: int) -> tuple[int, int]:
    """Returns `[start, stop)` of a rank's slice of so many; those of the first ranks may be longer by one."""
    each, more = divmod(length, world)
    return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)


def all_gather(x: Tensor, dim: int, group: Collective, length: int | None = None) -> Tensor:
    """Returns all ranks' slices as one, without a gradient."""
    world = group.world
    length = x.shape[dim] * world if length is None else length
    longest = -(-length // world)
    front = x.detach().movedim(dim, 0).contiguous()
    shape = (longest, *front.shape[1:])
    if len(front) < longest:
        front = torch.cat([front, front.new_zeros(longest - len(front), *front.shape[1:])])
    if not front.numel():
        # An empty share of a batch, on all ranks alike.
        return x.new_zeros([length if index == dim % x.dim() else each for index, each in enumerate(x.shape)])
    every = group.gather(as_bytes(front)).view(front.dtype).view(world, *shape)
    slices = [each[: stop - start] for each, (start, stop) in zip(every, _all_rows(length, world), strict=True)]
    # Contiguous, as a whole layer's output is: `view` and `view_as_complex` ask for that.
    return torch.cat([each.movedim(0, dim) for each in slices], dim)


def _reduce_scatter(x: Tensor, dim: int, group: Collective) -> Tensor:
    world, length = group.world, x.shape[dim]
    front = x.movedim(dim, 0)
    longest = -(-length // world)
    given = x.new_zeros(world, longest, *front.shape[1:])
    for slot, (start, stop) in zip(given, _all_rows(length, world), strict=True):
        slot[: stop - start] = front[start:stop]
    if not given.numel():
        return torch.zeros_like(_own(x, dim, group))
    got = group.all_to_all(given.view(world, -1).view(torch.uint8)).contiguous().view(x.dtype).view_as(given)
    start, stop = rows(length, group.rank, world)
    total = got[0, : stop - start].clone()
    for other in got[1:]:
        total += other[: stop - start]
    return total.movedim(0, dim)


def _all_rows(length: int, world: int) -> list[tuple[int, int]]:
    return [rows(length, rank, world) for rank in range(world)]


def _own(x: Tensor, dim: int, group: Collective) -> Tensor:
    start, stop = rows(x.shape[dim], group.rank, group.world)
    return x.narrow(dim, start, stop - start)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if torch.is_grad_enabled():
            flat = reduce_from(flat, ctx.group)
        else:
            # In place, without a copy.
            ctx.group.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        total = x.contiguous().clone()
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return copy_to(gradients[0], ctx.group), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Collective, length: int | None, sums: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.sums = dim, group, sums
        return all_gather(x, dim, group, length)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _ReduceScatter.apply if ctx.sums else _ScatterTo.apply
        return back(gradients[0], ctx.dim, ctx.group), None, None, None, None  # type: ignore[no-untyped-call]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Collective) -> Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_to(gradients[0], ctx.dim, ctx.group, ctx.length), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Collective) -> Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, x.shape[dim]
        return _own(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gather_from(gradients[0], ctx.dim, ctx.group, ctx.length), None, None
