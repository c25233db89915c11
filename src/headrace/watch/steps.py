"""Lines of event files as arrays: steps are thousands a second, everything else is decoded as elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.spec.events import Event, RunStarted, ServerStats, Stepped, WorkerStarted, decode
from headrace.spec.plain import to_plain

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIELDS = (
    *("rank", "time_s", "step", "examples", "loss", "weight"),
    *("compute_s", "exchange_s", "update_s", "wait_s"),
)
_of = itemgetter(*_FIELDS)
_STEPPED = b'{"kind":"stepped"'
_LEFT_OUT = (b'{"kind":"pushes"', b'{"kind":"passed"', b'{"kind":"rows_asked"', b'{"kind":"fed"')
"""Events that the page shows nothing of."""

_MOST_S, _MOST = 1e9, 2.0**50
"""Numbers beyond are no times and counts of a run."""


@dataclass(frozen=True)
class Steps:
    """`Stepped` events, one array a field.

    Attributes:
        spent_s: compute, exchange, update, and waiting for data: an array with four columns.
        before_s: end of the worker's step before; NaN where that is not known.
    """

    rank: Ints
    time_s: Floats
    step: Ints
    examples: Floats
    loss: Floats
    weight: Floats
    spent_s: Floats
    before_s: Floats

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def began_s(self) -> Floats:
        """When each step began."""
        spent_s: Floats = self.spent_s.sum(axis=1)
        return self.time_s - spent_s

    def chosen(self, mask: npt.NDArray[np.bool_]) -> Steps:
        """Returns the steps that a mask names."""
        return Steps(*(each[mask] for each in vars(self).values()))

    @staticmethod
    def joined(parts: Sequence[Steps]) -> Steps:
        """Returns the steps of all parts, at least one."""
        if len(parts) == 1:
            return parts[0]
        return Steps(*(np.concatenate(each) for each in zip(*(vars(part).values() for part in parts), strict=True)))


@dataclass(frozen=True)
class Lines:
    """What some complete lines hold.

    Attributes:
        events: all but steps.
        bad: what is wrong with lines that are no events.
        last_s: end of the last step; NaN without one, and where a process started after it.
    """

    steps: Steps | None
    events: tuple[Event, ...]
    bad: tuple[str, ...]
    last_s: float


def read_lines(lines: Iterable[bytes], before_s: float) -> Lines:
    """Reads lines that follow each other in one file; `before_s` is the end of the step before them, NaN if unknown."""
    rows: list[tuple[Any, ...]] = []
    events: list[Event] = []
    bad: list[str] = []
    restarts: list[int] = []
    for line in lines:
        if line.startswith(_STEPPED):
            try:
                rows.append(_of(orjson.loads(line)))
                continue
            except (ValueError, KeyError):
                pass  # `decode` says what is wrong, and reads NaN.
        elif line.startswith(_LEFT_OUT):
            continue
        try:
            event = decode(line.decode())
        except ValueError as error:
            bad.append(str(error))
            continue
        if isinstance(event, Stepped):
            rows.append(tuple(getattr(event, field) for field in _FIELDS))
            continue
        if not _is_sound(event):
            bad.append(f"a number of {event.kind} is out of range")
            continue
        if isinstance(event, WorkerStarted | RunStarted):
            restarts.append(len(rows))
        events.append(event)
    steps = _table(rows, before_s, restarts, bad)
    if restarts and restarts[-1] == len(rows):
        last_s = np.nan
    else:
        last_s = float(steps.time_s[-1]) if steps is not None else before_s
    return Lines(steps, tuple(events), tuple(bad), last_s)


def _table(rows: list[tuple[Any, ...]], before_s: float, restarts: list[int], bad: list[str]) -> Steps | None:
    if not rows:
        return None
    try:
        table = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        table = np.array([row for row in rows if _is_numeric(row)], dtype=np.float64).reshape(-1, len(_FIELDS))
        restarts = [min(each, len(table)) for each in restarts]
    before = np.concatenate(([before_s], table[:-1, 1])) if len(table) else np.empty(0)
    before[[each for each in restarts if each < len(before)]] = np.nan
    counts, times, spent = table[:, [0, 2, 3, 5]], table[:, 1], table[:, 6:]
    # A comparison with NaN is false.
    sound = (counts >= 0).all(1) & (counts < _MOST).all(1) & (times >= 0) & (times < _MOST_S)
    sound &= (spent >= 0).all(1) & (spent < _MOST_S).all(1)
    if wrong := len(rows) - int(sound.sum()):
        bad += ["a step's numbers are out of range"] * wrong
        table, before = table[sound], before[sound]
    if not len(table):
        return None
    rank, step = table[:, 0].astype(np.int64), table[:, 2].astype(np.int64)
    return Steps(rank, table[:, 1], step, table[:, 3], table[:, 4], table[:, 5], table[:, 6:], before)


def _is_numeric(row: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int | float) or value is None for value in row)


def _is_sound(event: Event) -> bool:
    """Whether the page can add an event up: a file that was changed may hold any number."""
    if not (0 <= event.time_s < _MOST_S and -1 <= event.rank < _MOST):
        return False
    if isinstance(event, ServerStats):
        names = {*event.staleness, *event.waited_s, *(key for each in event.staleness.values() for key in each)}
        if not all(name.removeprefix("-").isdecimal() and len(name) < 16 for name in names):
            return False
    return _is_bounded(to_plain(event))


def _is_bounded(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_bounded, value.values()))
    if isinstance(value, list):
        return all(map(_is_bounded, value))
    return not isinstance(value, int) or abs(value) < _MOST
