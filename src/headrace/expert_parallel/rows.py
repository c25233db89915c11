"""Rows of tensors that travel between ranks, and whose gradients travel back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import Collective, ProcessGroup

Sizes = Sequence[Sequence[int]]
"""How many rows rank s sends to rank t, as `sizes[s][t]`; the same on all ranks."""


class RowLink:
    """The ranks among which experts are divided; all do the same exchanges in the same order, forward and backward.

    Args:
        group: the ranks, which tell each other how many rows they send.
        carrier: moves the rows.

    Attributes:
        silent: whether this rank sends no rows of its own: it takes part for the others' sake.
    """

    def __init__(self, group: ProcessGroup, carrier: Collective) -> None:
        self.group, self.carrier = group, carrier
        self.rank, self.world = group.rank, group.world
        self.silent = False

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Sends no rows of its own meanwhile."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Returns every rank's few whole numbers, by rank."""
        return [[int(each) for each in row] for row in self.group.gather_numbers([float(each) for each in own])]


def send(link: RowLink, sizes: Sizes, tensors: Sequence[Tensor], after: Tensor | None = None) -> tuple[Tensor, ...]:
    """Sends rows of tensors, which are in the order of the ranks they go to; returns those that came, by rank.

    `after` is what the rows were made of, if they may be none: backward comes from here to there in any case, because
    the other ranks wait in it.
    """
    if after is None:
        after = torch.zeros((), device=tensors[0].device, requires_grad=True)
    given: tuple[Tensor, ...] = _Rows.apply(link, sizes, after, *tensors)  # type: ignore[no-untyped-call]
    return given


def gather_rows(link: RowLink, own: Tensor) -> Tensor:
    """Returns the rows of all ranks, by rank; a gradient goes to the rank whose row it is, from all."""
    own = own[:0] if link.silent else own
    counts = [row[0] for row in link.numbers([len(own)])]
    sizes = [[count] * link.world for count in counts]
    (every,) = send(link, sizes, [own.repeat(link.world, *(1 for _ in own.shape[1:]))])
    return every


def transposed(sizes: Sizes) -> list[list[int]]:
    return [list(column) for column in zip(*sizes, strict=True)]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: RowLink, sizes: Sizes, after: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.sizes = link, sizes
        given = _travel(link, sizes, tensors)
        ctx.floats = [each.is_floating_point() for each in tensors]
        ctx.mark_non_differentiable(*(each for each, real in zip(given, ctx.floats, strict=True) if not real))
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        real = [each for each, floats in zip(gradients, ctx.floats, strict=True) if floats]
        back = iter(send(ctx.link, transposed(ctx.sizes), real))
        return None, None, None, *(next(back) if floats else None for floats in ctx.floats)


def _travel(link: RowLink, sizes: Sizes, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sends all tensors' bytes of a row as one."""
    count = len(tensors[0])
    widths = [math.prod(each.shape[1:]) * each.element_size() for each in tensors]
    packed = (
        torch.cat([each.detach().reshape(count, -1 if count else 0).view(torch.uint8) for each in tensors], 1)
        if (count)
        else tensors[0].new_empty(0, sum(widths), dtype=torch.uint8)
    )
    pieces = [each.reshape(-1) for each in packed.split(list(sizes[link.rank]))]
    nbytes = [[rows * sum(widths) for rows in row] for row in sizes]
    every = torch.cat(link.carrier.all_to_all_uneven(pieces, nbytes)).view(-1, sum(widths))
    columns = every.split(widths, 1)
    given = tuple(
        column.contiguous().view(each.dtype).view(len(every), *each.shape[1:])
        for column, each in zip(columns, tensors, strict=True)
    )
    if not link.carrier.alike:
        return given
    # What a token chooses has values in a plan of memory, and its bytes have none.
    kept = [each.split(list(sizes[link.rank]))[link.rank] for each in tensors]
    pairs = zip(given, kept, strict=True)
    return tuple(each if each.is_floating_point() else torch.cat([own] * link.world) for each, own in pairs)
