"""Where the rows of a table are, from ids to slots; and which it drops when it holds as many as it may.

A row has been used by each update that had a gradient for it. Two numbers are kept of it: the last update of the table
that used it, and how many did.

    "age"      the rows whose last use is the longest ago go first; of equal ones those with fewer uses
    "count"    the rows with the fewest uses go first; of equal ones those whose last use is the longest ago
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FREE, _GONE = -1, -2
_LEAST = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: Knuth, "The art of computer programming", volume 3, section 6.4."""

_Numbers = NDArray[np.int64]


class RowIndex(ABC):
    """The slots of rows; all arguments are int64, and ids in one call are distinct."""

    @abstractmethod
    def find(self, ids: Tensor) -> Tensor:
        """Returns the slot of each row, int64; -1 for those without one."""

    @abstractmethod
    def put(self, ids: Tensor, slots: Tensor) -> None:
        """Sets the slots of rows that have none."""

    @abstractmethod
    def drop(self, ids: Tensor) -> None:
        """Forgets rows that have slots."""


class DirectIndex(RowIndex):
    """A number for each row that the table may have.

    Args:
        places: `(rows,)` zeros of an integer type, of which memory is used where they are written.
    """

    def __init__(self, places: Tensor) -> None:
        self._places = places

    def find(self, ids: Tensor) -> Tensor:
        return self._places.index_select(0, ids).long() - 1

    def put(self, ids: Tensor, slots: Tensor) -> None:
        self._places[ids] = (slots + 1).to(self._places.dtype)

    def drop(self, ids: Tensor) -> None:
        self._places[ids] = 0


class HashIndex(RowIndex):
    """A hash table of ids, with linear probing: 16 bytes a place, of which at most 2/3 are taken."""

    def __init__(self) -> None:
        self._make(_LEAST)

    def find(self, ids: Tensor) -> Tensor:
        keys = ids.numpy()
        places = self._places_of(keys)
        return torch.from_numpy(np.where(places < 0, -1, self._slots[places]))

    def put(self, ids: Tensor, slots: Tensor) -> None:
        if 3 * (self._taken + len(ids)) > 2 * len(self._keys):
            live = self._slots >= 0
            keys, kept = self._keys[live], self._slots[live]
            # Without those that are gone.
            self._make(max(_LEAST, 1 << (2 * (len(keys) + len(ids)) - 1).bit_length()))
            self._insert(keys, kept)
        self._insert(ids.numpy(), slots.numpy())

    def drop(self, ids: Tensor) -> None:
        # Not free: the search for a row that was put behind it must go on.
        self._slots[self._places_of(ids.numpy())] = _GONE

    def _make(self, size: int) -> None:
        self._keys = np.zeros(size, dtype=np.int64)
        self._slots = np.full(size, _FREE, dtype=np.int64)
        self._shift = np.uint64(64 - (size.bit_length() - 1))
        self._taken = 0

    def _begin(self, keys: _Numbers) -> _Numbers:
        return ((keys.astype(np.uint64) * _GOLDEN) >> self._shift).astype(np.int64)

    def _places_of(self, keys: _Numbers) -> _Numbers:
        """Returns where keys are; -1 for those that are not."""
        found = np.full(len(keys), -1, dtype=np.int64)
        left, place = np.arange(len(keys)), self._begin(keys)
        while len(left):
            slots = self._slots[place]
            hit = (slots >= 0) & (self._keys[place] == keys[left])
            found[left[hit]] = place[hit]
            on = ~hit & (slots != _FREE)
            left, place = left[on], (place[on] + 1) % len(self._keys)
        return found

    def _insert(self, keys: _Numbers, slots: _Numbers) -> None:
        left, place = np.arange(len(keys)), self._begin(keys)
        while len(left):
            free = self._slots[place] == _FREE
            # Of several for one place, the last one gets it.
            self._keys[place[free]] = keys[left[free]]
            self._slots[place[free]] = slots[left[free]]
            on = ~free | (self._keys[place] != keys[left])
            left, place = left[on], (place[on] + 1) % len(self._keys)
        self._taken += len(keys)


EVICTIONS = {"age": 0, "count": 1}
"""By name, which of the two numbers decides first."""

_AT_ONCE = 16
"""A full table drops this part of its rows at once, so that not every update has to search all of them."""


def how_many(held: int, new: int, most: int) -> int:
    """Returns how many of `held` rows a table of at most `most` drops before it takes `new` ones."""
    over = held + new - most
    return min(held, max(over, most // _AT_ONCE)) if over > 0 else 0


def least_used(uses: Tensor, ids: Tensor, count: int, by: str) -> Tensor:
    """Returns the places of the `count` rows that go first, ascending.

    It depends on the rows alone and not on their order, so that it is the same on all workers and after a resume.

    Args:
        uses: `(rows, 2)` int64, the last update that used a row, and how many did.
        ids: `(rows,)` int64, which decide between rows that are equal in both.
        by: a key of `EVICTIONS`.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64)
    first, second = (uses[:, column].numpy() for column in (EVICTIONS[by], 1 - EVICTIONS[by]))
    edge = np.partition(first, count - 1)[count - 1]
    below, level = np.flatnonzero(first < edge), np.flatnonzero(first == edge)
    # Only those at the edge have to be sorted.
    order = np.lexsort((ids.numpy()[level], second[level]))
    return torch.from_numpy(np.sort(np.concatenate([below, level[order[: count - len(below)]]])))
