"""The loop of workers that lease their data, and synchronize only at sync points."""

from __future__ import annotations

import sys
from collections.abc import Generator
from enum import Enum
from time import perf_counter
from types import TracebackType
from typing import Any

from headrace.errors import UsageError
from headrace.spec.job import Share
from headrace.spec.plan import replica_leader
from headrace.training.compute import Computed
from headrace.training.synchronization import DataLeases, Lease, SyncPoint
from headrace.worker.control import RunControl
from headrace.worker.loops.base import Loop, StepOutcome, Update, nothing
from headrace.worker.loops.rounds import averaged_event
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import WorkerSession


class _Phase(Enum):
    """What a worker does next about its data."""

    WORKING = "it has a lease, or asks for one"
    ASKED = "it has asked for a lease; the answer may be there, and is not begun"
    MEETING = "it is at a sync point"
    AGREED = "it is at a sync point, where all have agreed on what to do"


class LeasedLoop(Loop):
    """The loop of workers that push to servers, each at its own speed, and that may join and leave.

    A sync point is a round before which all workers wait for each other: to evaluate, to save, to end.
    """

    def __init__(self, session: WorkerSession, control: RunControl, leases: DataLeases) -> None:
        super().__init__(replica_leader(session.run.plan, session.rank))
        self._session = session
        self._control = control
        self._leases = leases
        self._phase = _Phase.WORKING
        self._lease: Lease | None = None
        self._number = -1  # of the current step's lease
        self._rest = range(0)
        self._point = -1  # rounds that are done at the sync point where this worker is, or was last
        self._open = session.progress.done < session.progress.rounds
        self._following: tuple[int, Share] | None = None
        control.statistics_weight = 0.0
        self._halted = False  # whether this worker has asked for a sync point
        self._stepped = False  # whether it has had data since the last one
        self._holds = False  # whether it has data that it has not trained on
        self._leaving = False

    def __enter__(self) -> None:
        try:
            self._leases.begin()
        except BaseException:
            self._leases.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leases.close()

    def shares(self) -> Generator[Share, None, None]:
        progress, control = self._session.progress, self._control
        self._open = not control.stopper.over and progress.done < progress.rounds
        # A worker's lease may be of the last round while others still do theirs: the run ends at a sync point.
        while self._open:
            share = self._next()
            if self._leaving:
                self._leases.ask(leaves=True)
                return
            if share is not None:
                progress.share = share
                yield share
            if self._reach_sync_point():
                control.save_if_due()
                self._open = not control.is_last()
                if self._open:
                    self._leave_sync_point()

    def part(self, batch: Any) -> Share:
        share = self._session.progress.share
        return Share(batch, share.examples, share.examples, share.epoch)

    @property
    def at_sync_point(self) -> bool:
        return self._phase is _Phase.AGREED or not self._open

    def require_sync_point(self, what: str) -> None:
        if self._open and not self._meets:
            raise UsageError(
                f"the loop on rank {self._session.rank} {what} after {self._session.progress.done} rounds, where its "
                "leases of the data are not done; workers that do not go in step meet where worker.evaluation_due "
                "or worker.epoch_ended: evaluate and break there, on every worker; steps=... makes a job shorter"
            )

    def complete(self, computed: Computed, update: Update) -> StepOutcome | None:
        self._leases.weigh(*lease_weight(self._session.progress.share, computed), computed.loss)
        update(nothing)
        self._control.guard.after_round(self._session.progress.done)
        return StepOutcome(self._number, self._leases.late, self._leases.records)

    def advance(self, outcome: StepOutcome) -> None:
        self._holds = False
        self._control.statistics_weight = float(self._session.progress.examples)
        result, self._leases.sync_result = self._leases.sync_result, None
        if result is not None:
            events = self._session.events
            events.write(averaged_event(events.rank, events.now(), self._session.progress.done, result))
        if outcome.late:
            # The rest of the lease is leased again, together with the late part.
            self._rest, self._lease = range(0), None
        if not self._rest:
            self._ask()
        self._ask_for_sync_point()
        self._reach_sync_point()

    def leave(self) -> bool:
        self.moved_bytes = self._leases.moved_bytes
        if not self._leaving:
            self.require_sync_point("ended")
        return not self._leaving

    def end(self) -> None:
        group = self._session.group
        # The servers must answer every worker that still asks.
        group.barrier()
        # Workers that hold the same part of the model have the same servers.
        if self._session.mates.rank == 0:
            self._leases.end()
        # The last, so that another worker can do it if the first is lost.
        group.barrier()

    @property
    def _meets(self) -> bool:
        return self._phase in (_Phase.MEETING, _Phase.AGREED)

    def _next(self) -> Share | None:
        """Blocks until there is a lease; returns its next share, or None at a sync point.

        A worker without a lease since the last sync point gets an empty share, so that the body of its loop reaches the
        next sync point.
        """
        progress, loader = self._session.progress, self._session.loader
        if self._holds:
            raise UsageError(
                f"the loop on rank {self._session.rank} went on without worker.step() or worker.update(); a lease of "
                "data that is not trained on would be missing from its epoch"
            )
        if not self._rest:
            self._ask()
            self._receive()
        if self._leaving:
            return None
        began = perf_counter()
        if self._lease is not None and not self._rest:
            self._phase = _Phase.WORKING
            self._rest = range(self._lease.round, self._lease.round + self._lease.rounds)
        if self._lease is not None:
            lease, round_, self._rest = self._lease, self._rest[0], self._rest[1:]
            self._number, progress.round = lease.lease, round_
            self._lease = lease if self._rest else None
            self._stepped = self._holds = True
            share = self._read(lease, round_)
        elif not self._stepped:
            self._stepped, self._number, progress.round = True, -1, self._point - 1
            share = loader.nothing(progress.round)
        else:
            return None
        progress.waited_s += perf_counter() - began
        return share

    def _read(self, lease: Lease, round_: int) -> Share:
        """Reads the share of a lease, and that of the next one already now, if something is prepared for it."""
        loader, known, self._following = self._session.loader, self._following, None
        share = known[1] if known and known[0] == lease.lease else loader.portion(round_, lease.part, lease.parts)
        following, prepare = self._leases.following, self._leases.prepare
        if following is not None and prepare is not None:
            next_share = loader.portion(following.round, following.part, following.parts)
            self._following = following.lease, next_share
            prepare(following.lease, next_share.batch)
        return share

    def _ask(self) -> None:
        if self._phase is not _Phase.WORKING:
            return
        if self._session.page.ranks[self._session.rank].leave:
            self._leaving = True
            return
        self._leases.ask()
        self._phase = _Phase.ASKED

    def _receive(self) -> None:
        """Blocks until the answer is there: a lease, or a sync point, where the parameters are fetched."""
        if self._phase is not _Phase.ASKED or self._lease is not None:
            return
        began = perf_counter()
        answer = self._leases.next()
        self._session.progress.waited_s += perf_counter() - began
        if isinstance(answer, Lease):
            self._lease = answer
        else:
            self._begin_sync_point(answer)

    def _begin_sync_point(self, point: SyncPoint) -> None:
        group = self._session.group
        self._phase, self._point = _Phase.MEETING, point.round
        group.regroup(point.members, point.number)

        def fetch() -> None:
            group.barrier()
            self._leases.renew()
            group.barrier()

        group.together(fetch)

    def _ask_for_sync_point(self) -> None:
        # Every worker does, because none knows which of them lives long enough.
        if not self._meets and not self._halted and self._control.wants_sync_point():
            self._halted = True
            self._leases.halt()

    def _reach_sync_point(self) -> bool:
        """Blocks until this worker has its next lease or is at a sync point, where all agree on what to do."""
        if self.at_sync_point:
            return True
        self._receive()
        if self._phase is not _Phase.MEETING:
            return False
        self._phase, self._halted = _Phase.AGREED, False
        self._session.progress.round = self._point - 1
        group = self._session.group

        def decide() -> None:
            # A worker that joined later does not know the earlier evaluations.
            self._control.stopper.agree(group)
            self._control.ask(self._session.progress.done)
            group.barrier()

        group.together(decide)
        return True

    def _leave_sync_point(self) -> None:
        done, self._phase, self._stepped = self._point, _Phase.WORKING, False
        group = self._session.group
        group.together(group.barrier)
        self._leases.advance(done, next_sync_point(self._session.run, self._session.loader.rounds_per_epoch, done))


def lease_weight(share: Share, computed: Computed) -> tuple[float, float]:
    """Returns the weight of a leased share's gradient, and the part of a global batch that the share is."""
    weight = float(computed.weight)
    if share.examples:
        # Where all weights are zero, one device also makes a step, with zero gradients.
        weight = max(weight, sys.float_info.min)
    return weight, share.asked / share.of if share.of else 0.0


def next_sync_point(run: RunSpec, rounds_per_epoch: int, done: int) -> int:
    """Returns the first round after `done` before which all workers must meet."""
    options, job = run.job.options, run.job
    points = [run.rounds(rounds_per_epoch)]
    if job.eval_data is not None:
        points.append(_after(done, options.eval_every or rounds_per_epoch))
    if run.train is not None:
        # The user's own loop may act after an epoch, or where an evaluation is due.
        points += [_after(done, rounds_per_epoch), _after(done, options.eval_every or rounds_per_epoch)]
    if run.checkpoints and run.checkpoints.every_steps:
        points.append(_after(done, run.checkpoints.every_steps))
    return min(points)


def _after(done: int, every: int) -> int:
    return (done // every + 1) * every
