"""Bytes that a worker's batches may take: those that are being read, that wait, that somebody still holds."""

from __future__ import annotations

import threading


class MemoryBudget:
    """Whoever hands out work reserves, whoever has read corrects, and what nobody holds any more is released.

    Where nothing is being read or waits, a reservation is granted, however large: else a batch that is larger than
    the limit would never come.

    Args:
        limit: bytes.

    Attributes:
        reserved: bytes.
        most: the largest that `reserved` has been.
    """

    def __init__(self, limit: int) -> None:
        self.reserved = 0
        self.most = 0
        self._limit = limit
        self._open = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int | None) -> bool:
        """Returns whether so many bytes are now reserved, for a batch that is to be read.

        Args:
            nbytes: None where nobody knows: such a batch is read alone.
        """
        with self._lock:
            if self._open and (nbytes is None or self.reserved + nbytes > self._limit):
                return False
            self._open += 1
            self._add(nbytes or 0)
            return True

    def correct(self, before: int, after: int) -> None:
        """Says how many bytes a reservation is of, when that is known."""
        with self._lock:
            self._add(after - before)

    def hand_over(self) -> None:
        """Says that a batch has been taken; whoever took it holds its bytes still."""
        with self._lock:
            self._open -= 1

    def release(self, nbytes: int) -> None:
        """Gives back what nobody holds any more."""
        with self._lock:
            self._add(-nbytes)

    def _add(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most = max(self.most, self.reserved)
