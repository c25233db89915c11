"""Chooses how batches are read: inline, by threads or by processes, and by how many.

It begins with the cores that training leaves free, and tries another mode only while training waits for data. A trial
counts the batches that training takes during it, so that it includes what the mode costs training.

    window      current mode ──► try another ──► faster: it becomes the current one
                     ▲                │
                     └── not faster ──┘         all tried: rest, then again with longer windows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

QUICK_S = 0.0003
"""A batch that takes less time is not worth a thread."""
_WORTH_S = 0.001
"""A batch that takes less time is not worth a process."""
_WAITING = 0.03
"""Share of the time that training may wait."""
_GAIN = 0.05
"""Least gain for which the number of readers changes."""
_OTHERS_GAIN = 0.15
"""Least gain for which the kind of readers changes: processes take memory."""
_HOPELESS = 0.8
"""A mode that was once slower than this share of the current rate is tried again only after the longest window."""
_NEARLY_TWICE = 1.6
"""If twice the threads gain this factor, they do not block each other, and processes can gain little more."""

_WINDOW = 8
_WINDOW_S, _LONGEST_WINDOW_S = 0.1, 0.8
_LONG = 5
_REST_S = 1.0


@dataclass(frozen=True)
class ReadMode:
    """How batches are read: `parallel` is "inline", "threads" or "processes"; inline has 0 readers."""

    parallel: str
    readers: int = 0

    def __str__(self) -> str:
        one = {"threads": "1 thread", "processes": "1 process"}
        if self.parallel == "inline":
            return "the worker by itself"
        return one[self.parallel] if self.readers == 1 else f"{self.readers} {self.parallel}"


@dataclass(frozen=True)
class ReadModes:
    """The kinds of modes that may be chosen, the cores that training leaves free, and the most readers."""

    kinds: tuple[str, ...]
    free: int
    most: int

    def without(self, kind: str) -> ReadModes:
        """Returns the modes of the other kinds."""
        return replace(self, kinds=tuple(other for other in self.kinds if other != kind))

    def first(self, read_s: float) -> ReadMode:
        """Returns the mode to begin with, if one reader takes `read_s` for a batch."""
        kind = self.kinds[0]
        if kind == "inline" or ("inline" in self.kinds and read_s < QUICK_S):
            return ReadMode("inline")
        return ReadMode(kind, self.free)

    def neighbors(self, mode: ReadMode, rate: float, read_s: float, computing_s: float) -> list[ReadMode]:
        """Returns the modes that may be faster than `mode`, the likeliest first.

        `mode` yields `rate` batches a second; a batch takes a reader `read_s`, of which it computes for `computing_s`.
        """
        more = min(self.most, mode.readers + max(1, mode.readers // 2))
        fewer = max(min(mode.readers, self.free), mode.readers - max(1, mode.readers // 3))
        modes = []
        if mode.parallel == "inline":
            modes += [ReadMode("threads", self.free)] if read_s >= QUICK_S else []
        else:
            modes += [ReadMode(mode.parallel, more), ReadMode(mode.parallel, fewer)]
        if mode.parallel != "processes" and read_s >= _WORTH_S:
            modes.insert(1, ReadMode("processes", max(mode.readers, min(2, self.most))))
        if mode.parallel == "processes":
            modes.append(ReadMode("threads", mode.readers))
        # Inline, it cannot be faster than the time that it computes.
        if rate * (1 + _GAIN) * computing_s < 1:
            modes.append(ReadMode("inline"))
        return [other for other in dict.fromkeys(modes) if other.parallel in self.kinds and other != mode]


class Autotuner:
    """Tries other modes while training waits, and keeps those that make it faster.

    `mode` is the one to read with now, `current` the best known: they differ during a trial. `on_change` takes the new
    mode and the rates before and now, batches a second. The first `skip_batches` are not counted.
    """

    def __init__(
        self,
        mode: ReadMode,
        modes: ReadModes,
        on_change: Callable[[ReadMode, float, float], object] = lambda *_: None,
        skip_batches: int = 0,
    ) -> None:
        self.mode = self.current = mode
        self._modes = modes
        self._on_change = on_change
        self._skip_batches = skip_batches
        self._batches = 0
        self._began = self._waited_before = 0.0
        self._read_s = self._computing_s = 0.0
        self._rate = self._waiting = 0.0
        self._untried: list[ReadMode] | None = None
        self._known: dict[ReadMode, float] = {}
        self._window_s, self._rest_s, self._rests_until = _WINDOW_S, _REST_S, -math.inf

    def update(self, now: float, waited_s: float, read_s: float, computing_s: float) -> ReadMode:
        """Returns the mode for the next batch; to be called at every batch.

        `now` is in seconds of any monotonic clock, `waited_s` the time that training has waited in all; reading this
        batch took `read_s`, of which the reader computed for `computing_s`.
        """
        if self._skip_batches > 0:
            self._skip_batches -= 1
            self._begin(now, waited_s)
            return self.mode
        self._batches += 1
        self._read_s += read_s
        self._computing_s += computing_s
        elapsed = now - self._began
        # Slow batches need fewer samples.
        enough = _WINDOW if elapsed < _LONG * self._window_s else _WINDOW // 2
        if self._batches >= max(enough, 2 * self.mode.readers) and elapsed >= self._window_s:
            # Mean values: the last batch of an epoch may be short.
            self._read_s /= self._batches
            self._computing_s /= self._batches
            self._decide(now, self._batches / elapsed, (waited_s - self._waited_before) / elapsed)
            self._begin(now, waited_s)
        return self.mode

    def exclude(self, kind: str) -> ReadMode:
        """Excludes a kind that does not work; returns the mode to read with."""
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
                self._untried = self._candidates()
            if self._untried:
                self._change(self._untried.pop(0))
            else:
                self._rests_until, self._untried = now + self._rest_s, None
                self._rest_s *= 2
                if self._window_s == _LONGEST_WINDOW_S:
                    # Other programs may have slowed those trials.
                    self._known.clear()
                self._window_s = min(_LONGEST_WINDOW_S, 2 * self._window_s)

    def _judge(self, rate: float) -> None:
        """Keeps the tried mode or goes back to the current one."""
        tried, before = self.mode, self.current
        gain = _GAIN if tried.parallel == before.parallel else _OTHERS_GAIN
        # If training waits little, little can be gained.
        if rate < self._rate * (1 + min(gain, self._waiting / 2)):
            self._known[tried] = rate
            self._change(before)
            return
        self.current = tried
        self._known[before] = self._rate
        self._on_change(tried, self._rate, rate)
        if tried.parallel == before.parallel == "threads" and rate > _NEARLY_TWICE * self._rate:
            self._modes = self._modes.without("processes")
        self._rate = rate
        self._untried = [mode for mode in self._candidates() if mode != before]

    def _candidates(self) -> list[ReadMode]:
        modes = self._modes.neighbors(self.current, self._rate, self._read_s, self._computing_s)
        return [mode for mode in modes if self._known.get(mode, math.inf) > _HOPELESS * self._rate]

    def _change(self, mode: ReadMode) -> None:
        # Batches of the mode before are still to come.
        self._skip_batches = self.mode.readers + mode.readers + 2
        self.mode = mode
