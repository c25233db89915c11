"""Where the bytes of a cache lie: a seam, and the memory of this process behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_CHUNK = 64 << 20
_REMEMBERED = 16
"""Bytes of the table that a record is found by."""


ENTRY = np.dtype([("index", "<u8"), ("offset", "<u8"), ("generation", "<u8"), ("checksum", "<u8")])
"""Where a record lies in a shard: the index of its example, its first byte, its generation; and what proves it."""


class Shards(ABC):
    """Records one after the other, in pieces. One thread at a time may call `append` and `news`."""

    @abstractmethod
    def append(self, records: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
        """Keeps records; returns shard and offset of each.

        Raises:
            OSError: there is no room for them.
        """

    @abstractmethod
    def news(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yields shards and the entries, `(records,)` of `ENTRY`, that others have added since this was asked last."""

    @abstractmethod
    def buffer(self, shard: int, end: int) -> NDArray[np.uint8]:
        """Returns a shard's bytes, not to be written to: at least to before `end`, if it has so many."""

    @abstractmethod
    def name(self, shard: int) -> str:
        """Returns what messages call a shard."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all records, and of what is needed to find them."""


class MemoryShards(Shards):
    """Args:
    limit: bytes that they will have at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: list[NDArray[np.uint8]] = []
        self._used = 0
        self._full = 0
        self._count = 0

    def append(self, records: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
        places = []
        for record in records:
            if not self._chunks or self._used + len(record) > len(self._chunks[-1]):
                left = self._limit - self.nbytes
                # A system gives memory when it is written to, so that a chunk costs what it holds.
                self._full += self._used
                self._used = 0
                self._chunks.append(np.empty(max(len(record), min(_CHUNK, left)), dtype=np.uint8))
            self._chunks[-1][self._used : self._used + len(record)] = record
            places.append((len(self._chunks) - 1, self._used))
            self._used += len(record)
            self._count += 1
        return places

    def news(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        return iter(())

    def buffer(self, shard: int, end: int) -> NDArray[np.uint8]:
        return self._chunks[shard]

    def name(self, shard: int) -> str:
        return "memory"

    @property
    def nbytes(self) -> int:
        return self._full + self._used + self._count * _REMEMBERED
