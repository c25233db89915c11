"""Digests of tensors, which ranks compare in the place of the tensors themselves."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from headrace.collectives.base import Collective
from headrace.devices import kind_of
from headrace.trees import as_bytes

_CHUNK_BYTES = 32 << 20
"""What a device copies to the host at once: the thread waits once for each copy, and not once for each tensor."""


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Returns a number below 2**32 for each tensor: the CRC of its elements' bytes, in the order of its dims.

    A change of one bit changes it; the order in which the elements lie in memory does not.
    """
    return [zlib.crc32(own.numpy().data) for own in on_host(tensors)]


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


def on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the bytes of each tensor in host memory, flat."""
    chunk: list[Tensor] = []
    held = 0
    for tensor in tensors:
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        dense = dense.resolve_conj().resolve_neg()
        if dense.nbytes >= _CHUNK_BYTES or not kind_of(dense.device.type).streams:
            dense = dense.cpu()
        own = as_bytes(dense.contiguous())
        if chunk and (own.device != chunk[0].device or held + len(own) > _CHUNK_BYTES):
            yield from _copied(chunk)
            chunk, held = [], 0
        if own.device.type == "cpu":
            yield own
        else:
            chunk.append(own)
            held += len(own)
    yield from _copied(chunk)


def _copied(chunk: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.cat(list(chunk)).cpu().split([len(own) for own in chunk]) if chunk else ()
