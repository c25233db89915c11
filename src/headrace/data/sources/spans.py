"""Which of several files, or pieces of them, has an example."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Spans:
    """Pieces one after the other.

    Args:
        lengths: examples of each.

    Attributes:
        begins: the first example of each, and, last, how many there are.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self.begins = tuple(accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return self.begins[-1]

    def find(self, index: int) -> tuple[int, int]:
        """Returns the piece that has an example, and the example's number there."""
        # The last one that begins there has it, since those before it are empty.
        which = bisect_right(self.begins, index) - 1
        return which, index - self.begins[which]
