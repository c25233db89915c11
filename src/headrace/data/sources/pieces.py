"""Finding an example among files or parts of them, and keeping in memory what may be asked for again."""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Spans:
    """Consecutive pieces of given lengths; `begins` has the first example of each and, last, the total."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self.begins = tuple(accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return self.begins[-1]

    def find(self, index: int) -> tuple[int, int]:
        """Returns the piece that has an example, and the example's number there."""
        # The last piece that begins there has it, since those before it are empty.
        which = bisect_right(self.begins, index) - 1
        return which, index - self.begins[which]


class BoundedCache(Generic[T]):
    """An LRU cache for threads, bounded by the sum of `size(value)`; one value alone may exceed the bound.

    A pickled copy begins empty; a fork keeps the values.
    """

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self._most = most
        self._size = size
        self._begin()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the value of a key. If it is missing, one thread makes it; others that want it wait."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                self._bytes += self._size(value)
                while self._bytes > self._most and len(self._values) > 1:
                    self._bytes -= self._size(self._values.popitem(last=False)[1])
                self._making.pop(key, None)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {"_most": self._most, "_size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._bytes = 0
        self.reset_locks()
        _ALL.add(self)

    def reset_locks(self) -> None:
        """Makes new locks: in a fork, the old ones may be held by threads that it does not have."""
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()


_ALL: weakref.WeakSet[BoundedCache[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_ALL):
        cache.reset_locks()


os.register_at_fork(after_in_child=_after_fork)
