"""An epoch's order and an example's random numbers: functions of (seed, epoch) and (seed, epoch, index).

Both are addresses in one counter-based generator (Philox; Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011): the seed is the key, the epoch and the example's index are words of the counter. So
nothing has to be stored or replayed to begin anywhere, and the number of workers cannot matter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["generator", "permutation"]

_ORDER = 0
_EXAMPLES = 1
_WORD = 2**64


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the indices `0 .. count - 1` in the order in which an epoch visits them, `(count,)`."""
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
