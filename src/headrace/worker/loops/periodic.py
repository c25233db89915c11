"""A worker's way through a run whose workers go on by themselves, and meet after some rounds."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from headrace.spec.events import ParametersAveraged
from headrace.training.synchronization import PeriodicSync, SyncResult
from headrace.worker.events import EventWriter


class PeriodicLoop:
    """Args:
    meetings: this worker's part in them.
    rank: of this worker.
    journal: of this process.
    """

    def __init__(self, meetings: PeriodicSync, rank: int, journal: EventWriter) -> None:
        self.meetings = meetings
        self._rank = rank
        self._journal = journal

    def come(self, done: int) -> float:
        """Meets the others, if that is after so many rounds; returns the seconds that it took."""
        if self.meetings.coming(done) > done:
            return 0.0
        began = perf_counter()
        self._tell(self.meetings.meet(done), done, began)
        return perf_counter() - began

    def end(self, done: int) -> None:
        """Lets this worker's model be the trained one."""
        began = perf_counter()
        met = self.meetings.end(done)
        if met is not None:
            self._tell(met, done, began)

    def _tell(self, met: SyncResult, done: int, began: float) -> None:
        if self._rank == 0:
            self._journal.write(
                averaged_event(0, self._journal.now(), done, replace(met, took_s=perf_counter() - began))
            )


def averaged_event(rank: int, now: float, done: int, met: SyncResult) -> ParametersAveraged:
    """Returns the event that tells of a meeting after so many rounds."""
    return ParametersAveraged(
        rank, now, done, met.rounds, met.period, met.why, met.drift, met.took_s, met.left_out, met.number
    )
