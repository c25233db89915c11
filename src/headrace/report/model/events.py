"""The event files of a run, read as a whole or followed while it runs, and their disk; attempts of a resumed run."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import BinaryIO, TypeVar

from headrace.errors import DataError, UsageError
from headrace.machine import disk
from headrace.machine.disk import disk_fails, is_full, unless
from headrace.machine.identity import own_version
from headrace.spec.events import Evaluated, Event, NonFinite, RunStarted, Saved, Stepped, ValuesLogged, decode
from headrace.spec.plain import from_plain
from headrace.spec.plan import Plan

MOST_LINE_BYTES = 16 << 20
"""No event is that long."""
_MOST_WORKERS = 1 << 20
"""No run has that many."""


@dataclass(frozen=True)
class EventLog:
    """The events of all processes by time; those of one process keep their order where times are equal.

    `torn_lines` counts files whose last line a killed process left half written; that line is left out.
    """

    events: tuple[Event, ...]
    torn_lines: int


def read_log(run_dir: Path | str) -> EventLog:
    """Returns the events of all processes of a run.

    Raises:
        UsageError: the directory holds no events.
        DataError: a complete line is no event; the message names the file and the line.
    """
    files = _files(Path(run_dir))
    if not files:
        raise UsageError(
            f"{run_dir} is no run directory: it holds no events/*.jsonl; "
            "give the run_dir of a fit, or one directory of a comparison"
        )
    events: list[Event] = []
    torn = 0
    for file in files:
        with file.open("rb") as stream:
            lines, rest = _lines(file, stream)
        events += [_event(file, number, line) for number, line in enumerate(lines, start=1)]
        if rest:
            try:
                events.append(decode(rest))
            except ValueError:
                torn += 1
    return EventLog(tuple(sorted(events, key=lambda event: event.time_s)), torn)


def read_events(run_dir: Path | str) -> tuple[Event, ...]:
    """Returns the events of `read_log`."""
    return read_log(run_dir).events


class Tail:
    """Follows the event files of a run that is running: each `read` returns what was written since the last.

    A line counts when its end is there; a file, when it appears. The directory need not exist yet. Lines of the kinds
    `skip` are not decoded.
    """

    def __init__(self, run_dir: Path | str, skip: Iterable[str] = (), new_only: bool = False) -> None:
        self._run_dir = Path(run_dir)
        self._skip = tuple(f'{{"kind":"{kind}"'.encode() for kind in skip)
        # The bytes and the lines that have been read of each file.
        self._places: dict[Path, tuple[int, int]] = {}
        for file in _files(self._run_dir) if new_only else ():
            lines, offset = _complete_lines(file, 0)
            self._places[file] = offset, len(lines)

    def read(self) -> tuple[Event, ...]:
        """Returns the events that have become complete since the last call, by time.

        A DataError if a complete line is no event; it is not read again.
        """
        events: list[Event] = []
        # Where the disk fails, what it has not given yet is read by a later call.
        with unless(disk_fails):
            for file in _files(self._run_dir):
                offset, count = self._places.get(file, (0, 0))
                lines, offset = _complete_lines(file, offset)
                self._places[file] = offset, count + len(lines)
                numbered = enumerate(lines, start=count + 1)
                events += [_event(file, number, line) for number, line in numbered if not line.startswith(self._skip)]
        return tuple(sorted(events, key=lambda event: event.time_s))


class LogTail:
    """Follows a text file: each `read` returns the lines that were completed since the last.

    The file need not exist yet. Following ends at the line `until`; `new_only` leaves out what earlier attempts wrote.
    """

    def __init__(self, file: Path, until: str, new_only: bool = False) -> None:
        self._file = file
        self._until = until
        self._offset = file.stat().st_size if new_only and disk.exists(file) else 0
        self._over = False

    def read(self) -> list[str]:
        """Returns the new lines, without their ends."""
        lines: list[str] = []
        with unless(disk_fails):
            if self._over or not disk.exists(self._file):
                return []
            complete, self._offset = _complete_lines(self._file, self._offset)
            lines = [line.decode(errors="replace") for line in complete]
        if self._until in lines:
            self._over = True
            return lines[: lines.index(self._until)]
        return lines


_CHECK_PERIOD_S = 1.0


class DiskMonitor:
    """Tells when a run's directory is gone, when its disk is full or fails, and when that is over.

    The run's own notices cannot: they are in that directory.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], object]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._full = self._fails = self._gone = False
        self._checked = monotonic()

    def check(self) -> None:
        """Looks at the disk once a second, however often it is called."""
        if monotonic() < self._checked + _CHECK_PERIOD_S:
            return
        self._checked = monotonic()
        if self._gone:
            return
        try:
            self._look()
        except OSError as error:
            if not disk_fails(error):
                raise
            if not self._fails:
                self._say(
                    f"the disk of {self._run_dir} fails ({error.strerror}): training goes on, without new checkpoints; "
                    "events and notices wait until it works again, and what workers print is lost"
                )
            self._fails = True

    def _look(self) -> None:
        if not disk.is_folder(self._run_dir):
            self._gone = True
            self._say(f"{self._run_dir} is gone, with its events and checkpoints: training goes on; the model is kept")
            return
        full = is_full(self._run_dir)
        if self._fails:
            self._say(f"the disk of {self._run_dir} works again")
        if full and not self._full:
            self._say(
                f"the disk of {self._run_dir} is full: training goes on, without new checkpoints; events and notices "
                "wait until there is room, and what workers print is lost"
            )
        elif self._full and not full:
            free = shutil.disk_usage(self._run_dir).free
            self._say(f"the disk of {self._run_dir} has room again: {free:,} bytes")
        self._full, self._fails = full, False


