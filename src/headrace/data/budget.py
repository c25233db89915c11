"""Bytes that a worker's batches may take, all of them that are being read or wait."""

from __future__ import annotations

import threading

__all__ = ["Budget"]


class Budget:
    """Reservations are made and corrected by the thread that hands out work, and given back by who has done with it.

    One reservation is always granted, however large: else a batch that is larger than the limit would never come.

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
        self._count = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> bool:
        """Returns whether so many bytes are now reserved."""
        with self._lock:
            if self._count and self.reserved + nbytes > self._limit:
                return False
            self._count += 1
            self._add(nbytes)
            return True

    def correct(self, before: int, after: int) -> None:
        """Says how many bytes a reservation is of, when that is known."""
        with self._lock:
            self._add(after - before)

    def release(self, nbytes: int) -> None:
        """Gives a reservation back."""
        with self._lock:
            self._count -= 1
            self._add(-nbytes)

    def _add(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most = max(self.most, self.reserved)
