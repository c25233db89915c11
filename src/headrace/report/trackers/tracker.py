"""The base of what writes a run's events to a service: in a thread of its own, and never at the cost of the run."""

from __future__ import annotations

import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.report.trackers.curves import EventCurves, Tracked, TrackedPicture
from headrace.spec.events import Event, RunEnded, RunStarted


def to_stderr(line: str) -> None:
    """Shows a line where no progress bar is."""
    sys.stderr.write(f"headrace: {line}\n")


class Tracker(ABC):
    """Takes a run's events (`fit(..., on_event=tracker)`) and writes their values in a thread.

    Where its package is missing, or its service fails or does not answer, one line says so, and training goes on.

    Args:
        service: its name in that line.
        every_s: seconds between two rounds that are written where rounds are shorter; 0 for every round.
        patience_s: how long the end of a run waits for the service.

    Attributes:
        say: shows that line.
        patience_s: as given.
    """

    def __init__(self, service: str, every_s: float, patience_s: float = 30.0) -> None:
        if isinstance(every_s, bool) or not (isinstance(every_s, int | float) and 0 <= every_s < math.inf):
            raise UsageError(f"every_s must be a number of seconds of at least 0, got {every_s!r}; 0 for every round")
        self.say: Callable[[str], object] = to_stderr
        self.every_s = float(every_s)
        self._service = service
        self.patience_s = patience_s
        self._failed = False
        self._misses_pictures = False
        self._thread: threading.Thread | None = None
        self._todo: SimpleQueue[Event | threading.Event | None] = SimpleQueue()
        self._curves: EventCurves | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Takes an event; at the run's end, blocks until all is written."""
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name=f"headrace-{self._service}", daemon=True)
            self._thread.start()
        self._todo.put(event)
        if isinstance(event, RunEnded):
            self.flush()

    @property
    def failed(self) -> bool:
        """Whether it has given up, and said so."""
        return self._failed

    def flush(self) -> None:
        """Blocks until all events so far are written, or the service has not answered for `patience_s`."""
        if self._thread is None or self._failed:
            return
        done = threading.Event()
        self._todo.put(done)
        if not done.wait(self.patience_s):
            self._fail(f"it has not answered for {self.patience_s:g} s")

    def close(self) -> None:
        """Writes what is left, also the steps that not every worker has finished; may be called twice."""
        self.flush()
        if self._thread is not None:
            self._todo.put(None)
            if not self._failed:
                self._thread.join(self.patience_s)
            self._thread = None

    @abstractmethod
    def begin(self, started: RunStarted) -> None:
        """Opens a run at the service, or goes on with one.

        Raises:
            UnfitMachine: the package is not installed.
        """

    @abstractmethod
    def write(self, entries: Sequence[Tracked]) -> None:
        """Writes some values and texts of the run."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Closes the run at the service; `status` is that of `RunEnded`, "" where the run has not told its end."""

    def _fail(self, cause: str) -> None:
        if not self._failed:
            self._failed = True
            self.say(f"{self._service} gets nothing more: {cause}; training goes on without it")

    def _follow(self) -> None:
        """Writes what comes until None comes; after a failure nothing is written."""
        while True:
            items = [self._todo.get()]
            with suppress(Empty):
                while True:
                    items.append(self._todo.get_nowait())
            over = None in items
            self._attempt([item for item in items if isinstance(item, Event)], over)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if over:
                return

    def _attempt(self, events: Sequence[Event], over: bool) -> None:
        if self._failed:
            return
        try:
            self._take(events)
            if over:
                self._finish("")
        except UnfitMachine as error:
            self._fail(str(error))
        except Exception as error:  # whatever the client of a service raises: none of it may end a training
            first_line = (str(error).splitlines() or [""])[0]
            self._fail(f"{type(error).__name__}: {first_line}")

    def _take(self, events: Sequence[Event]) -> None:
        entries: list[Tracked] = []
        for event in events:
            if isinstance(event, RunStarted):
                self._write_all(entries)
                self._finish("")
                self.begin(event)
                self._curves = EventCurves(event)
            if self._curves is None:
                continue
            entries += self._curves.take(event)
            if isinstance(event, RunEnded):
                self._write_all(entries)
                self._finish(event.status)
        self._write_all(entries)

    def _write_all(self, entries: list[Tracked]) -> None:
        here = tuple(each for each in entries if not isinstance(each, TrackedPicture) or disk.is_file(Path(each.path)))
        if len(here) < len(entries) and not self._misses_pictures:
            self._misses_pictures = True
            self.say(f"{self._service} gets no pictures: they are in the run's directory on rank 0's host")
        entries.clear()
        if here:
            self.write(here)

    def _finish(self, status: str) -> None:
        curves, self._curves = self._curves, None
        if curves is not None:
            self._write_all(list(curves.rest()))
            self.end(status)
