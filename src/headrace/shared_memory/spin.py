"""How long to look before one sleeps."""

from __future__ import annotations

from collections.abc import Callable
from os import sched_yield
from time import perf_counter
from typing import TypeVar

_Event = TypeVar("_Event")

_LEAST_S = 1e-6


class Spin:
    """To be woken takes far longer than to look, on idle cores of a virtual machine ten times.

    How long is learnt: a look that met what it waited for may be longer next time, one in vain is halved, so that on a
    crowded host hardly anyone spins.

    Args:
        most_s: the longest, seconds.

    Attributes:
        seconds: how long to look next time.
    """

    def __init__(self, most_s: float) -> None:
        self.seconds = most_s
        self._most_s = most_s

    def met(self) -> None:
        """Notes that what was waited for came in time."""
        self.seconds = min(self._most_s, self.seconds * 1.25)

    def slept(self, waited_s: float) -> None:
        """Notes that it came after `waited_s`, too late for a look."""
        short = waited_s < self._most_s
        self.seconds = min(self._most_s, self.seconds * 2) if short else max(_LEAST_S, self.seconds / 2)


def look(poll: Callable[[float], list[_Event]], spin: Spin, timeout_s: float) -> list[_Event]:
    """Returns what `poll(seconds)` does within `timeout_s`; looks again and again for a while before it sleeps."""
    events = poll(0.0)
    if events or not timeout_s:
        return events
    began = perf_counter()
    give_up = began + spin.seconds
    while perf_counter() < give_up:
        # Whoever is waited for may have no other core.
        sched_yield()
        events = poll(0.0)
        if events:
            spin.met()
            return events
    events = poll(timeout_s)
    spin.slept(perf_counter() - began)
    return events
