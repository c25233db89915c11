"""Where the rows of a table are: from ids to slots."""

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
