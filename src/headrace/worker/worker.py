"""What a training loop holds in its hands, under every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.data import Loader, delivered
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Evaluated, Notice
from headrace.spec.job import Share
from headrace.training.batch_norm import averaged_buffers
from headrace.training.compute import Computed
from headrace.training.exchange import Replica
from headrace.worker.batch_counts import catch_up, counted
from headrace.worker.evaluation import EarlyStopper, Evaluation, average
from headrace.worker.events import EventWriter
from headrace.worker.loaded_checkpoint import LoadedCheckpoint
from headrace.worker.loops.leased import LeasedLoop
from headrace.worker.loops.periodic import PeriodicLoop
from headrace.worker.losses import LossReader
from headrace.worker.nonfinite import NonFiniteHandler
from headrace.worker.run_spec import RunSpec
from headrace.worker.saving import Saver
from headrace.worker.state import WorkerState


def train(worker: Worker) -> None:
    """The usual loop."""
    if worker.evaluation_due and worker.round + 1 >= worker.rounds:
        # A run that was over before goes on to nothing; its caller wants its metrics all the same.
        worker.evaluate()
    for batch in worker.batches():
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()


class Worker:
    """One process that computes.

    Args:
        order: the run.
        rank: index in the run.
        replica: the model and its three verbs.
        loader: of the training data.
        evaluation: of the evaluation data, if there is any.
        group: the workers of this host.
        page: the run's signals.
        journal: of this process.

    Attributes:
        rank: index in the run.
        world: how many workers there are; where they may come and go, how many met last.
        model: this worker's copy.
        device: where it lives.
        rounds: how many there are in the whole run.
        round: the one that is being done, from 0; the last of them in a run that goes on from a checkpoint.
    """

    def __init__(
        self,
        order: RunSpec,
        rank: int,
        replica: Replica,
        loader: Loader,
        evaluation: Evaluation | None,
        group: ProcessGroup,
        page: ControlPage,
        journal: EventWriter,
    ) -> None:
        self.rank = rank
        self.world = group.world
        self.model: nn.Module = replica.compute.module
        self.device = torch.device(order.plan.role(rank).device)
        self.rounds = order.job.steps or (order.job.epochs or 0) * loader.rounds_per_epoch
        self.round = order.resume.done - 1 if order.resume else -1
        options = order.job.options
        at_once = self.device.type == "cpu" or options.on_nonfinite != "raise" or options.precision == "fp16"
        self._losses = LossReader(rank, at_once, page, journal)
        self._order = order
        self._replica = replica
        self._loader = loader
        self._evaluation = evaluation
        self._counts, self._mates = replica.compute.counts, replica.compute.mates or group
        self._group = group
        self._page = page
        self._journal = journal
        self._saver = Saver(order, group, page, journal)
        at_home = order.resume is not None and order.resume.folder == self._saver.folder.path
        self._over_before = at_home and self.round + 1 >= self.rounds
        self._stopper = EarlyStopper(options.early_stopping)
        self._state = WorkerState(order, rank, replica, group, self._stopper, loader.rounds_per_epoch)
        record = page.ranks[rank]
        self._leased = LeasedLoop(order, replica.portions, loader, group, record, journal) if replica.portions else None
        self._apart = PeriodicLoop(replica.meetings, rank, journal) if replica.meetings else None
        self._replaces = record.restarts > 0
        self._alone = self._leased is not None or self._apart is not None
        place = order.plan.role(rank).stage if self._alone else None
        self._recovery = NonFiniteHandler(
            options.on_nonfinite, self.model, group, page, journal, self._roll_back, place
        )
        self._halted, self._agreed, self._open = False, False, bool(self._leased) and self.round + 1 < self.rounds
        self._share = Share(None, 0, 0, 0)
        self._computed: Computed | None = None
        self._times = [0.0, 0.0, 0.0, 0.0]
        self._examples, self._deadline = 0, order.deadline(self._replaces)

    @property
    def epoch_ended(self) -> bool:
        """Whether the round just done was the last of its epoch or of the run; not where the run was asked to end.

        Where workers do not go in step, that is when all have done all rounds up to it; then this waits for them.
        """
        if not self._come_to_fence():
            return False
        done = self.round + 1
        return done % self._loader.rounds_per_epoch == 0 or done >= self.rounds

    @property
    def evaluation_due(self) -> bool:
        """Whether the options want an evaluation after the round just done; waits as `epoch_ended` does."""
        if not self._come_to_fence():
            return False
        every = self._order.job.options.eval_every
        return self.epoch_ended if every is None else (self.round + 1) % every == 0 or self.round + 1 >= self.rounds

    def batches(self) -> Iterator[Any]:
        """Yields this worker's share of every global batch, on its device; where data is leased, what it gets."""
        first = self.round + 1
        rolls_back = self._order.job.options.on_nonfinite == "rollback"
        if not self._replaces and self._saver.must_begin(first, rolls_back):
            self._save()
            # Whatever happens next: a history that was left does not come back, and there is something to roll back to.
            self._saver.wait()
        if self._leased is not None:
            yield from self._portions(self._leased)
            return
        shares = delivered(self._loader.rounds(first, self.rounds), self.device)
        try:
            for round_ in range(first, self.rounds):
                if self._stopper.over:
                    return
                self.round = round_
                self._ask()
                began = perf_counter()
                self._share = counted(next(shares), self._loader.drops and not self._apart, self._group, self._counts)
                batch = self._replica.compute.place(self._share.batch)
                self._times[0] = perf_counter() - began
                yield batch
                self._require_step()
                # Now, when whoever asks for the next batch has done with this one, its evaluation too.
                if self._saver.wanted(self.round + 1) and not self._is_last():
                    self._save()
                if self._is_last():
                    return
        except GeneratorExit:
            # A loop that leaves a batch undone has it again when it goes on.
            self.round -= self._page.ranks[self.rank].heartbeat.step <= self.round
            raise
        finally:
            shares.close()
            self._losses.read()
            self._journal.flush()

    def _portions(self, leased: LeasedLoop) -> Iterator[Any]:
        self._open = not self._stopper.over and self.round + 1 < self.rounds
        try:
            # Its own portion may be of the last round while others still do theirs: it is over at a fence.
            while self._open:
                began = perf_counter()
                item = leased.next()
                if leased.wanted_away:
                    leased.leave()
                    return
                if item is not None:
                    self.round, self._share = item
                    batch = self._replica.compute.place(self._share.batch)
                    self._times[0] = perf_counter() - began
                    yield batch
                    self._ask_for_fence(leased)
                if self._come_to_fence():
                    if self._saver.wanted(self.round + 1) and not self._is_last():
                        self._save()
                    self._open = not self._is_last()
                    if self._open:
                        self._agreed = False
                        leased.leave_fence()
        finally:
            self._losses.read()
            self._journal.flush()

    def step(self, batch: Any) -> float | None:
        """Computes, synchronizes, updates; returns this worker's mean loss.

        None where this worker had no part of the last batch or its loss is not finite, and on devices whose
        losses are read later, many at a time, so as not to wait for each.
        """
        began = perf_counter()
        self._recovery.before()
        self._replica.exchange.begin(self.round)
        self._computed = self._replica.compute.run(self._part(batch))
        self._times[1] = perf_counter() - began
        return self.update()

    def backward(self, loss: Tensor | Mean) -> None:
        """Differentiates a loss of one's own, the mean over this worker's share: the first half of `step`."""
        began = perf_counter()
        self._recovery.before()
        self._replica.exchange.begin(self.round)
        self._computed = self._replica.compute.backward(loss, self._part(None))
        self._times[1] = perf_counter() - began

    def update(self) -> float | None:
        """Synchronizes and updates: the second half of `step`."""
        if self._computed is None:
            raise UsageError("worker.update() without a worker.backward(loss) before it")
        computed, self._computed = self._computed, None
        began = perf_counter()
        loss = self._losses.now(computed.loss)
        finite = loss is None or math.isfinite(loss)
        if loss is not None and not finite:
            self._recovery.tell(self.rank, loss)
        if self._leased:
            self._leased.weigh(computed.weight, self._share)
        if self._apart:
            self._apart.meetings.weigh(computed.weight)
        verdict = self._replica.exchange.synchronize(finite)
        synchronized = perf_counter()
        if verdict.apply:
            self._replica.exchange.update(self.round)
            self._recovery.good()
        else:
            self._replica.exchange.skip(self.round)
            self._recovery.bad(verdict, self.round)
        self._times[2:] = synchronized - began, perf_counter() - synchronized
        if self._apart:
            self._times[2] += self._apart.come(self.round + 1)
        elif not self._leased and self._share.of < self._mates.world and self._order.strategy.synchronous:
            catch_up(self.model, self._mates)
        if self._leased and self._leased.late:
            # The portion counts where it is done again.
            computed, finite = Computed(None, 0.0), False
            self._share = Share(None, 0, 0, self._share.epoch)
        recorded = self._record(computed, loss if finite else None)
        if self._leased:
            self._leased.pushed(self.round + 1)
        return recorded

    def evaluate(self) -> dict[str, float]:
        """Computes the loss and the metrics over the whole evaluation set, each example once.

        Every worker calls it and gets the same numbers; {} where the job has no evaluation data.
        """
        if self._leased is not None and self._open:
            self._leased.require_fence(self.rank, "calls worker.evaluate()", self.round + 1)
        if self._evaluation is None:
            return {}
        began = monotonic()
        metrics, examples = self._group.together(self._measure)
        done = self.round + 1
        ending = self._stopper.see(metrics, done)
        if self._group.rank == 0:
            now = self._journal.now()
            epochs = done // self._loader.rounds_per_epoch
            self._journal.write(Evaluated(self.rank, now, done, epochs, examples, metrics, monotonic() - began))
            if ending:
                self._journal.write(Notice(self.rank, now, ending))
        return metrics

    def _measure(self) -> tuple[dict[str, float], int]:
        assert self._evaluation is not None
        if self._leased:
            # Who has come later knows nothing of the evaluations before.
            self._stopper.agree(self._group)
        return self._evaluation.run(self._weight)

    def resume(self, stored: LoadedCheckpoint) -> None:
        """Takes up what a checkpoint says of this worker, when its replica stands."""
        self._state.load(stored)

    def leave(self) -> bool:
        """Ends the loop; returns whether this worker meets the others now, and has not left them earlier.

        Raises:
            UsageError: the loop leaves undone what others wait for.
        """
        leased = self._leased
        if leased is not None and leased.wanted_away:
            return False
        if self._open and leased is not None:
            leased.require_fence(self.rank, "ended", self.round + 1)
        return True

    def finish(self) -> None:
        """Saves a last time, and leaves in the model what a trained one is: averaged weights and statistics."""
        if self._apart:
            self._apart.end(self.round + 1)
        if self._order.checkpoints and self._saver.saved != self.round + 1 and not self._over_before:
            self._save()
        self._saver.wait()
        self._group.together(lambda: average(averaged_buffers(self.model), self._mates, self._weight))
        if self._apart:
            self._apart.meetings.adopt_averaged_weights()
        if self._order.job.options.ema_decay is not None:
            self._group.together(self._replica.exchange.adopt_averaged_weights)

    @property
    def _weight(self) -> float:
        """What this worker's running statistics weigh: its examples, where workers do not take equal shares."""
        return float(self._examples) if self._leased else 1.0

    def _part(self, batch: Any) -> Share:
        """Returns what a loss is the mean over: who does not meet the others in every round has its portion alone."""
        share = self._share
        return Share(batch, share.examples, share.examples if self._alone else share.of, share.epoch)

    def _save(self) -> None:
        self._group.together(self._save_once)

    def _save_once(self) -> None:
        began = monotonic()
        # A loss that nobody has looked at may be none, and then what is here is not worth keeping.
        self._losses.read()
        tensors, description = self._state.take(self.round + 1, self._weight)
        self._saver.save(self.round + 1, tensors, description, began)

    def _roll_back(self) -> None:
        self._saver.wait()
        # Rank 0's has ended, and with it the checkpoint is there for all.
        self._group.barrier()
        self._state.bring_back(LoadedCheckpoint(self._saver.newest()))

    def _require_step(self) -> None:
        # Who leaves out a round does not meet the others in it, and would take their next meeting for another.
        meets = self._order.strategy.synchronous or self._apart
        if self.world > 1 and meets and self._page.ranks[self.rank].heartbeat.step != self.round + 1:
            raise UsageError(
                f"the loop on rank {self.rank} went on without worker.step() or worker.update() in round {self.round}; "
                "every worker steps every batch, so that all meet in every round"
            )

    def _is_last(self) -> bool:
        return self.round + 1 >= self.rounds or self._stopper.over or 0 < self._page.stop_after <= self.round + 1

    def _come_to_fence(self) -> bool:
        """Waits for the next portion or fence; there all agree on what is done. Who goes in step always is at one."""
        leased = self._leased
        if leased is None or not self._open or self._agreed:
            return True
        if not leased.at_fence():
            return False
        self._agreed = True
        self.round = leased.fence - 1

        def ask() -> None:
            self._ask()
            self._group.barrier()

        self._group.together(ask)
        self.world = self._group.world
        return True

    def _ask_for_fence(self, leased: LeasedLoop) -> None:
        # Each of them, because nobody knows who lives long enough.
        if leased.fence < 0 and not self._halted:
            self._halted = bool(self._page.stop) or monotonic() > self._deadline or self._saver.overdue
            if self._halted:
                leased.halt()

    def _ask(self) -> None:
        self._halted = False
        done = self.round + 1
        meeting = self._apart.meetings.coming(done) if self._apart else done
        # Rank 0 decides before the meeting's first barrier, so that everybody knows after it.
        if self._group.rank == 0 and (self._page.stop or monotonic() > self._deadline) and not self._page.stop_after:
            self._page.stop_after = meeting
        self._saver.ask(done, meeting)

    def _record(self, computed: Computed, loss: float | None) -> float | None:
        self._examples += self._share.examples
        heartbeat = self._page.ranks[self.rank].heartbeat
        heartbeat.step = self.round + 1
        # Whoever had this place before has counted, too.
        heartbeat.examples += self._share.examples * self._counts
        lease = self._leased.lease if self._leased and self._share.examples else -1
        head = (self.round, self._share.epoch, self._share.examples * self._counts, computed.weight, lease)
        self._losses.note(head, computed.loss, loss, self._times)
        compute = self._replica.compute
        self._journal.passed(self.round, compute.in_flight, compute.passes)
        return loss
