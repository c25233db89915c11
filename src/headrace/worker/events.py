"""A process's event file, and what a worker writes about its input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from headrace.data.loading.loader import InputCounters
from headrace.errors import UsageError
from headrace.machine.disk import disk_fails, takes_no_more, unless
from headrace.shared_memory.control_page import LastEvent
from headrace.spec.events import (
    LAUNCHER,
    Event,
    Failed,
    Notice,
    PipelineStepTimed,
    ServerEnded,
    StagePass,
    Stepped,
    ValuesLogged,
    WorkerEnded,
    encode,
)
from headrace.spec.patterns import require_name
from headrace.worker.run_spec import RunSpec, events_path

_FLUSH_EVERY_S = 0.25
_PASSED_EVERY, _PASSED_AT = 50, 5
"""Not the first steps, in which memory is allocated and caches are cold."""
_SHORT, _SHORT_REMEDY = 1000, 300
"""Characters of a failure's cause and remedy that are left in the control page."""


def _to_7_digits(seconds: float) -> float:
    """Returns seconds in steps of 100 ns, whose text is half as long; `round` takes three times as long."""
    return seconds * 1e7 // 1 / 1e7


class EventWriter:
    """Appends events to one file, a few times a second; while the disk takes nothing they stay in memory.

    `started` is the run's begin on the host's monotonic clock, seconds.

    Attributes:
        problem: why the file takes nothing now; "" while it does.
    """

    def __init__(self, run_dir: Path, rank: int, started: float) -> None:
        path = events_path(run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run appends.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.rank = rank
        self._started = started
        self._lines: list[str] = []
        self._waiting = b""
        self._flushed = monotonic()
        self.problem = ""

    def now(self) -> float:
        """Returns the seconds since the run began."""
        return monotonic() - self._started

    def write(self, event: Event) -> None:
        """Appends an event and flushes."""
        self._lines.append(encode(event))
        self.flush()

    def write_last(self, event: Failed | WorkerEnded | ServerEnded, record: LastEvent) -> None:
        """Appends a process's last event; where the file does not take it, it is left in the control page."""
        self.write(event)
        if self.problem:
            if isinstance(event, Failed):
                event = replace(event, traceback="", cause=event.cause[:_SHORT], remedy=event.remedy[:_SHORT_REMEDY])
            record.publish(encode(event))

    def stepped(
        self,
        step: int,
        epoch: int,
        examples: int,
        loss: float | None,
        weight: float,
        lease: int,
        *times_s: float,
        pulled: Sequence[int] = (),
        turn: str = "",
    ) -> None:
        """Appends a `Stepped` event, and flushes a few times a second."""
        wait_s, compute_s, exchange_s, update_s = map(_to_7_digits, times_s)
        now = monotonic()
        time_s = _to_7_digits(now - self._started)
        event = Stepped(
            self.rank, time_s, step, epoch, examples, loss, weight, wait_s, compute_s, exchange_s, update_s, lease,
            tuple(pulled), turn,
        )  # fmt: skip
        self._lines.append(encode(event))
        if now - self._flushed > _FLUSH_EVERY_S:
            self.flush()

    def log(self, values: Mapping[str, Any], done: int) -> None:
        """Appends numbers by name, after `done` rounds; a UsageError for what no curve can have."""
        numbers = {}
        for name, value in values.items():
            require_name(name)
            try:
                numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"log takes numbers by name, got {value!r:.60} for {name!r}") from error
        self._lines.append(encode(ValuesLogged(self.rank, self.now(), done, numbers)))
        if monotonic() - self._flushed > _FLUSH_EVERY_S:
            self.flush()

    def passed(self, step: int, in_flight: int, passes: Sequence[StagePass]) -> None:
        """Appends a `PipelineStepTimed` event after some steps of a pipeline: the same steps on all ranks."""
        if passes and step % _PASSED_EVERY == _PASSED_AT:
            started = self._started
            told = tuple(
                replace(each, began_s=each.began_s - started, ended_s=each.ended_s - started) for each in passes
            )
            self._lines.append(encode(PipelineStepTimed(self.rank, self.now(), step, in_flight, told)))

    def flush(self) -> None:
        """Writes the events in memory to the file."""
        self._flushed = monotonic()
        if self._lines:
            self._waiting += "\n".join([*self._lines, ""]).encode()
            self._lines.clear()
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            self.problem = ""
        except OSError as error:
            # A full disk does not end the training: files may be deleted, and a save reports the error.
            if not takes_no_more(error):
                raise
            self.problem = error.strerror or str(error)

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more: no other process can read what is written."""
        with unless(disk_fails):
            return os.fstat(self._file).st_nlink == 0
        return False

    def close(self) -> None:
        """Flushes and closes the file."""
        try:
            self.flush()
        finally:
            os.close(self._file)


def write_for_launcher(run: RunSpec, kind: Callable[..., Event], *fields: object) -> None:
    """Writes an event to the launcher's file, from a process that decides in its place or beside it."""
    with closing(EventWriter(run.run_dir, LAUNCHER, run.started)) as events:
        events.write(kind(LAUNCHER, events.now(), *fields))


class InputReporter:
    """Writes a loader's counts as events, and notices about examples that were left out."""

    def __init__(self, rank: int, events: EventWriter) -> None:
        self._rank = rank
        self._events = events
        self._reported_skips = 0
        self._reported_notices = 0

    def tell(self, stages: InputCounters) -> None:
        """Writes an event; a loader calls this about once a second."""
        self._pass_on(stages)
        if stages.skipped and not self._reported_skips:
            self._note_skips(stages, f"leaves out what cannot be had: {'; '.join(stages.shown)}")
        self._events.write(stages.event(self._rank, self._events.now()))

    @contextmanager
    def until_end(self, stages: InputCounters) -> Iterator[None]:
        """Returns a context that writes the last event at its end, also after an error."""
        try:
            yield
        finally:
            self._pass_on(stages)
            if stages.skipped > self._reported_skips:
                first = f"; the first: {'; '.join(stages.shown)}" if not self._reported_skips else ""
                plural = "s" * (stages.skipped != 1)
                self._note_skips(stages, f"has left out {stages.skipped} example{plural} that could not be had{first}")
            last = stages.event(self._rank, self._events.now())
            if last.batches:
                self._events.write(last)

    def _pass_on(self, stages: InputCounters) -> None:
        for line in stages.notices[self._reported_notices :]:
            self._events.write(Notice(self._rank, self._events.now(), line))
        self._reported_notices = len(stages.notices)

    def _note_skips(self, stages: InputCounters, what: str) -> None:
        self._reported_skips = stages.skipped
        self._events.write(Notice(self._rank, self._events.now(), f"rank {self._rank} {what}"))
