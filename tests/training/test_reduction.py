from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.training import buckets as module
from headrace.training.buckets import buckets

SIZES = st.lists(st.integers(0, 1000), max_size=40)


def test_the_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@given(SIZES, st.integers(1, 2000), st.integers(0, 4000))
def test_every_parameter_is_in_one_run_and_the_last_come_first(sizes: list[int], first: int, more: int) -> None:
    runs = buckets(sizes, first, first + more)
    assert [index for start, stop in reversed(runs) for index in range(start, stop)] == list(range(len(sizes)))


@given(SIZES, st.integers(1, 2000), st.integers(0, 4000))
def test_a_bucket_closes_as_soon_as_it_is_full(sizes: list[int], first: int, more: int) -> None:
    runs = buckets(sizes, first, first + more)
    full = [min(first * 2**number, first + more) for number in range(len(runs))]
    for (start, stop), nbytes in zip(runs[:-1], full[:-1], strict=True):
        assert sum(sizes[start:stop]) >= nbytes
    for (start, stop), nbytes in zip(runs, full, strict=True):
        assert sum(sizes[start + 1 : stop]) < nbytes


def test_no_parameters_make_no_buckets() -> None:
    assert buckets((), 100, 100) == ()


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="the first bucket must have 1 to 5 bytes, got 0"):
        buckets((1, 2), 0, 5)
