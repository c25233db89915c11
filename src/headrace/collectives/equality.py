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
from headrace.trees import as_bytes

Named = Sequence[tuple[str, Tensor]]
"""Dense tensors by name, in the same order on all ranks."""


@dataclass(frozen=True)
class Difference:
    """The first tensor of which a rank holds other values than most ranks of its group.

    Attributes:
        rank, reference: in the group: the one that differs most, and the first of those that most ranks are like.
        elements, of: how many elements differ, of how many.
        largest: the largest absolute difference; NaN where one side has a NaN.
    """

    name: str
    rank: int
    reference: int
    elements: int
    of: int
    largest: float

    def __str__(self) -> str:
        count = f"{self.elements:,} of {self.of:,} element{'s' if self.of > 1 else ''}"
        return f"{self.name!r} ({count}, by up to {self.largest:.3g})"


def find_difference(tensors: Named, group: Collective, rounding: float = 0.0) -> Difference | None:
    """Compares the ranks' values of tensors of the same names, shapes and types; every rank of the group calls it.

    Values that differ by up to `rounding` of a tensor's largest absolute value are the same.
    """
    if group.world == 1 or not tensors:
        return None
    own = np.array(digests(tensor for _, tensor in tensors), dtype="<u4")
    every = group.sum([float(zlib.crc32(own.data)) if rank == group.rank else 0.0 for rank in range(group.world)])
    if len({*every}) == 1:
        return None
    rows = group.gather(torch.from_numpy(own.view(np.uint8).copy())).numpy().view("<u4")
    for index in np.flatnonzero((rows != rows[0]).any(axis=0)).tolist():
        column = rows[:, index].tolist()
        reference = column.index(Counter(column).most_common(1)[0][0])
        name, tensor = tensors[index]
        elements, largest, scale = _apart(tensor, reference, group)
        rank = int(largest.argmax())
        if not largest[rank] <= rounding * scale:
            return Difference(name, rank, reference, int(elements[rank]), tensor.numel(), float(largest[rank]))
    return None


def _apart(tensor: Tensor, reference: int, group: Collective) -> tuple[Tensor, Tensor, float]:
    """Compares a tensor with that of a rank.

    Returns by rank how many elements differ, and by how much at most; and the largest absolute value of that rank's.
    """
    own = as_bytes(tensor.detach().cpu().contiguous())
    # As bytes, of which the other ranks add zeros.
    theirs = own.clone() if group.rank == reference else torch.zeros_like(own)
    group.all_reduce(theirs)
    mine, other = (each.view(tensor.dtype).view(-1, 1) for each in (own, theirs))
    differ = (mine.view(torch.uint8) != other.view(torch.uint8)).any(dim=1)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    mine, other = mine.to(wide), other.to(wide)
    found = torch.zeros(group.world, 2, dtype=torch.float64)
    found[group.rank] = torch.stack([differ.sum().double(), (mine - other).abs().max()])
    elements, largest = torch.tensor(group.sum(found.flatten().tolist())).view(-1, 2).t()
    return elements, largest, float(other.abs().max())
