"""A worker's way through a run whose data is leased: portions, and the fences at which the workers meet."""

from __future__ import annotations

import sys

from headrace.collectives.base import ProcessGroup
from headrace.data import Loader
from headrace.errors import UsageError
from headrace.shared_memory.control_page import RankRecord
from headrace.spec.job import Share
from headrace.training.synchronization import DataLeases, Lease, SyncPoint
from headrace.worker.events import EventWriter
from headrace.worker.loops.periodic import averaged_event
from headrace.worker.run_spec import RunSpec


def next_fence(order: RunSpec, rounds_per_epoch: int, done: int) -> int:
    """Returns the first round after `done` before which all workers must meet: to evaluate, to save, to end."""
    options, job = order.job.options, order.job
    rounds = job.steps or (job.epochs or 0) * rounds_per_epoch
    fences = [rounds]
    if job.eval_data is not None:
        fences.append(_after(done, options.eval_every or rounds_per_epoch))
    if order.train is not None:
        # A loop of one's own may do what it likes after an epoch, and when it would evaluate.
        fences += [_after(done, rounds_per_epoch), _after(done, options.eval_every or rounds_per_epoch)]
    if order.checkpoints and order.checkpoints.every_steps:
        fences.append(_after(done, order.checkpoints.every_steps))
    return min(fences)


def _after(done: int, every: int) -> int:
    return (done // every + 1) * every


class LeasedLoop:
    """Args:
    order: the run.
    portions: its leases.
    loader: of the training data.
    group: the workers.
    record: this worker's, of the control page.
    journal: of this process.

    Attributes:
        fence: rounds that are done at the fence where this worker stands; -1 while it is at none.
        wanted_away: whether it was asked to leave, and has asked for nothing since.
        lease: of the last portion; -1 where that was nothing.
    """

    def __init__(
        self,
        order: RunSpec,
        portions: DataLeases,
        loader: Loader,
        group: ProcessGroup,
        record: RankRecord,
        journal: EventWriter,
    ) -> None:
        self.fence = -1
        self.wanted_away = False
        self.lease = -1
        self._record = record
        self._order = order
        self._portions = portions
        self._loader = loader
        self._group = group
        self._journal = journal
        self._portion: Lease | None = None
        self._rest = range(0)
        self._stepped = False
        self._asked = False
        self._held = False

    def next(self) -> tuple[int, Share] | None:
        """Waits for a portion; returns its round, and its data. None where the workers meet.

        A worker that has got nothing since the last fence gets an empty share before the next, so that the body of
        every worker's loop comes to the fence.
        """
        if self._held:
            raise UsageError(
                "the loop went on without worker.step() or worker.update(); a portion of the data that is not trained "
                "on would be missing from its epoch"
            )
        if not self._rest:
            self._ask()
            self.at_fence()
        if self.wanted_away:
            return None
        if self._portion is not None and not self._rest:
            self._asked = False
            self._rest = range(self._portion.round, self._portion.round + self._portion.rounds)
        if self._portion is not None:
            portion, round_, self._rest = self._portion, self._rest[0], self._rest[1:]
            self.lease = portion.lease
            self._portion = portion if self._rest else None
            self._stepped = self._held = True
            return round_, self._loader.portion(round_, portion.part, portion.parts)
        if not self._stepped:
            self._stepped, self.lease = True, -1
            return self.fence - 1, self._loader.nothing(self.fence - 1)
        return None

    def weigh(self, weight: float, share: Share) -> None:
        """Says what the gradient of the portion is worth."""
        if share.examples:
            # Data that weighs nothing is data: where all is such, one device makes a step with zeros, too.
            weight = max(weight, sys.float_info.min)
        self._portions.weigh(weight, share.examples / share.of if share.of else 0.0)

    @property
    def late(self) -> bool:
        """Whether the last portion's gradient came too late to count."""
        return self._portions.late

    def pushed(self, done: int) -> None:
        """Asks for the next portion, when the last has been pushed, after so many rounds."""
        self._held = False
        met, self._portions.meeting = self._portions.meeting, None
        if met is not None:
            self._journal.write(averaged_event(self._journal.rank, self._journal.now(), done, met))
        if self._portions.late:
            # What is left of it comes again with what is done.
            self._rest, self._portion = range(0), None
        if not self._rest:
            self._ask()

    def at_fence(self) -> bool:
        """Waits until this worker has its next portion or has come to a fence; then all have the same parameters."""
        if self.fence >= 0:
            return True
        if self._portion is None and self._asked:
            answer = self._portions.next()
            if isinstance(answer, Lease):
                self._portion = answer
            else:
                self._meet(answer)
        return self.fence >= 0

    def halt(self) -> None:
        """Asks for a fence soon."""
        self._portions.halt()

    def require_fence(self, rank: int, what: str, done: int) -> None:
        """Refuses what a loop may do at a fence alone: elsewhere the others would wait, for portions or for a meeting.

        Raises:
            UsageError: this worker is at no fence.
        """
        if self.fence < 0:
            raise UsageError(
                f"the loop on rank {rank} {what} after {done} rounds, where its portions of the data are not done; "
                "workers that do not go in step meet where worker.evaluation_due or worker.epoch_ended: evaluate and "
                "break there, on every worker; steps=... makes a job shorter"
            )

    def leave_fence(self) -> None:
        """Goes on, when all that was to be done here is done."""
        done, self.fence, self._asked, self._stepped = self.fence, -1, False, False
        self._group.together(self._group.barrier)
        until = next_fence(self._order, self._loader.rounds_per_epoch, done)
        self._portions.advance(done, until)

    def leave(self) -> None:
        """Leaves for good, between two portions, while others go on."""
        self._portions.ask(leaves=True)

    def _ask(self) -> None:
        if self._asked or self.fence >= 0:
            return
        if self._record.leave:
            self.wanted_away = True
            return
        self._portions.ask()
        self._asked = True

    def _meet(self, fence: SyncPoint) -> None:
        self.fence = fence.round
        self._group.regroup(fence.members, fence.meeting)

        def renew() -> None:
            self._group.barrier()
            self._portions.renew()
            self._group.barrier()

        self._group.together(renew)
