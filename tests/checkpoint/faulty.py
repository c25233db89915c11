"""A storage that fails where it is told to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from headrace.checkpoint import File, Storage

__all__ = ["FaultyStorage"]


class FaultyStorage(Storage):
    """Wraps a storage: one operation, or that and all that follow, raise OSError; or writes take only a part.

    Args:
        inner: does what does not fail.
        number: of the error, an `errno`; 0 for a write that takes half of what it is given.
        first: the operation that fails, counted from 0; opening, reading, writing, closing a file are operations, too.
        lasting: whether all that follow fail, until `repair`.
    """

    def __init__(self, inner: Storage, number: int, first: int, lasting: bool = False) -> None:
        self.inner = inner
        self.struck = False
        self._number, self._left, self._lasting = number, first, lasting

    def repair(self) -> None:
        """Lets nothing fail any more."""
        self._number = -1

    def strike(self) -> bool:
        """Counts an operation; raises where it is to fail; returns whether it is to be done by half."""
        self._left -= 1
        if self._number < 0 or not (self._left == -1 or (self._lasting and self._left < 0)):
            return False
        self.struck = True
        if self._number:
            raise OSError(self._number, os.strerror(self._number))
        return True

    def prepare(self) -> None:
        self._do(self.inner.prepare)

    def entries(self, folder: str) -> Iterator[str]:
        self.strike()
        yield from self.inner.entries(folder)

    def make_folder(self, folder: str) -> None:
        self._do(lambda: self.inner.make_folder(folder))

    def create(self, place: str) -> File:
        self.strike()
        return _FaultyFile(self, self.inner.create(place))

    def open(self, place: str) -> File:
        self.strike()
        return _FaultyFile(self, self.inner.open(place))

    def rename(self, old: str, new: str) -> None:
        self._do(lambda: self.inner.rename(old, new))

    def sync(self, folder: str) -> None:
        self._do(lambda: self.inner.sync(folder))

    def delete_file(self, place: str) -> None:
        self._do(lambda: self.inner.delete_file(place))

    def delete_folder(self, folder: str) -> None:
        self._do(lambda: self.inner.delete_folder(folder))

    def _do(self, operation: Callable[[], None]) -> None:
        self.strike()
        operation()


class _FaultyFile(File):
    def __init__(self, storage: FaultyStorage, inner: File) -> None:
        self._storage, self._inner = storage, inner

    def size(self) -> int:
        return self._inner.size()

    def read(self, buffer: memoryview) -> int:
        half = self._storage.strike()
        return self._inner.read(buffer[: (len(buffer) + 1) // 2] if half else buffer)

    def write(self, data: memoryview) -> int:
        half = self._storage.strike()
        return self._inner.write(data[: (len(data) + 1) // 2] if half else data)

    def sync(self) -> None:
        self._storage.strike()
        self._inner.sync()

    def close(self) -> None:
        # The descriptor is gone even where closing it fails.
        self._inner.close()
        self._storage.strike()
