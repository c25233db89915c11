"""Workers that take local steps, and synchronize their parameters after a period of rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from headrace.spec.events import ParametersAveraged
from headrace.spec.job import Share
from headrace.spec.plan import replica_leader
from headrace.training.synchronization import PeriodicSync, SyncResult
from headrace.worker.control import RunControl
from headrace.worker.loops.rounds import RoundLoop
from headrace.worker.session import WorkerSession


class PeriodicLoop(RoundLoop):
    """The loop of parameter averaging by all-reduce."""

    meets = True

    def __init__(self, session: WorkerSession, control: RunControl, sync: PeriodicSync) -> None:
        super().__init__(session, control, replica_leader(session.run.plan, session.rank))
        self._sync = sync

    def next_meeting(self) -> int:
        return self._sync.coming(self._session.progress.done)

    def count(self, share: Share) -> Share:
        return share

    def part(self, batch: Any) -> Share:
        share = self._session.progress.share
        return Share(batch, share.examples, share.examples, share.epoch)

    def weigh(self, weight: float) -> None:
        self._sync.weigh(weight)

    def synchronize(self) -> float:
        done = self._session.progress.done
        if self._sync.coming(done) > done:
            return 0.0
        return self._meet(self._sync.meet)

    def finish(self) -> None:
        self._meet(self._sync.end)

    def _meet(self, meet: Callable[[int], SyncResult | None]) -> float:
        began = perf_counter()
        done = self._session.progress.done
        result = meet(done)
        took_s = perf_counter() - began
        if result is not None and self._session.rank == 0:
            events = self._session.events
            events.write(averaged_event(0, events.now(), done, replace(result, took_s=took_s)))
        return took_s


def averaged_event(rank: int, now: float, done: int, result: SyncResult) -> ParametersAveraged:
    """Returns the event of a synchronization after so many rounds."""
    return ParametersAveraged(
        *(rank, now, done, result.rounds, result.period, result.why, result.drift, result.took_s),
        *(result.left_out, result.number),
    )
