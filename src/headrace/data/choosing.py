"""Who reads: measured on the first batches, and again when training waits.

Nothing that is read to measure is lost: the batches wait in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from headrace.data.ahead import Ahead

__all__ = ["QUICK_S", "WAITING", "Choice", "Chooser", "Tuner"]

_SLOW_S = 0.2
"""A batch that takes longer is measured once, the first one already."""
QUICK_S = 0.0003
"""What takes less is not worth a thread."""
_WORTH_S = 0.001
"""What takes less is not worth a process."""
_GAIN = 1.2
"""Two readers together must be so much faster than one to be worth what they cost whoever trains."""
_NEARLY_TWICE = 1.6
"""Threads that gain so much are not held up by each other, and processes can gain little more."""

WAITING = 0.03
"""Share of the time that whoever trains may wait."""
_WINDOW = 8
_WINDOW_S = 0.1
_QUIET = 16
"""Windows after a reader that helped nothing, before the next is tried; then twice as many."""


@dataclass(frozen=True)
class Choice:
    """Who reads.

    Attributes:
        parallel: "inline", "threads" or "processes".
        why: the figures it rests on.
    """

    parallel: str
    why: str


class Chooser:
    """Reads some batches alone, by two threads, and by two processes, where that may pay.

    Of each the least time counts that was ever measured, for others on the machine only ever make it more.
    """

    def __init__(self) -> None:
        self._least: dict[str, float] = {}

    def choose(self, ahead: Ahead[Any], start: Callable[[], Callable[[Any], Any]] | None) -> Choice:
        """Measures once more, and says what is best by all that is known.

        Args:
            ahead: nobody reads for it now.
            start: starts two or more processes, and returns what lets one of them read; None where there may be none.
        """
        threads = ahead.read
        alone, times = self._measure("alone", ahead, 0, 1, 1), 1
        if alone is None:
            return Choice("inline", "there is nothing to read")
        if alone <= _SLOW_S:
            alone, times = self._measure("alone", ahead, 0, 1, 3) or alone, 2
        if alone < QUICK_S:
            return Choice("inline", f"a batch takes {_ms(alone)}")
        together = self._measure("threads", ahead, 2, 2, times)
        if together is None:
            return Choice("threads", f"a batch takes {_ms(alone)}, and no more fit into memory_limit or are there")
        gain = alone / together
        why = f"a batch takes {_ms(alone)}, two threads together are {gain:.1f} times as fast"
        if start is None or gain > _NEARLY_TWICE or alone < _WORTH_S:
            return Choice("threads" if gain > _GAIN else "inline", why)
        ahead.read = start()
        # One more, for the first of each process finds its memory untouched.
        apart = self._measure("processes", ahead, 2, 2, times + 1)
        if apart is not None:
            why += f", two processes {alone / apart:.1f} times"
            if alone / apart > _GAIN * max(1.0, gain):
                return Choice("processes", why)
        ahead.read = threads
        return Choice("threads" if gain > _GAIN else "inline", why)

    def _measure(self, way: str, ahead: Ahead[Any], readers: int, batches: int, times: int) -> float | None:
        found = _seconds(ahead, readers, batches, times)
        if found is not None:
            self._least[way] = min(found, self._least.get(way, found))
        return self._least.get(way)


def _seconds(ahead: Ahead[Any], readers: int, batches: int, times: int) -> float | None:
    """Returns the seconds for a batch if some are read now by so many readers; None if they cannot be had.

    Args:
        readers: 0 for this thread itself.
        batches: that are read at a time.
        times: how often; the least counts, for others on the machine only ever make it more.
    """
    ahead.set_readers(readers)
    found = []
    for _ in range(times):
        began = perf_counter()
        if ahead.fill(ahead.waiting() + batches) < batches:
            return None
        ahead.settle()
        found.append((perf_counter() - began) / batches)
    return min(found)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


class Tuner:
    """Adds a reader when whoever trains waits, and takes it away again if that has not helped.

    Args:
        readers: to begin with.
        most: readers.
        passed_over: batches before it begins to count: those that were there before.

    Attributes:
        readers: how many there should be.
    """

    def __init__(self, readers: int, most: int, passed_over: int = 0) -> None:
        self.readers = readers
        self._most = most
        self._pass_over = passed_over
        self._batches = 0
        self._began = 0.0
        self._waited_before = 0.0
        self._tried: tuple[int, float, float] | None = None
        self._quiet = 0
        self._patience = _QUIET

    def look(self, now: float, waited_s: float) -> int:
        """Returns how many readers there should be, at every batch.

        Args:
            now: seconds, by any clock that goes forward.
            waited_s: how long whoever trains has waited, in all.
        """
        if self._pass_over > 0:
            self._pass_over -= 1
            self._begin(now, waited_s)
            return self.readers
        self._batches += 1
        elapsed = now - self._began
        if self._batches >= max(_WINDOW, 2 * self.readers) and elapsed >= _WINDOW_S:
            self._decide(self._batches / elapsed, (waited_s - self._waited_before) / elapsed)
            self._begin(now, waited_s)
        return self.readers

    def _begin(self, now: float, waited_s: float) -> None:
        self._batches, self._began, self._waited_before = 0, now, waited_s

    def _decide(self, rate: float, waiting: float) -> None:
        if self._tried is not None:
            fewer, before, had_waited = self._tried
            self._tried = None
            # Where it waits for little, little is to be had.
            if rate < before * (1 + min(0.05, had_waited / 2)):
                self._change(fewer)
                self._quiet, self._patience = self._patience, 2 * self._patience
                return
        if self._quiet > 0:
            self._quiet -= 1
        elif waiting > WAITING and self.readers < self._most:
            self._tried = (self.readers, rate, waiting)
            self._change(min(self._most, self.readers + max(1, self.readers // 2)))

    def _change(self, readers: int) -> None:
        self.readers = readers
        # Until what was read before has been taken.
        self._pass_over = readers + 2
