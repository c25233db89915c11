"""A worker's word on how its batches are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.data.loading.loader import InputCounters
from headrace.spec.events import Notice
from headrace.worker.events import EventWriter


class InputReporter:
    """Writes down what a loader has counted, and tells the user what was left out, and what it has to say.

    Args:
        rank: of this worker.
        journal: of this process.
    """

    def __init__(self, rank: int, journal: EventWriter) -> None:
        self._rank = rank
        self._journal = journal
        self._said = 0
        self._passed_on = 0

    def tell(self, stages: InputCounters) -> None:
        """Writes an event; a loader calls this about once a second."""
        self._pass_on(stages)
        if stages.skipped and not self._said:
            self._say(stages, f"leaves out what cannot be had: {'; '.join(stages.shown)}")
        self._journal.write(stages.event(self._rank, self._journal.now()))

    @contextmanager
    def until_end(self, stages: InputCounters) -> Iterator[None]:
        """Writes the last event when what is done meanwhile has ended, however it ends."""
        try:
            yield
        finally:
            self._end(stages)

    def _end(self, stages: InputCounters) -> None:
        self._pass_on(stages)
        if stages.skipped > self._said:
            first = f"; the first: {'; '.join(stages.shown)}" if not self._said else ""
            plural = "s" * (stages.skipped != 1)
            self._say(stages, f"has left out {stages.skipped} example{plural} that could not be had{first}")
        if stages.event(self._rank, 0.0).batches:
            self._journal.write(stages.event(self._rank, self._journal.now()))

    def _pass_on(self, stages: InputCounters) -> None:
        for line in stages.notices[self._passed_on :]:
            self._journal.write(Notice(self._rank, self._journal.now(), line))
        self._passed_on = len(stages.notices)

    def _say(self, stages: InputCounters, what: str) -> None:
        self._said = stages.skipped
        self._journal.write(Notice(self._rank, self._journal.now(), f"rank {self._rank} {what}"))
