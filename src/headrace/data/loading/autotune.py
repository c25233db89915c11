"""Who reads: begun with the cores that training leaves, and changed while training waits and a change makes it faster.

Nothing is measured that is not wanted anyway: a mode of reading counts by the batches that training takes while it is
tried, so what it costs training counts, too.

    window      current mode ──► try another ──► faster: it is the current one
                     ▲                │
                     └── not faster ──┘         all tried: rest, then again with longer windows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

QUICK_S = 0.0003
"""A batch that takes less is not worth a thread."""
_WORTH_S = 0.001
"""One that takes less is not worth a process."""
_WAITING = 0.03
"""Share of the time that whoever trains may wait."""
_GAIN = 0.05
"""So much faster must be more or fewer readers that take the others' place."""
_OTHERS_GAIN = 0.15
"""So much faster must be readers of another kind: processes take memory, and what is as good may stay."""
_HOPELESS = 0.8
"""What was once slower than that share of what reads now is not tried again."""
_NEARLY_TWICE = 1.6
"""Threads that gain so much by twice their number are not held up by each other: processes can gain little more."""

_WINDOW = 8
_WINDOW_S, _LONGEST_WINDOW_S = 0.1, 0.8
_LONG = 5
_REST_S = 1.0


@dataclass(frozen=True)
class ReadMode:
    """How batches are read.

    Attributes:
        parallel: "inline", "threads" or "processes".
        readers: threads or processes; 0 where the worker reads by itself.
    """

    parallel: str
    readers: int = 0

    def __str__(self) -> str:
        one = {"threads": "1 thread", "processes": "1 process"}
        if self.parallel == "inline":
            return "the worker by itself"
        return one[self.parallel] if self.readers == 1 else f"{self.readers} {self.parallel}"


@dataclass(frozen=True)
class ReadModes:
    """Which modes of reading there are.

    Attributes:
        kinds: those that may be chosen.
        free: cores that training leaves.
        most: readers.
    """

    kinds: tuple[str, ...]
    free: int
    most: int

    def without(self, kind: str) -> ReadModes:
        """Returns the others."""
        return replace(self, kinds=tuple(each for each in self.kinds if each != kind))

    def first(self, read_s: float) -> ReadMode:
        """Returns what to begin with."""
        kind = self.kinds[0]
        if kind == "inline" or ("inline" in self.kinds and read_s < QUICK_S):
            return ReadMode("inline")
        return ReadMode(kind, self.free)

    def beside(self, mode: ReadMode, rate: float, read_s: float, computing_s: float) -> list[ReadMode]:
        """Returns what may be faster than one of them, the likeliest first."""
        more = min(self.most, mode.readers + max(1, mode.readers // 2))
        fewer = max(min(mode.readers, self.free), mode.readers - max(1, mode.readers // 3))
        found = []
        if mode.parallel == "inline":
            found += [ReadMode("threads", self.free)] if read_s >= QUICK_S else []
        else:
            found += [ReadMode(mode.parallel, more), ReadMode(mode.parallel, fewer)]
        if mode.parallel != "processes" and read_s >= _WORTH_S:
            found.insert(1, ReadMode("processes", max(mode.readers, min(2, self.most))))
        if mode.parallel == "processes":
            found.append(ReadMode("threads", mode.readers))
        # More than that it would not give by itself, even if it did nothing else.
        if rate * (1 + _GAIN) * computing_s < 1:
            found.append(ReadMode("inline"))
        return [each for each in dict.fromkeys(found) if each.parallel in self.kinds and each != mode]


class Autotuner:
    """Tries modes of reading while training waits, and keeps what makes it faster.

    Attributes:
        mode: how it should be read.
        current: the best that is known; `mode` is another one while that is tried.
    """

    def __init__(
        self,
        mode: ReadMode,
        modes: ReadModes,
        told: Callable[[ReadMode, float, float], object] = lambda *_: None,
        passed_over: int = 0,
    ) -> None:
        self.mode = self.current = mode
        self._modes = modes
        self._told = told
        self._pass_over = passed_over
        self._batches = 0
        self._began = self._waited_before = 0.0
        self._read_s = self._computing_s = 0.0
        self._rate = self._waiting = 0.0
        self._untried: list[ReadMode] | None = None
        self._known: dict[ReadMode, float] = {}
        self._window_s, self._rest_s, self._rests_until = _WINDOW_S, _REST_S, -math.inf

    def look(self, now: float, waited_s: float, read_s: float, computing_s: float) -> ReadMode:
        """Returns how it should be read, at every batch."""
        if self._pass_over > 0:
            self._pass_over -= 1
            self._begin(now, waited_s)
            return self.mode
        self._batches += 1
        self._read_s += read_s
        self._computing_s += computing_s
        elapsed = now - self._began
        # Half as many say as much where each takes long.
        enough = _WINDOW if elapsed < _LONG * self._window_s else _WINDOW // 2
        if self._batches >= max(enough, 2 * self.mode.readers) and elapsed >= self._window_s:
            # Their means: an epoch's last batch may be a short one.
            self._read_s /= self._batches
            self._computing_s /= self._batches
            self._decide(now, self._batches / elapsed, (waited_s - self._waited_before) / elapsed)
            self._begin(now, waited_s)
        return self.mode

    def leave_out(self, kind: str) -> ReadMode:
        """Returns how it should be read where one kind of reading does not work."""
        self._modes, self._untried = self._modes.without(kind), None
        if self.current.parallel == kind:
            self.current = ReadMode(self._modes.kinds[0], self.current.readers)
        self._change(self.current)
        return self.current

    def _begin(self, now: float, waited_s: float) -> None:
        self._batches, self._began, self._waited_before = 0, now, waited_s
        self._read_s = self._computing_s = 0.0

    def _decide(self, now: float, rate: float, waiting: float) -> None:
        if self.mode != self.current:
            self._judge(rate)
            return
        self._rate, self._waiting = rate, waiting
        if waiting <= _WAITING:
            self._untried = None
        elif now >= self._rests_until:
            if self._untried is None:
                self._untried = self._beside()
            if self._untried:
                self._change(self._untried.pop(0))
            else:
                self._rest(now)

    def _judge(self, rate: float) -> None:
        """Decides over the mode that was tried."""
        tried, before = self.mode, self.current
        gain = _GAIN if tried.parallel == before.parallel else _OTHERS_GAIN
        # Where training waits for little, little is to be had.
        if rate < self._rate * (1 + min(gain, self._waiting / 2)):
            self._known[tried] = rate
            self._change(before)
            return
        self.current = tried
        self._known[before] = self._rate
        self._told(tried, self._rate, rate)
        if tried.parallel == before.parallel == "threads" and rate > _NEARLY_TWICE * self._rate:
            self._modes = self._modes.without("processes")
        self._rate = rate
        self._untried = [each for each in self._beside() if each != before]

    def _beside(self) -> list[ReadMode]:
        found = self._modes.beside(self.current, self._rate, self._read_s, self._computing_s)
        return [mode for mode in found if self._known.get(mode, math.inf) > _HOPELESS * self._rate]

    def _rest(self, now: float) -> None:
        self._rests_until, self._untried = now + self._rest_s, None
        self._rest_s *= 2
        self._window_s = min(_LONGEST_WINDOW_S, 2 * self._window_s)

    def _change(self, mode: ReadMode) -> None:
        # Until what was read before has been taken.
        self._pass_over = self.mode.readers + mode.readers + 2
        self.mode = mode
