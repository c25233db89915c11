"""Few of many cases: pairwise covers, in which every two parameters still meet in every way, and cases in turn."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

MOST = 6
"""Cases of a quick test with several parameters that all run. Of more, those of a cover run."""

Pair = tuple[tuple[str, Hashable], ...]


def pairs(case: Mapping[str, Hashable]) -> set[Pair]:
    """Returns every two parameters of a case with their values; the one of a case with one parameter."""
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), min(2, len(case))))


def pairwise(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Returns which cases to keep, in order: each pair of values that is in any case is in one that is kept."""
    return _covering([pairs(case) for case in cases])


def each_value(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Returns which cases to keep, in order: each value of each parameter is in one that is kept."""
    return _covering([set(case.items()) for case in cases])


def one(cases: Sequence[Mapping[str, Hashable]], name: str) -> list[int]:
    """Returns the one case to keep: of tests with other names it is another."""
    return [crc32(name.encode()) % len(cases)]


def kept(mark: str, name: str, cases: Sequence[Mapping[str, Hashable]]) -> Collection[int]:
    """Returns which cases of a test the usual run keeps.

    Args:
        mark: what the test is marked with; "" for nothing.
        name: of the test.
        cases: values by parameter.
    """
    parameters = len(cases[0])
    if mark == "every" or (not mark and (parameters == 1 or len(cases) <= MOST)):
        return range(len(cases))
    if mark in ("one", "slow"):
        return one(cases, name)
    return (pairwise if mark == "pairwise" or (not mark and parameters > 2) else each_value)(cases)


def _covering(found: Sequence[set[Any]]) -> list[int]:
    """Returns sets whose union is that of all.

    Greedy: the set with the most elements that are still missing comes next, the first of several such.
    """
    missing: set[Any] = set().union(*found)
    heap = [(-len(each), index) for index, each in enumerate(found)]
    heapify(heap)
    kept = []
    while missing:
        _, index = heappop(heap)
        gain = len(found[index] & missing)
        # What a case adds never grows, so the first whose count is still right has the most.
        if heap and (-gain, index) > heap[0]:
            heappush(heap, (-gain, index))
            continue
        missing -= found[index]
        kept.append(index)
    return sorted(kept)


def in_turn(names: Sequence[str], others: Sequence[Any], third: int | None = None) -> list[Any]:
    """Returns every pair as parameters of a test; the usual run has each name with one of the others, in turn.

    With `third`, 0 to 2, it has every third name alone: three tests of the same names share them.
    """
    return [
        pytest.param(name, *(other if isinstance(other, tuple) else (other,)),
                     marks=[pytest.mark.full] * (index % len(others) != turn or third not in (None, index % 3)))
        for index, name in enumerate(names)
        for turn, other in enumerate(others)
    ]  # fmt: skip
