"""When a run saves and when it ends: the same decision on every worker."""

from __future__ import annotations

from contextlib import ExitStack
from time import monotonic

from headrace.spec.events import ENDS_EARLY, Notice
from headrace.worker.callbacks.runner import CallbackRunner
from headrace.worker.evaluations.early_stopping import EarlyStopper
from headrace.worker.guards.equality import EqualityGuard
from headrace.worker.guards.verbs import VerbGuard
from headrace.worker.guards.write_guard import Places
from headrace.worker.losses import LossReader
from headrace.worker.saving import Saver
from headrace.worker.session import WorkerSession
from headrace.worker.state import LoadedCheckpoint, WorkerState


class RunControl:
    """Rank 0 decides at one synchronization what all workers do at the next; the control page carries the decision.

    Attributes:
        callbacks: the user's.
        guard: compares the workers' copies of the model.
        verbs: compares where workers are in the user's loop.
        places: where parameters are, whatever that loop puts there.
        closing: what is to be closed when the worker ends.
        statistics_weight: weight of this worker's running statistics in their mean over the workers.
    """

    def __init__(self, session: WorkerSession, closing: ExitStack) -> None:
        run, group, page = session.run, session.group, session.page
        self.stopper = EarlyStopper(run.job.options.early_stopping)
        self.callbacks = CallbackRunner(session)
        self.guard = EqualityGuard(session)
        self.verbs = VerbGuard(session)
        self.places = Places(session)
        self.statistics_weight = 1.0
        self._progress = session.progress
        self._group = group
        self._page = page
        self.losses = LossReader(session)
        self._saves = run.checkpoints is not None
        self._saver = Saver(run, group, page, session.events, self.callbacks.saved)
        self.closing = closing
        closing.callback(self._saver.close)
        self.state = WorkerState(session, self.stopper)
        self._is_replacement = session.is_replacement
        self._deadline = run.deadline(session.is_replacement)
        self._seconds, self._events = run.seconds or 0.0, session.events
        in_place = run.resume is not None and run.resume.folder == self._saver.folder.path
        self._was_over = in_place and session.progress.done >= session.progress.rounds

    def ask(self, next_synchronization: int) -> None:
        """Lets rank 0 decide whether to save or to end at the next synchronization, which is after so many rounds.

        It decides before its first barrier, so that every worker knows after it.
        """
        page = self._page
        if self._group.rank == 0 and (page.stop or self._must_end()) and not page.stop_after:
            page.stop_after = next_synchronization
            if monotonic() > self._deadline and not page.stop:
                text = f"{ENDS_EARLY}the time that it was given is over (seconds={self._seconds:g})"
                self._events.write(Notice(0, self._events.now(), text))
        self.callbacks.ask(next_synchronization)
        self._saver.ask(self._progress.done, next_synchronization)

    def wants_sync_point(self) -> bool:
        """Whether the run is to end soon, or a checkpoint is due by the clock."""
        return bool(self._page.stop) or self._must_end() or self._saver.overdue

    def _must_end(self) -> bool:
        return self.callbacks.stops or monotonic() > self._deadline

    def is_last(self) -> bool:
        """Whether the run ends after the current round."""
        done = self._progress.done
        return done >= self._progress.rounds or self.stopper.over or 0 < self._page.stop_after <= done

    def save_if_due(self) -> None:
        """Saves and changes the learning rate where rank 0 has decided so; a run's last checkpoint is `save_last`'s."""
        self.callbacks.change_rate_if_due()
        if self._saver.wanted(self._progress.done) and not self.is_last():
            self._save()

    def save_first(self, rolls_back: bool) -> None:
        """Saves before the first round where a rollback or a server's snapshot needs it, or a history was left."""
        if not self._is_replacement and self._saver.must_begin(self._progress.done, rolls_back):
            self._save()
            # Training goes on only when it is saved: no later resume may find the older history.
            self._saver.wait()

    def save_last(self) -> None:
        """Saves the end of the run, and waits until it is on the disk."""
        if self._saves and self._saver.saved != self._progress.done and not self._was_over:
            self._save()
        self._saver.wait()

    def resume(self, stored: LoadedCheckpoint) -> None:
        """Restores this worker's state from a checkpoint."""
        self.state.load(stored)

    def roll_back(self) -> None:
        """Restores the newest checkpoint of this run on all workers."""
        self._saver.wait()
        self._group.together(self._bring_back)

    def _bring_back(self) -> None:
        # After rank 0's write has ended, the checkpoint is there for all.
        self._group.barrier()
        self.state.bring_back(LoadedCheckpoint(self._saver.newest()))

    @property
    def saved(self) -> int:
        """Rounds in the last checkpoint, -1 if there is none; a worker that joins takes it from the others."""
        return self._saver.saved

    @saved.setter
    def saved(self, rounds: int) -> None:
        self._saver.saved = rounds

    def _save(self) -> None:
        self._group.together(self._save_once)

    def _save_once(self) -> None:
        began = monotonic()
        # A loss that was not read yet may be NaN, and then this state must not be saved.
        self.losses.read()
        if self.losses.defers:
            # Each has read its own decisions: one whose loss was not finite has ended, and nothing is saved.
            self._group.barrier()
        done = self._progress.done
        self.guard.compare(evaluates=False)
        if self.state.copies:
            # Their memory is used again.
            self._saver.wait()
        self._saver.save(done, self.state.take(done, self.statistics_weight), began)
