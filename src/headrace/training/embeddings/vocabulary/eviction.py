"""Which rows a table drops when it holds as many as it may.

A row has been used by each update that had a gradient for it. Two numbers are kept of it: the last update of the table
that used it, and how many did.

    "age"      the rows whose last use is the longest ago go first; of equal ones those with fewer uses
    "count"    the rows with the fewest uses go first; of equal ones those whose last use is the longest ago
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