def _complete_lines(file: Path, offset: int) -> tuple[list[bytes], int]:
    """Returns the lines from an offset on whose end is there, without their ends, and the offset behind them."""
    if file.stat().st_size <= offset:
        return [], offset
    with file.open("rb") as stream:
        stream.seek(offset)
        lines, _ = _lines(file, stream)
    return lines, offset + sum(len(line) + 1 for line in lines)


def _lines(file: Path, stream: BinaryIO) -> tuple[list[bytes], bytes]:
    """Returns the complete lines without their ends, and what comes after the last end."""
    lines: list[bytes] = []
    while (line := stream.readline(MOST_LINE_BYTES)).endswith(b"\n"):
        lines.append(line[:-1])
    if len(line) == MOST_LINE_BYTES:
        raise DataError(f"{file}: after {len(lines):,} lines comes one of more than {MOST_LINE_BYTES:,} bytes")
    return lines, line


def _files(run_dir: Path) -> list[Path]:
    """Returns the launcher's file first, then by rank, so that ties in time come in a fixed order.

    A pipe or a device of such a name is none: it would be read for ever.
    """
    files = (file for file in (run_dir / "events").glob("*.jsonl") if disk.is_file(file))
    return sorted(files, key=lambda file: (len(file.name) * (file.stem != "launcher"), file.name))


def _event(file: Path, number: int, line: bytes) -> Event:
    try:
        return decode(line)
    except ValueError as error:
        raise DataError(f"{file}, line {number}: {error}; {_why(file)}") from error


_WRITTEN_BY = re.compile(rb'"versions": ?{[^}]*"headrace": ?"([^"\\]{1,40})"')


def _why(file: Path) -> str:
    """Returns why a line may be no event: another version wrote it, or something changed it."""
    launcher = file.with_name("launcher.jsonl")
    found = []
    if disk.is_file(launcher):
        with launcher.open("rb") as stream:
            found = _WRITTEN_BY.findall(stream.read(MOST_LINE_BYTES))
    written, here = (found[-1].decode(errors="replace") if found else ""), own_version()
    if written and written != here:
        return f"headrace {written} wrote it, and this is {here}: read it with that version"
    return "the file was changed after the run, or its disk was full"


E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Attempt:
    """The time from one start of a run to its end or crash.

    `started.resumed_step` rounds had been done before; `events` leave out what a later attempt repeated.
    """

    started: RunStarted
    events: tuple[Event, ...]

    @cached_property
    def steps(self) -> Mapping[int, Sequence[Stepped]]:
        """Each worker's steps, by rank."""
        by_rank: dict[int, list[Stepped]] = defaultdict(list)
        for event in of_kind(Stepped, self.events):
            by_rank[event.rank].append(event)
        return dict(sorted(by_rank.items()))

    @cached_property
    def plan(self) -> Plan:
        """The plan that it began with; raises DataError if the event has no valid one."""
        try:
            return from_plain(Plan, dict(self.started.plan))
        except TypeError as error:
            raise DataError(f"the run_started event has no valid plan: {error}") from error


def attempts(events: Iterable[Event]) -> tuple[Attempt, ...]:
    """Returns a run's attempts in order, from all events by time; none without a run_started event.

    Raises:
        DataError: a run_started event has a number of workers that no run has.
    """
    begun: list[tuple[RunStarted, list[Event]]] = []
    early: list[Event] = []
    for event in events:
        if isinstance(event, RunStarted):
            if not 0 < event.workers <= _MOST_WORKERS:
                raise DataError(
                    f"the run_started event counts {event.workers} workers; a run has 1 to {_MOST_WORKERS:,}"
                )
            for _, past in begun:
                past[:] = [each for each in past if not is_done_again(each, event)]
            begun.append((event, early))
            early = []
        (begun[-1][1] if begun else early).append(event)
    return tuple(Attempt(started, tuple(own)) for started, own in begun)


def of_kind(kind: type[E], events: Iterable[Event]) -> Iterator[E]:
    """Returns the events of one kind."""
    return (event for event in events if isinstance(event, kind))


def is_done_again(event: Event, start: RunStarted) -> bool:
    """Tells whether an attempt that has started later repeats what an event is about."""
    match event:
        case Stepped():
            kept = any(first <= event.lease < stop for first, stop in start.resumed_leases)
            return event.step >= start.resumed_step and not kept
        case NonFinite():
            return event.step >= start.resumed_step
        # These say how many rounds were done, not which one.
        case Evaluated() | Saved() | ValuesLogged():
            return event.step > start.resumed_step
    return False
