"""The loops of workers that all do every round: in lockstep, or synchronizing their parameters after a period."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from headrace.collectives.base import ProcessGroup
from headrace.data.loading.loader import Loader
from headrace.data.loading.transfer import delivered
from headrace.errors import UsageError
from headrace.spec.events import ParametersAveraged
from headrace.spec.job import Share
from headrace.spec.plan import replica_leader
from headrace.training.compute import Computed
from headrace.training.shared_buffers.synced import BufferSync, copy_first_buffers
from headrace.training.synchronization import PeriodicSync, SyncResult
from headrace.worker.balance import ShareBalancer
from headrace.worker.control import RunControl
from headrace.worker.loops.base import Loop, StepOutcome, Update
from headrace.worker.session import WorkerSession

if TYPE_CHECKING:
    from headrace.worker.loops.members import MemberChanges


class RoundLoop(Loop):
    """Each worker does its share of every round.

    Attributes:
        began: when this worker asked for the data of the current round.
    """

    def __init__(self, session: WorkerSession, control: RunControl, reporter: int = 0) -> None:
        super().__init__(reporter)
        self.began = 0.0
        self._session = session
        self._control = control
        self._changes: MemberChanges | None = None
        if not session.group.fixed:
            from headrace.worker.loops.members import MemberChanges

            self._changes = MemberChanges(session, control)

    def __enter__(self) -> None:
        if self._changes:
            self._changes.begin()

    @abstractmethod
    def _next_synchronization(self) -> int:
        """Returns after how many rounds the workers synchronize next, at the current round's end or later."""

    def count(self, share: Share) -> Share:
        """Returns the share with the number of examples that its weight refers to."""
        return share

    def _reassigns(self) -> bool:
        """Returns whether the next rounds are split otherwise than the one just done; all workers call it."""
        return False

    @property
    @abstractmethod
    def _needs_every_step(self) -> bool:
        """Whether the workers synchronize, so that none may leave out a step."""

    @property
    def at_sync_point(self) -> bool:
        # A round that comes again is not done.
        return not self.spoilt

    def shares(self) -> Generator[Share, None, None]:
        session, progress, control = self._session, self._session.progress, self._control
        device = torch.device(session.run.plan.role(session.rank).device)
        shares = self._read(device)
        try:
            while progress.done < progress.rounds and not control.stopper.over:
                progress.round += 1
                control.ask(self._next_synchronization())
                if self._changes:
                    self._changes.ask(self._next_synchronization())
                self.began = perf_counter()
                if self.attempt(lambda taken=shares: self._take(taken)):  # type: ignore[misc]
                    progress.waited_s = perf_counter() - self.began
                    yield progress.share
                if not self.spoilt:
                    self._require_step()
                    control.save_if_due()
                    if control.is_last():
                        return
                if self._changes and (self.spoilt or self._members_change()):
                    shares.close()
                    if not self._change():
                        return
                    shares = self._read(device)
                elif self._reassigns():
                    shares.close()
                    shares = self._read(device)
        except GeneratorExit:
            # A batch that the user's loop has not trained on is read again when the run resumes.
            progress.round -= not self._has_stepped()
            raise
        finally:
            shares.close()

    def leave(self) -> bool:
        return self._changes is None or not self._changes.has_left

    def attempt(self, act: Callable[[], None]) -> bool:
        if self._changes is None:
            return super().attempt(act)
        if not self.spoilt:
            self.spoilt = not self._changes.survives(act)
        return not self.spoilt

    def complete(self, computed: Computed, update: Update) -> StepOutcome | None:
        took_s = 0.0

        def act() -> None:
            nonlocal took_s
            update(self._commit)
            took_s = self._synchronize()
            self._control.guard.after_round(self._session.progress.done)

        self._weigh(computed)
        return StepOutcome(took_s=took_s) if self.attempt(act) else None

    def _weigh(self, computed: Computed) -> None:
        """Takes the current step's weight, before the exchange synchronizes."""

    def _commit(self) -> None:
        """Makes the round's sum count, for all workers or for none."""

    @abstractmethod
    def _synchronize(self) -> float:
        """Synchronizes after the update where that is due; returns the seconds that it took."""

    def _read(self, device: torch.device) -> Generator[Share, None, None]:
        session, progress = self._session, self._session.progress
        # What else is the user's may change the data between two epochs: nothing is read ahead of the next one, and
        # readers begin anew with it, as those of torch do.
        changes = session.run.train is not None or (bool(session.run.callbacks) and session.run.plan.workers == 1)
        period = session.loader.rounds_per_epoch if changes and not session.loader.stays else max(1, progress.rounds)
        return _in_periods(session.loader, progress.done, progress.rounds, period, device)

    def _take(self, shares: Iterator[Share]) -> None:
        self._session.progress.share = self.count(next(shares))

    @property
    def _is_synchronized(self) -> bool:
        """Whether the round just done counts, whatever happens to a worker later."""
        return True

    def _members_change(self) -> bool:
        """Tells whether members change after the round just done; a loss between two synchronizations spoils it."""
        assert self._changes is not None
        if self._is_synchronized:
            return self._changes.due(self._session.progress.done)
        self.spoilt = self._changes.begun
        return self.spoilt

    def _change(self) -> bool:
        """Goes on with other members, after what counts; returns whether this one stays."""
        assert self._changes is not None
        stays = self._changes.change(self.spoilt)
        self.spoilt = False
        return stays

    def _has_stepped(self) -> bool:
        session = self._session
        return bool(session.page.ranks[session.rank].heartbeat.step == session.progress.done)

    def _require_step(self) -> None:
        # A worker that leaves out a round would be a synchronization behind the others.
        if self._session.group.world > 1 and self._needs_every_step and not self._has_stepped():
            raise UsageError(
                f"the loop on rank {self._session.rank} went on without worker.step() or worker.update() in round "
                f"{self._session.progress.round}; every worker steps every batch, so that all meet in every round"
            )


