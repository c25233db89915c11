"""An epoch's order and an example's random numbers: functions of (seed, epoch) and (seed, epoch, index).

Both are addresses in one counter-based generator (Philox; Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011): the seed is the key, the epoch and the example's index are words of the counter. So
nothing has to be stored or replayed to begin anywhere, and the number of workers cannot matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ORDER = 0
_EXAMPLES = 1
_SCATTER = 2
_WORD = 2**64
_SORTED = 1 << 20
"""Up to so many examples an order is sorted as a whole: 60 ms, and the fastest to read."""
_BLOCK = 1 << 15
_ROUNDS = 6


class ExampleOrder:
    """The order in which an epoch visits the examples.

    It is a permutation, as a whole where there are few examples; where there are many, each place of it is computed
    when it is asked for, so that to begin in the middle of an epoch of any length takes no time and no memory.

    Args:
        count: examples.
        seed: the run's.
        epoch: counted from 0.
        shuffled: else the order of the data.
    """

    def __init__(self, count: int, seed: int, epoch: int, shuffled: bool = True) -> None:
        self._count = count
        self._whole: NDArray[np.int64] | None = None
        self._scatter: _Scatter | None = None
        if shuffled and count <= _SORTED:
            self._whole = permutation(count, seed, epoch)
        elif shuffled:
            self._scatter = _Scatter(count, seed, epoch)
        self._block = (-1, np.empty(0, dtype=np.int64))

    def slice(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the indices at the places from `start` to before `stop`, `(stop - start,)`."""
        if self._whole is not None:
            return self._whole[start:stop]
        if self._scatter is None:
            return np.arange(start, stop)
        pieces = []
        while start < stop:
            first = start - start % _BLOCK
            held, block = self._block
            if first != held:
                block = self._scatter(np.arange(first, min(first + _BLOCK, self._count)))
                # Both at once, because threads may ask at the same time.
                self._block = (first, block)
            end = min(stop, first + _BLOCK)
            pieces.append(block[start - first : end - first])
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, dtype=np.int64)])

    def at(self, place: int) -> int:
        """Returns the index at one place."""
        if self._scatter is not None:
            return int(self._scatter(np.array([place]))[0])
        return int(self.slice(place, place + 1)[0])


class _Scatter:
    """A permutation of `0 .. count - 1` that is computed place by place.

    Multiplications by odd numbers, additions and shifts, each of which can be undone within so many bits, keyed by the
    seed and the epoch; what falls outside goes round again until it is inside (cycle walking; Black, Rogaway,
    "Ciphers with arbitrary finite domains", 2002, section 3).
    """

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        bits = max(2, (count - 1).bit_length())
        words = _philox(seed, _SCATTER, (0, 0, epoch, 0)).random_raw(2 * _ROUNDS)
        self._count = np.uint64(count)
        self._mask = np.uint64((1 << bits) - 1)
        # A bit more than half, so that every bit reaches every other within a few rounds.
        self._shift = np.uint64(bits // 2 + 1)
        self._factors = (words[:_ROUNDS] | np.uint64(1)) & self._mask
        self._terms = words[_ROUNDS:] & self._mask

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        found = self._mix(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self._count)
        while len(outside):
            found[outside] = self._mix(found[outside])
            outside = outside[found[outside] >= self._count]
        return found.view(np.int64)

    def _mix(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for factor, term in zip(self._factors, self._terms, strict=True):
            words = (words * factor + term) & self._mask
            words ^= words >> self._shift
        return words


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the indices `0 .. count - 1` in an order that is sorted as a whole, `(count,)`."""
    # Sorted raw words instead of Generator.permutation: numpy promises the bits of the former for all
    # versions and machines, not those of the latter, and a run may be resumed elsewhere. Each word carries its
    # own index in its low bits, which costs half of an argsort and leaves no ties.
    low = np.uint64((1 << (count - 1).bit_length()) - 1)
    words = np.asarray(_philox(seed, _ORDER, (0, 0, epoch, 0)).random_raw(count))
    words &= ~low
    words |= np.arange(count, dtype=np.uint64)
    words.sort()
    words &= low
    return words.view(np.int64)


def generator(seed: int, epoch: int, index: int, transform: int = 0) -> np.random.Generator:
    """Returns the random numbers that belong to one example in one epoch.

    Args:
        seed: the run's.
        epoch: counted from 0.
        index: the example's index in the data set.
        transform: which of the pipeline's transforms draws them, so that two do not draw the same.
    """
    return np.random.Generator(_philox(seed, _EXAMPLES, (0, transform, epoch, index)))


def _philox(seed: int, stream: int, counter: tuple[int, int, int, int]) -> np.random.Philox:
    key = np.array((seed % _WORD, stream), dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64))
