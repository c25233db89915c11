"""A worker's way through a run whose workers go on by themselves, and meet after some rounds."""

from __future__ import annotations

from time import perf_counter

from headrace.engine.journal import Journal
from headrace.replica.meetings import Meetings, Met
from headrace.spec.averaged import Averaged

__all__ = ["Apart"]


class Apart:
    """Args:
    meetings: this worker's part in them.
    rank: of this worker.
    journal: of this process.
    """

    def __init__(self, meetings: Meetings, rank: int, journal: Journal) -> None:
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

    def _tell(self, met: Met, done: int, began: float) -> None:
        if self._rank == 0:
            took_s = perf_counter() - began
            now = self._journal.now()
            heard = Averaged(0, now, done, met.rounds, met.period, met.why, met.drift, took_s, met.left_out)
            self._journal.write(heard)
