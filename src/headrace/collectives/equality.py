"""Whether ranks hold the same values: digests of their tensors, compared by their group."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.collectives.base import Collective
from headrace.collectives.digest import digests

Named = Sequence[tuple[str, Tensor]]
"""Dense tensors by name, in the same order on all ranks."""


@dataclass(frozen=True)
class Difference:
    """The first tensor of which a rank holds other values than most ranks of its group.

    Attributes:
        rank, reference: in the group: the one that differs, and the first of those that most ranks are like.
        elements, of: how many elements differ, of how many.
        largest: the largest absolute difference; NaN where one side has a NaN.
        others: how many tensors behind it differ, too.
    """

    name: str
    rank: int
    reference: int
    elements: int
    of: int
    largest: float
    others: int

    def __str__(self) -> str:
        count = f"{self.elements:,} of {self.of:,} element{'s' if self.of > 1 else ''}"
        more = f", and {self.others} more tensor{'s' if self.others > 1 else ''}" if self.others else ""
        return f"{self.name!r} ({count}, by up to {self.largest:.3g}){more}"


def find_difference(tensors: Named, group: Collective) -> Difference | None:
    """Compares the ranks' values of tensors of the same names, shapes and types; every rank of the group calls it."""
    if group.world == 1 or not tensors:
        return None
    own = np.array(digests(tensor for _, tensor in tensors), dtype="<u4")
    every = group.sum([float(zlib.crc32(own.data)) if rank == group.rank else 0.0 for rank in range(group.world)])
    if len({*every}) == 1:
        return None
    rows = group.gather(torch.from_numpy(own.view(np.uint8).copy())).numpy().view("<u4")
    index, *others = np.flatnonzero((rows != rows[0]).any(axis=0)).tolist()
    column = rows[:, index].tolist()
    usual = Counter(column).most_common(1)[0][0]
    rank = next(rank for rank, value in enumerate(column) if value != usual)
    reference = column.index(usual)
    name, tensor = tensors[index]
    elements, largest = _apart(tensor, reference, group)
    # Two ranks that differ from the rest may do so in other ways: what is said is said of the first.
    elements, largest = group.sum([elements, largest] if group.rank == rank else [0.0, 0.0])
    return Difference(name, rank, reference, int(elements), tensor.numel(), largest, len(others))


def _apart(tensor: Tensor, reference: int, group: Collective) -> tuple[float, float]:
    """Returns how many elements differ from those of another rank, and by how much at most."""
    own = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    # As bytes, of which the other ranks add zeros.
    theirs = own.clone() if group.rank == reference else torch.zeros_like(own)
    group.all_reduce(theirs)
    mine, other = (each.view(tensor.dtype).view(-1, 1) for each in (own, theirs))
    differ = (mine.view(torch.uint8) != other.view(torch.uint8)).any(dim=1)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    apart = (mine.to(wide) - other.to(wide)).abs()
    return float(differ.sum()), float(apart.max())
