"""The worker that a training loop is called with, under every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.collectives.spent import SPENT
from headrace.devices import autocast_states
from headrace.errors import UsageError
from headrace.metrics import Mean
from headrace.spec.events import Evaluated, Notice
from headrace.spec.job import Share
from headrace.training.compute import Computed
from headrace.worker.control import RunControl
from headrace.worker.guards.write_guard import GradientWrites, WriteGuard, guard_of_loop
from headrace.worker.loops.base import Loop
from headrace.worker.losses import NonFiniteHandler
from headrace.worker.session import WorkerSession

if TYPE_CHECKING:
    from headrace.worker.guards.losses import LossGuard


def train(worker: Worker) -> None:
    """The usual loop."""
    if worker.evaluation_due and worker.round + 1 >= worker.rounds:
        # A resumed run that had ended has nothing left to train, but its caller gets metrics.
        worker.evaluate()
    for batch in worker.batches():
        worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()


class Worker:
    """One process that computes.

    Attributes:
        rank: index in the run.
        model: this worker's copy.
        device: where it lives.
        rounds: how many there are in the whole run.
        turn: the set of parameters that the current round trains, where sets take turns; else "".

    Examples:
        >>> def train(worker):
        ...     for batch in worker.batches():
        ...         loss = worker.step(batch)
        >>> hr.launch(train, job).summary.steps
        4
    """

    def __init__(self, session: WorkerSession, control: RunControl, loop: Loop) -> None:
        run, replica = session.run, session.replica
        self.rank = session.rank
        self.model: nn.Module = replica.compute.module
        self.device = torch.device(run.plan.role(session.rank).device)
        self.rounds = session.progress.rounds
        self._session = session
        self._control = control
        self._loop = loop
        self._losses = control.losses
        self._copies = control.state.copies
        self._nonfinite = NonFiniteHandler(session, control.roll_back, loop.reporter)
        self._losses.decided = self._nonfinite.later
        self._record_there: Tensor | None = None
        self._compute, self._exchange, self._progress = replica.compute, replica.exchange, session.progress
        self.turn = ""
        self._turns = run.job.turns
        self._computed: Computed | None = None
        self._guard: WriteGuard | None = None
        if run.train is not None and not self._exchange.keeps_writes:
            self._guard = guard_of_loop(self.model, run.strategy.name)
            self._guard.look()
        self._in_round = self._begun = self._sends = self._done = False
        self._gradients = GradientWrites(session) if run.train is not None else None
        self._loss_guard: LossGuard | None = None
        if run.train is not None:
            from headrace.worker.guards.losses import LossGuard

            self._loss_guard = LossGuard(session, control.closing)
        self._times = [0.0, 0.0, 0.0, 0.0]
        control.places.look()

    @property
    def world(self) -> int:
        """Number of workers; where workers may join and leave, those at the last sync point."""
        return self._session.group.world

    @property
    def round(self) -> int:
        """The round that is being done, from 0; the last one done in a run that goes on from a checkpoint."""
        return self._progress.round

    @property
    def epoch_ended(self) -> bool:
        """Whether the round just done was the last of its epoch or of the run; not where the run was asked to end.

        Where workers do not go in lockstep, it is True where all workers have done all rounds up to it.
        """
        done = self._progress.done
        return self._loop.at_sync_point and (done % self._session.loader.rounds_per_epoch == 0 or done >= self.rounds)

    @property
    def evaluation_due(self) -> bool:
        """Whether the options want an evaluation after the round just done."""
        every, done = self._session.run.job.options.eval_every, self._progress.done
        if every is None:
            return self.epoch_ended
        return self._loop.at_sync_point and (done % every == 0 or done >= self.rounds)

    def batches(self) -> Iterator[Any]:
        """Yields this worker's share of every global batch, on its device; where data is leased, what it gets."""
        if self._guard:
            self._guard.require_unchanged()
        self._control.places.regain()
        self._control.save_first(self._session.run.job.options.on_nonfinite == "rollback")
        try:
            with closing(self._loop.shares()) as shares:
                for share in shares:
                    self._computed, self._begun, self._in_round, self._done = None, False, True, False
                    self._progress.begun = self._progress.round
                    if self._turns:
                        self.turn = self._turns.at(self._progress.round)
                    if self._session.run.train is not None:
                        # Before the loop's own forward.
                        self._loop.attempt(self._prepare)
                        self._control.verbs.begin()
                        if self._guard:
                            self._guard.look()
                        if self._gradients:
                            self._gradients.look()
                    began = perf_counter()
                    batch = self._compute.place(share.batch)
                    self._times[0] = self._progress.waited_s + perf_counter() - began
                    self._progress.waited_s = 0.0
                    self._control.verbs.draws.begin()
                    self._control.places.look()
                    yield batch
                    self._require_update()
        finally:
            self._in_round = False
            self._losses.read()
            self._session.events.flush()

    def step(self, batch: Any) -> float | None:
        """Computes, synchronizes, updates; returns this worker's mean loss.

        None where this worker had no part of the last batch or its loss is not finite, and on devices whose
        losses are read later, many at a time, so as not to wait for each. Also where another worker was lost
        meanwhile, and the run goes on: then the round is not done, and `batches` yields its data again.
        """
        if self._sends:
            raise UsageError("worker.step(batch) after worker.backward(loss); call worker.update() between the two")
        if self._gradients:
            self._gradients.require_none_yet()
        if self._loss_guard:
            self._loss_guard.look_at(batch, self._progress.share)
        self._begin(lambda: self._compute_step(batch))
        if self._loss_guard:
            self._loss_guard.forget()
        return self.update()

    def backward(self, loss: Tensor | Mean) -> None:
        """Differentiates a loss of one's own, the mean over this worker's share: the first half of `step`.

        Its gradient is in `.grad` until `update`, which sends what is there. A second loss of the round is added.
        """
        earlier = self._computed

        def differentiate() -> Computed:
            computed = self._compute.backward(loss, self._loop.part(None), adds=earlier is not None)
            return computed if earlier is None else _sum(earlier, computed)

        self._sends = True
        if self._gradients:
            (self._gradients.require_none_yet if earlier is None else self._gradients.tell)()
        if self._loss_guard:
            self._loss_guard.look(loss, self._progress.share)
            self._control.verbs.note(loss)
        self._begin(differentiate)
        if self._gradients:
            self._gradients.look()

    def update(self) -> float | None:
        """Synchronizes and updates: the second half of `step`.

        Where workers do not go in lockstep, it returns when this worker has its next data, or is where all meet.
        """
        computed, sends = self._computed, self._sends
        self._computed, self._begun, self._sends = None, False, False
        if self._loop.spoilt:
            return None
        if computed is None:
            raise UsageError("worker.update() without a worker.backward(loss) before it")
        if sends and self._gradients:
            self._gradients.tell()
        if self._guard:
            self._guard.require_unchanged()
            if self._done:
                raise UsageError(
                    f"a second update of one batch in round {self._progress.round}: {self._session.run.strategy.name} "
                    "counts a round by one update of each worker; use one_device, mirrored or central_storage (without "
                    "min_workers), or one update for a batch"
                )
            self._done = True
        self._control.places.regain()
        began = perf_counter()
        loss = self._losses.now(computed.loss)
        finite = self._losses.finite(computed.loss, loss, self.device)
        if self._copies:
            self._copies.hold()
        if loss is not None:
            self._nonfinite.tell(self.rank, loss)
        outcome = self._loop.complete(computed, lambda commit: self._synchronize(finite, began, sends, commit))
        if outcome is None:
            return None
        self._times[2] += outcome.took_s
        if not outcome.counts:
            # The data counts when it is leased again, or has counted before.
            computed, loss = Computed(None, 0.0), None
            self._progress.share = Share(None, 0, 0, self._progress.share.epoch)
        loss = loss if loss is not None and math.isfinite(loss) else None
        self._record(computed, loss, outcome.lease)
        self._control.callbacks.stepped(loss, self.turn)
        self._loop.advance(outcome)
        if self._guard:
            self._guard.look()
        if self._gradients:
            self._gradients.look()
        self._control.places.look()
        return loss

    def evaluate(self) -> dict[str, float]:
        """Computes the loss and the metrics over the whole evaluation set, each example once.

        Every worker calls it and gets the same numbers; {} where the job has no evaluation data.
        """
        self._loop.require_sync_point("calls worker.evaluate()")
        session = self._session
        if session.evaluation is None:
            return {}
        began = monotonic()
        # What they say may end the run.
        self._losses.read()
        if self._guard:
            self._guard.require_unchanged()
        self._control.places.regain()
        metrics, examples = session.group.together(self._measure)
        done = self._progress.done
        ending = self._control.stopper.see(metrics, done)
        if session.group.rank == 0:
            now, epochs = session.events.now(), done // session.loader.rounds_per_epoch
            session.events.write(Evaluated(self.rank, now, done, epochs, examples, metrics, monotonic() - began))
            if ending:
                session.events.write(Notice(self.rank, now, ending))
            self._control.callbacks.evaluated(metrics)
        self._control.places.look()
        if self._guard:
            # Workers with models of their own have that of all meanwhile.
            self._guard.look()
        return metrics

    def log(self, name: str, value: float | Tensor) -> None:
        """Writes a number of this rank as an event, which trackers, reports and `headrace watch` show as a curve.

        Raises:
            UsageError: a name or a value that no curve can have.
        """
        self._session.events.log({name: value}, self._progress.done)

    def _begin(self, compute: Callable[[], Computed]) -> None:
        if not self._in_round:
            raise UsageError(
                "a step outside of `for batch in worker.batches()`: what it trains on is this worker's share of a "
                "round; take all data, also episodes of one's own, by that loop"
            )
        self._control.places.regain()
        began, spent = perf_counter(), SPENT.seconds

        def act() -> None:
            if not self._begun:
                self._prepare()
            self._computed = compute()

        self._loop.attempt(act)
        self._control.places.look()
        # Sums of gradients while backward runs, or of what layers divide, are exchange.
        within = SPENT.seconds - spent
        self._times[1:3] = perf_counter() - began - within, within

    def _compute_step(self, batch: Any) -> Computed:
        self._control.verbs.note()
        # Before compute, in which the stages of a pipeline wait for each other.
        self._control.verbs.require_same("step")
        return self._compute.run(self._loop.part(batch))

    def _prepare(self) -> None:
        """Begins a round."""
        self._nonfinite.before()
        self._exchange.begin(self._progress.round)
        self._begun = True

    def _require_update(self) -> None:
        # In a round that comes again a part of the update may be there.
        if self._guard and not self._sends and not self._loop.spoilt:
            self._guard.require_unchanged()
        self._control.places.regain()
        if self._computed is not None and not self._loop.spoilt:
            raise UsageError(
                f"the loop on rank {self.rank} went on without worker.update() after worker.backward(loss) in round "
                f"{self._progress.round}; call it for every batch: for the gradients of several batches together, make "
                "the job's global_batch_size larger"
            )

        if self._session.run.train is not None and torch.is_autocast_cache_enabled() and any(autocast_states()):
            raise UsageError(
                "the loop has torch.autocast open from one round into the next, whose cache keeps the parameters of "
                "the first one in half precision, so that later rounds compute with those; open it in every round, "
                "around forward and loss, or give cache_enabled=False"
            )

    def _synchronize(self, finite: bool | Tensor, began: float, sends: bool, commit: Callable[[], object]) -> None:
        if sends:
            self._control.verbs.require_same("step")
            self._compute.send(self._loop.part(None))
        decision = self._exchange.synchronize(finite)
        commit()
        synchronized = perf_counter()
        self._record_there = decision.record
        if decision.record is not None:
            self._nonfinite.restore_there(decision.record)
            self._exchange.update(self._progress.round)
        elif decision.apply:
            self._exchange.update(self._progress.round)
            self._nonfinite.good()
        else:
            # First, because others may read this worker's statistics in this round.
            self._nonfinite.restore(decision)
            self._exchange.skip(self._progress.round)
            self._nonfinite.bad(decision, self._progress.round)
        self._times[2:] = self._times[2] + synchronized - began, perf_counter() - synchronized

    def _measure(self) -> tuple[dict[str, float], int]:
        assert self._session.evaluation is not None
        self._control.verbs.require_same("evaluate")
        return self._session.evaluation.run(self._control.statistics_weight, partial(self._control.guard.compare, True))

    def _record(self, computed: Computed, loss: float | None, lease: int) -> None:
        progress, share, counts = self._progress, self._progress.share, self._compute.counts
        progress.examples += share.examples
        heartbeat = self._session.page.ranks[self.rank].heartbeat
        heartbeat.step = progress.done
        if self._session.run.train is not None:
            heartbeat.changed = sum(map(len, self._control.state.by_user_code().values()))
        # Added, because a worker that this one has replaced has counted, too.
        heartbeat.examples += share.examples * counts
        lease = lease if share.examples else -1
        head = (
            *(progress.round, share.epoch, share.examples * counts, computed.weight, lease),
            self._exchange.pulled if lease >= 0 else (),
            self.turn,
        )
        self._losses.note(head, computed.loss, loss, self._record_there, self._times)
        self._session.events.passed(progress.round, self._compute.in_flight, self._compute.passes)


def _sum(one: Computed, other: Computed) -> Computed:
    """Returns the sum of two losses of a round, which are means over as much."""
    if one.weight != other.weight:
        raise UsageError(
            f"the losses of a round weigh {one.weight:g} and {other.weight:g}, so that the mean over workers of their "
            "sum is not the sum of their means; give worker.backward one loss, their sum, or hr.Mean of one weight"
        )
    return Computed(None if one.loss is None or other.loss is None else one.loss + other.loss, one.weight)
