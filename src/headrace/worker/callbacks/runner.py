"""Calls the callbacks on rank 0, and brings their wishes to all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from headrace.errors import UsageError
from headrace.spec.events import ENDS_EARLY, Notice, PictureLogged, Saved, TextLogged
from headrace.training.synchronization import DataLeases
from headrace.training.update import ScalesRates
from headrace.worker.callbacks.callback import Callback, Moment, RunActions
from headrace.worker.guards.write_guard import guard_of_callbacks
from headrace.worker.session import WorkerSession


class CallbackRunner:
    """The callbacks of a run, as every worker has them: they act where this worker is the first of the group.

    Attributes:
        stops: whether one of them has asked for the end of the run.
    """

    def __init__(self, session: WorkerSession) -> None:
        self.stops = False
        self._session = session
        self._callbacks: tuple[Callback, ...] = session.run.callbacks
        self._factor: float | None = None
        exchange = session.replica.exchange
        self._rates = exchange if isinstance(exchange, ScalesRates) and session.group.rank == 0 else None
        self._rates_told: Mapping[str, float] = {}
        actions = RunActions(self._log_values, self._log_picture, self._log_text, self._stop, self._set_factor)
        module = session.replica.compute.module
        self._moment = Moment(module, session.run.run_dir, actions)
        alone = session.group.world == 1 and session.replica.exchange.keeps_writes
        self._guard = guard_of_callbacks(module) if self._callbacks and not alone else None
        self._parts = session.replica.compute.divided or session.run.plan.replicas < session.run.plan.workers

    def stepped(self, loss: float | None, turn: str = "") -> None:
        """Calls them after a step of this worker."""
        self._moment.loss, self._moment.turn = loss, turn
        if self._rates and (rates := self._rates.learning_rates()) and rates != self._rates_told:
            self._rates_told = {name: float(rate) for name, rate in rates.items()}
            self._session.events.log(self._rates_told, self._session.progress.done)
        with self._here() as (callbacks, moment):
            for callback in callbacks:
                callback.on_step(moment)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Calls them after an evaluation."""
        with self._here() as (callbacks, moment):
            for callback in callbacks:
                callback.on_evaluation(moment, metrics)

    def saved(self, event: Saved) -> None:
        """Calls them when a checkpoint is on the disk."""
        path = self._session.run.run_dir / "checkpoints" / f"step-{event.step:08d}"
        with self._here() as (callbacks, moment):
            for callback in callbacks:
                callback.on_checkpoint(moment, path)

    def ended(self) -> None:
        """Calls them at the end of the run, before the model is left, with what they change if rank 0 has all of it."""
        with self._here(guarded=self._parts or not self._session.group.one_memory) as (callbacks, moment):
            for callback in callbacks:
                callback.on_end(moment)

    def ask(self, next_synchronization: int) -> None:
        """Lets rank 0 announce that the learning rate changes at the next synchronization."""
        if self._factor is not None:
            self._session.page.rate_after = next_synchronization

    def change_rate_if_due(self) -> None:
        """Changes the learning rate where rank 0 has announced it; every worker calls it after each round."""
        session = self._session
        due = session.page.rate_after
        if not self._callbacks or due != session.progress.done or not due:
            return
        # Only in such a round, so that a run pays nothing for what it does not use.
        (factor,) = session.group.sum([self._factor or 0.0 if session.group.rank == 0 else 0.0])
        self._factor = None
        exchange = session.replica.exchange
        # Rank 0 announces nothing under other strategies.
        assert isinstance(exchange, ScalesRates)
        exchange.scale_rates(factor)

    @contextmanager
    def _here(self, guarded: bool = True) -> Iterator[tuple[tuple[Callback, ...], Moment]]:
        """Yields those that are called in this process, and what they get; `guarded` refuses writes to parameters."""
        session, moment = self._session, self._moment
        if not self._callbacks or session.group.rank != 0:
            yield (), moment
            return
        moment.step = session.progress.done
        moment.epoch = moment.step // session.loader.rounds_per_epoch
        guard = self._guard if guarded else None
        if guard:
            guard.look()
        calls: AbstractContextManager[None] = nullcontext()
        if self._parts:
            from headrace.worker.guards.calls import no_calls

            calls = no_calls(moment.model, session.run.strategy.name)
        with calls:
            yield self._callbacks, moment
        if guard:
            guard.require_unchanged()

    def _log_values(self, values: Mapping[str, float]) -> None:
        self._session.events.log(values, self._moment.step)

    def _log_picture(self, name: str, path: Path) -> None:
        events = self._session.events
        events.write(PictureLogged(events.rank, events.now(), self._moment.step, name, str(path)))

    def _log_text(self, name: str, text: str) -> None:
        events = self._session.events
        events.write(TextLogged(events.rank, events.now(), self._moment.step, name, text))

    def _stop(self, why: str) -> None:
        strategy = self._session.run.strategy
        if not strategy.one_model:
            raise UsageError(
                f"{strategy.name} trains several models whose workers never meet, so that a callback cannot end all of "
                "them after the same round; use fit(..., seconds=...) or a job with fewer steps"
            )
        if not self.stops:
            self.stops = True
            events = self._session.events
            events.write(Notice(events.rank, events.now(), f"{ENDS_EARLY}a callback asked for it: {why}"))

    def _set_factor(self, factor: float) -> None:
        session = self._session
        strategy, replica = session.run.strategy, session.replica
        tables = session.run.model.tables
        if tables:
            raise UsageError(
                f"a callback cannot change the learning rate of the sparse embedding {tables[0].name!r}: its rows are "
                "updated apart; use Options(schedule=...), or sparse=False there"
            )
        alone = not strategy.one_model or isinstance(replica.sync, DataLeases)
        if alone or not isinstance(replica.exchange, ScalesRates):
            raise UsageError(
                f"under {strategy.name} a callback cannot change the learning rate: its workers do not update the "
                "parameters together; use Options(schedule=...), or mirrored, central_storage, parameter_averaging "
                "without servers, pipeline or tensor_parallel"
            )
        if not session.group.fixed:
            raise UsageError(
                "a callback cannot change the learning rate where workers may come and go; use Options(schedule=...), "
                "or leave out min_workers"
            )
        self._factor = factor
