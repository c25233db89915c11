"""Batches of examples of about one length, in an order that is a function of (seed, epoch).

order       3 9 1 4 | 1 5 9 2 | 6 5 3 5 | 8 9 7 9      lengths, a window of 4 batches
sorted      1 1 2 3 | 3 4 5 5 | 5 6 7 8 | 9 9 9 9
shuffled    5 6 7 8 | 1 1 2 3 | 9 9 9 9 | 3 4 5 5
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.data.pipeline.order import ExampleOrder, generator

_STREAM = 2**32
"""Behind every index that a transform draws numbers for."""


class Bucketed:
    """An order that brings examples of about one length together.

    Args:
        order: the one before.
        count: examples.
        lengths: of each place of the data.
        batch: examples of a global batch.
        window: batches that are sorted together.
        seed, epoch: what the order of the batches follows.
    """

    def __init__(
        self,
        order: ExampleOrder,
        count: int,
        lengths: NDArray[np.int64],
        batch: int,
        window: int,
        seed: int,
        epoch: int,
    ) -> None:
        self._order = order
        self._count = count
        self._lengths = lengths
        self._batch = batch
        self._size = batch * window
        self._seed = seed
        self._epoch = epoch
        self._which = -1
        self._sorted = np.empty(0, dtype=np.int64)

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the indices at the places from `start` to before `stop`, `(stop - start,)`."""
        pieces = [np.empty(0, dtype=np.int64)]
        while start < stop:
            which, offset = divmod(start, self._size)
            self._load(which)
            end = min(stop - start, self._size - offset)
            pieces.append(self._sorted[offset : offset + end])
            start += end
        return np.concatenate(pieces)

    def _load(self, which: int) -> None:
        if which == self._which:
            return
        first = which * self._size
        places = self._order.slice(first, min(first + self._size, self._count))
        places = places[np.argsort(self._lengths[places], kind="stable")]
        # The short batch of an epoch stays its last.
        whole = len(places) // self._batch * self._batch
        rows = places[:whole].reshape(-1, self._batch)
        # By raw words, whose bits numpy promises for all versions.
        words = generator(self._seed, self._epoch, _STREAM + which).bit_generator.random_raw(len(rows))
        turn = np.argsort(words, kind="stable")
        self._which, self._sorted = which, np.concatenate([rows[turn].reshape(-1), places[whole:]])
