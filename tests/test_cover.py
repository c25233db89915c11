"""A cover leaves out cases, and no pair."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cover import MOST, each_value, kept, one, pairs, pairwise

SIZES = [(1,), (7,), (3, 4), (2, 2, 2), (9, 3, 20, 3), (5, 4, 3, 2, 2)]


def every(sizes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip("abcde", values, strict=False)) for values in product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_is_covered(sizes: tuple[int, ...]) -> None:
    cases = every(sizes)
    kept = pairwise(cases)
    assert set().union(*(pairs(cases[index]) for index in kept)) == set().union(*map(pairs, cases))
    assert kept == sorted(set(kept))
    assert len(kept) <= 1.5 * max(a * b for a, b in product(sizes, repeat=2)) or len(sizes) == 1


def test_a_cover_is_small_and_the_same_each_time() -> None:
    cases = every((9, 3, 20, 3))
    assert len(pairwise(cases)) < len(cases) / 7
    assert pairwise(cases) == pairwise([dict(reversed(case.items())) for case in cases])


@given(st.lists(st.fixed_dictionaries({name: st.integers(0, 3) for name in "abcd"}), max_size=60))
def test_no_pair_is_lost_where_cases_are_no_product(cases: list[dict[str, int]]) -> None:
    kept = {pair for index in pairwise(cases) for pair in pairs(cases[index])}
    assert kept == {pair for case in cases for pair in pairs(case)}


def test_each_value_of_each_parameter_is_in_a_case_that_is_kept() -> None:
    cases = [{"a": a, "b": b, "c": c} for a in range(5) for b in range(3) for c in range(2) if a + b != 3]
    kept = [cases[index] for index in each_value(cases)]
    assert {item for case in kept for item in case.items()} == {item for case in cases for item in case.items()}
    assert len(kept) == 5
    assert each_value([{"a": 1}, {"a": 2}]) == [0, 1]


def test_one_case_is_another_for_other_tests() -> None:
    cases = [{"a": str(a)} for a in range(4)]
    kept = [one(cases, f"test_{index}") for index in range(50)]
    assert all(len(each) == 1 for each in kept)
    assert {index for each in kept for index in each} == {0, 1, 2, 3}
    assert one(cases, "test_it") == one(cases, "test_it")


def test_a_quick_test_runs_for_all_of_its_few_cases_and_for_a_cover_of_many() -> None:
    few, two, three = every((2, 3)), every((4, 5)), every((4, 5, 6))
    assert len(few) == MOST
    for mark, cases in (("", few), ("every", three), ("", every((20,)))):
        assert list(kept(mark, "test_it", cases)) == [*range(len(cases))]
    assert kept("", "test_it", two) == kept("each_value", "test_it", two) == each_value(two)
    assert kept("slow", "test_it", two) == kept("one", "test_it", two) == one(two, "test_it")
    assert kept("", "test_it", three) == kept("pairwise", "test_it", three) == pairwise(three)
    # A table in which no row has the values of another loses none.
    table = [{"given": given, "expected": given * given} for given in range(20)]
    assert list(kept("", "test_it", table)) == [*range(20)]
