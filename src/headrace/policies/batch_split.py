"""How a batch is split among workers: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def split(count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Returns how many of `count` examples each worker gets: in proportion to `shares`, whole, summing up.

    Equal shares differ by at most 1 and the first workers get the remainder; a share of 0 gets none.

    >>> split(10, (1, 1, 1))
    (4, 3, 3)
    """
    total = sum(shares)
    sizes = [count * share // total for share in shares]
    remainders = [(count * share) % total for share in shares]
    left = count - sum(sizes)
    for worker in sorted(range(len(shares)), key=lambda worker: (-remainders[worker], worker))[:left]:
        sizes[worker] += 1
    return tuple(sizes)


def bounds(count: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns each worker's `(start, stop)` of a batch of `count`, in order and without gaps."""
    ends = tuple(accumulate(split(count, shares)))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))