class LockstepLoop(RoundLoop):
    """The loop of strategies in lock-step, and of workers that never synchronize."""

    def __init__(self, session: WorkerSession, control: RunControl) -> None:
        # Workers that decide together report together; each of the others reports its own rounds.
        super().__init__(session, control, 0 if session.run.strategy.lock_step else session.rank)
        how = session.run.job.options.sync_buffers
        # Workers that never synchronize train models of their own.
        combines = how != "local" and self._needs_every_step
        self._buffers = BufferSync(session.replica.compute.module, how == "mean") if combines else None
        self._balancer = ShareBalancer(session) if session.run.plan.balances else None

    @property
    def _needs_every_step(self) -> bool:
        return self._session.run.strategy.lock_step

    def _next_synchronization(self) -> int:
        return self._session.progress.done

    def _commit(self) -> None:
        self._session.group.commit()

    def count(self, share: Share) -> Share:
        session = self._session
        return count_examples(share, session.loader.drops, session.group, session.replica.compute.counts)

    def _weigh(self, computed: Computed) -> None:
        if self._balancer:
            self._balancer.note(self.began)

    def _reassigns(self) -> bool:
        return self._balancer is not None and self._balancer.reassigns()

    def part(self, batch: Any) -> Share:
        session = self._session
        share = session.progress.share
        # The loss of a worker that steps alone is the mean over its own share.
        of = share.of if self._needs_every_step else share.examples
        return Share(batch, share.examples, of, share.epoch, session.progress.round)

    def _synchronize(self) -> float:
        share, mates = self._session.progress.share, self._session.mates
        if self._buffers:
            began, buffers = perf_counter(), self._buffers
            # After the update: the round is done, even if a worker is lost meanwhile.
            mates.together(lambda: buffers.synchronize(mates, float(share.examples)))
            return perf_counter() - began
        if self._needs_every_step and share.of < mates.world:
            mates.together(lambda: copy_first_buffers(self._session.replica.compute.module, mates))
        return 0.0


def count_examples(share: Share, drops: bool, group: ProcessGroup, counts: bool = True) -> Share:
    """Returns a share that knows how many examples all workers have together; all workers call it.

    Args:
        drops: whether the data may leave examples out; if not, the share knows already.
        counts: whether this worker counts for its replica, whose ranks all have the same share.
    """
    if not drops:
        return share
    (total,) = group.sum([float(share.examples * counts)])
    return replace(share, of=int(total))


class PeriodicLoop(RoundLoop):
    """The loop of parameter averaging by all-reduce."""

    _needs_every_step = True

    def __init__(self, session: WorkerSession, control: RunControl, sync: PeriodicSync) -> None:
        super().__init__(session, control, replica_leader(session.run.plan, session.rank))
        self._sync = sync
        self._synchronized = session.progress.done

    @property
    def _is_synchronized(self) -> bool:
        return self._synchronized == self._session.progress.done

    def _next_synchronization(self) -> int:
        return self._sync.coming(self._session.progress.done)

    def part(self, batch: Any) -> Share:
        share = self._session.progress.share
        return Share(batch, share.examples, share.examples, share.epoch)

    def _weigh(self, computed: Computed) -> None:
        self._sync.weigh(float(computed.weight))

    def _synchronize(self) -> float:
        progress = self._session.progress
        done = progress.done
        if self._sync.coming(done) <= done:
            took_s = self._run(self._sync.synchronize)
        elif self._changes and done >= progress.rounds:
            # Here, and not in `finish`, where rounds that a lost worker has done could not come again.
            took_s = self._run(self._sync.end)
        else:
            return 0.0
        self._synchronized = done
        return took_s

    def finish(self) -> None:
        self._session.group.together(lambda: self._run(self._sync.end))

    def _take(self, shares: Iterator[Share]) -> None:
        if self._changes:
            # Else a loss would show at the next synchronization alone, after rounds in vain.
            self._changes.notice()
        super()._take(shares)

    def _run(self, synchronize: Callable[[int], SyncResult | None]) -> float:
        began = perf_counter()
        done = self._session.progress.done
        result = synchronize(done)
        took_s = perf_counter() - began
        if result is not None and self._session.group.rank == 0:
            rank, events = self._session.rank, self._session.events
            events.write(averaged_event(rank, events.now(), done, replace(result, took_s=took_s)))
        return took_s


def _in_periods(
    loader: Loader, done: int, rounds: int, period: int, device: torch.device
) -> Generator[Share, None, None]:
    while done < rounds:
        begin, done = done, min(rounds, (done // period + 1) * period)
        yield from delivered(loader.rounds(begin, done), device)


def averaged_event(rank: int, now: float, done: int, result: SyncResult) -> ParametersAveraged:
    """Returns the event of a synchronization after so many rounds."""
    return ParametersAveraged(
        *(rank, now, done, result.rounds, result.period, result.why, result.drift, result.took_s),
        *(result.left_out, result.number),
    )
