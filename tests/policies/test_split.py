from __future__ import annotations

import doctest
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.policies import batch_split as module
from headrace.policies.batch_split import bounds, split

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def test_the_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@given(st.integers(0, 10_000), SHARES)
def test_nothing_is_lost_and_everyone_is_within_one_of_the_proportion(count: int, shares: list[int]) -> None:
    sizes = split(count, shares)
    assert len(sizes) == len(shares)
    assert sum(sizes) == count
    for size, share in zip(sizes, shares, strict=True):
        # |size - count * share / total| < 1, without floating point
        assert abs(size * sum(shares) - count * share) < sum(shares)
        assert size == 0 or share > 0


@given(st.integers(0, 10_000), st.integers(1, 16), st.integers(1, 5))
def test_equal_shares_differ_by_one_at_most_and_the_first_get_more(count: int, workers: int, share: int) -> None:
    sizes = split(count, (share,) * workers)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(0, 10_000), SHARES)
def test_bounds_run_through_the_batch_without_gaps(count: int, shares: list[int]) -> None:
    edges = bounds(count, shares)
    assert edges[0][0] == 0
    assert edges[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert tuple(stop - start for start, stop in edges) == split(count, shares)
