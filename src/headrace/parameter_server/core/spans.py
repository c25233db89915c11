"""Sets of whole numbers that mostly lie side by side, in few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST = 1 << 24


def spans_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns where runs of numbers begin, and before which number each ends."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number:
            spans[-1][1] += 1
        else:
            spans.append([number, number + 1])
    return tuple((first, stop) for first, stop in spans)


def numbers_in(spans: Sequence[Sequence[int]]) -> set[int]:
    """Returns the numbers in some spans.

    Raises:
        ValueError: these are none, or there are too many.
    """
    pairs = [(first, stop) for first, stop in spans]
    count = sum(stop - first for first, stop in pairs)
    if any(first >= stop for first, stop in pairs) or count > _MOST:
        raise ValueError(f"{len(pairs)} spans hold {count:,} numbers; at most {_MOST:,} can be held")
    return {number for first, stop in pairs for number in range(first, stop)}
