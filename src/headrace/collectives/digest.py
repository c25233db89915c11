"""Digests of tensors, which ranks compare in the place of the tensors themselves."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headrace.collectives.base import Collective


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Returns a number below 2**32 for each tensor: the CRC of its elements' bytes, in the order of its dims.

    A change of one bit changes it; the order in which the elements lie in memory does not.
    """
    return [_digest(tensor.detach()) for tensor in tensors]


def ranks_apart(own: Sequence[int], collective: Collective) -> tuple[int, int] | None:
    """Compares the digests of all ranks, whose number is the same on each; all ranks call it together.

    Returns the first place at which some rank has another digest than rank 0, and the first such rank; None where all
    are equal.
    """
    if not own:
        return None
    rows = collective.gather(torch.tensor(own, dtype=torch.int64).view(torch.uint8)).view(torch.int64)
    places = (rows != rows[0]).nonzero()
    if not len(places):
        return None
    place = int(places[:, 1].min())
    return place, int(places[places[:, 1] == place, 0].min())


def _digest(tensor: Tensor) -> int:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
