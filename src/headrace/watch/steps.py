"""Lines of event files as arrays: steps are thousands a second, everything else is decoded as elsewhere."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.spec.events import (
    Event,
    InputStats,
    RunStarted,
    ServerStats,
    SharesBalanced,
    Stepped,
    WorkerStarted,
    decode,
)
from headrace.spec.plain import to_plain

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIELDS = (
    *("rank", "time_s", "step", "examples", "loss", "weight"),
    *("compute_s", "exchange_s", "update_s", "wait_s", "lease"),
)
_of = attrgetter(*_FIELDS)
_LEFT_OUT = (b'{"kind":"pushes"', b'{"kind":"passed"', b'{"kind":"rows_asked"')
"""Events that the page shows nothing of."""

_MOST_S, _MOST = 1e9, 2.0**50
"""Numbers beyond are no times and counts of a run."""


@dataclass(frozen=True)
class Steps:
    """`Stepped` events, one array a field.

    Attributes:
        spent_s: compute, exchange, update, and waiting for data: an array with four columns.
        before_s: end of the worker's step before; NaN where that is not known.
        lease: the data lease, where data is leased; else -1.
        turn: the set of parameters that was trained, where sets take turns; else "".
    """

    rank: Ints
    time_s: Floats
    step: Ints
    examples: Floats
    loss: Floats
    weight: Floats
    spent_s: Floats
    before_s: Floats
    lease: Floats
    turn: npt.NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def began_s(self) -> Floats:
        """When each step began."""
        spent_s: Floats = self.spent_s.sum(axis=1)
        return self.time_s - spent_s

    def done_again(self, start: RunStarted) -> npt.NDArray[np.bool_]:
        """Returns which steps an attempt that has started later repeats, as `is_done_again` does for one."""
        again: npt.NDArray[np.bool_] = self.step >= start.resumed_step
        for first, stop in start.resumed_leases:
            again &= (self.lease < first) | (self.lease >= stop)
        return again

    def chosen(self, mask: npt.NDArray[np.bool_]) -> Steps:
        """Returns the steps that a mask names."""
        return Steps(*(each[mask] for each in vars(self).values()))


class LineReader:
    """Takes lines of event files; their steps become arrays all at once, since that costs as much for one as for many.

    Attributes:
        events: all but steps.
        bad: by source, what is wrong with lines that are no events.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.bad: dict[str, list[str]] = defaultdict(list)
        self._rows: list[tuple[Any, ...]] = []
        self._turns: dict[int, str] = {}
        self._sources: list[tuple[int, str]] = []

    def read(self, lines: Iterable[bytes], source: str, before_s: float = math.nan) -> float:
        """Reads lines that follow each other in one file.

        Args:
            before_s: the end of the step before them; NaN if unknown.

        Returns:
            the end of the last step; NaN where a process has started after it.
        """
        rows = self._rows
        self._sources.append((len(rows), source))
        for line in lines:
            if line.startswith(_LEFT_OUT):
                continue
            try:
                event = decode(line)
            except ValueError as error:
                self.bad[source].append(str(error))
                continue
            if isinstance(event, Stepped):
                if event.turn:
                    self._turns[len(rows)] = event.turn
                rows.append((*_of(event), before_s))
                before_s = event.time_s
            elif _is_sound(event):
                if isinstance(event, WorkerStarted | RunStarted):
                    before_s = math.nan
                self.events.append(event)
            else:
                self.bad[source].append(f"a number of {event.kind} is out of range")
        return before_s

    def steps(self) -> Steps | None:
        """Returns the steps of all lines; `bad` is complete then."""
        if not self._rows:
            return None
        table = np.array(self._rows, dtype=np.float64)
        turn = np.full(len(table), "", dtype=object)
        turn[list(self._turns)] = list(self._turns.values())
        counts, times, spent = table[:, [0, 2, 3, 5]], table[:, 1], table[:, 6:10]
        # A comparison with NaN is false.
        sound = (counts >= 0).all(1) & (counts < _MOST).all(1) & (times >= 0) & (times < _MOST_S)
        sound &= (spent >= 0).all(1) & (spent < _MOST_S).all(1)
        if not sound.all():
            for index in np.flatnonzero(~sound).tolist():
                source = self._sources[bisect_right(self._sources, index, key=itemgetter(0)) - 1][1]
                self.bad[source].append("a step's numbers are out of range")
            table, turn = table[sound], turn[sound]
        if not len(table):
            return None
        rank, step = table[:, 0].astype(np.int64), table[:, 2].astype(np.int64)
        at = table.T
        return Steps(rank, at[1], step, at[3], at[4], at[5], table[:, 6:10], at[11], at[10], turn)


def _is_sound(event: Event) -> bool:
    """Whether the page can add an event up: a file that was changed may hold any number."""
    if not (0 <= event.time_s < _MOST_S and -1 <= event.rank < _MOST):
        return False
    if isinstance(event, RunStarted) and not _is_start(event):
        return False
    if isinstance(event, InputStats) and not _is_input(event):
        return False
    if isinstance(event, SharesBalanced) and not event.seconds:
        return False
    if isinstance(event, ServerStats):
        names = {*event.staleness, *event.waited_s, *(key for each in event.staleness.values() for key in each)}
        if not all(name.removeprefix("-").isdecimal() and len(name) < 16 for name in names):
            return False
    return _is_bounded(to_plain(event))


def _is_start(event: RunStarted) -> bool:
    """Whether what runs where, and the command, can be read."""
    roles = event.plan.get("roles", ())
    try:
        shlex.split(event.command)
    except ValueError:
        return False
    if not isinstance(roles, list | tuple) or not all(isinstance(each, dict) and "host" in each for each in roles):
        return False
    return min(event.resumed_step, event.global_batch_size, event.examples_per_epoch, event.threads) >= 0


def _is_input(event: InputStats) -> bool:
    times = [event.seconds, event.waited_s, *(each.busy_s for each in event.stages)]
    times += [each.waiting_s for each in event.stages]
    counts = min(event.readers, event.examples, event.batches)
    return bool(event.stages) and counts >= 0 and all(0 <= each < _MOST_S for each in times)


def _is_bounded(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_bounded, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_bounded, value))
    return not isinstance(value, int) or abs(value) < _MOST
