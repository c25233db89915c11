"""Virtual time: events in the order of their times, and lines that carry one thing after the other."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """Calls functions at their times. Those of one time are called in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[[int], None], int]] = []
        self._asked = 0

    def at(self, time_s: float, call: Callable[[int], None], number: int) -> None:
        """Calls `call(number)` at a time that is not past."""
        self._asked += 1
        heappush(self._waiting, (time_s, self._asked, call, number))

    def run(self) -> None:
        """Goes on until nothing is left to call."""
        waiting = self._waiting
        while waiting:
            self.now, _, call, number = heappop(waiting)
            call(number)


class Line:
    """Does one thing at a time, in the order in which they come: a direction of a network card, a server's core."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def occupy(self, ready_s: float, seconds: float) -> float:
        """Returns when something is over that is ready at a time and takes so long."""
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s
