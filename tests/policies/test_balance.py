"""Shares of a batch in proportion to speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.policies.balance import balanced_sizes

Workers = list[tuple[int, float, float]]

WORKERS = st.lists(st.tuples(st.integers(1, 200), st.floats(0.0, 0.01), st.floats(1e-4, 0.1)), min_size=1, max_size=12)
"""Examples, seconds of a step without examples, seconds of an example."""


def times(sizes: tuple[int, ...], workers: Workers) -> list[float]:
    return [fixed + size * each for size, (_, fixed, each) in zip(sizes, workers, strict=True)]


@given(WORKERS)
def test_no_example_is_lost_and_each_worker_has_one(workers: Workers) -> None:
    sizes = tuple(size for size, _, _ in workers)
    given_ = balanced_sizes(sizes, times(sizes, workers))
    assert sum(given_) == sum(sizes)
    assert min(given_) >= 1


@given(WORKERS)
def test_it_settles_where_a_step_is_nearly_as_short_as_it_can_be(workers: Workers) -> None:
    sizes = tuple(size + 100 for size, _, _ in workers)
    slowest = max(times(sizes, workers))
    for _ in range(40):
        before, sizes = sizes, balanced_sizes(sizes, times(sizes, workers))
        if sizes == before:
            break
    assert sizes == before
    # As if examples could be divided; a worker has at least one of them.
    shortest = (sum(sizes) + sum(fixed / each for _, fixed, each in workers)) / sum(1 / each for _, _, each in workers)
    one = max(fixed + each for _, fixed, each in workers)
    assert max(times(sizes, workers)) <= max(1.06 * shortest + one, slowest if len(workers) == 1 else 0.0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0, 1.0), (32, 32, 32)),
        ((1.0, 1.05, 0.97), (32, 32, 32)),
        ((1.0, 1.0, 2.0), (39, 38, 19)),
        ((1.0, 1.0, 1000.0), (48, 47, 1)),
    ],
)
def test_noise_changes_nothing_and_a_slow_worker_gets_less(
    seconds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert balanced_sizes((32, 32, 32), seconds) == expected
