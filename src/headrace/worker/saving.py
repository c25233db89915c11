"""Saves checkpoints in the background: training stops only for the copy.

rank 0   copy ─► training goes on ───────────────────────────────────────────────►
             └─► write rank-0 ─► wait for the others' digests ─► manifest, rename
rank 1   copy ─► training goes on ───────────────────────────────────────────────►
             └─► write rank-1, its digest to the control page
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from headrace.checkpoint import Checkpoint, CheckpointFolder, FileRecord
from headrace.checkpoint.manifest import file_name
from headrace.collectives.base import ProcessGroup
from headrace.errors import CorruptCheckpoint, RunFailed
from headrace.machine.background import BackgroundThread
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Event, Notice, Saved
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import RunSpec
from headrace.worker.state import TakenState

_LOOK_EVERY_S = 0.002
_TORN = -2
"""In the place of the system's error number, where what was copied to host memory is not of one round."""


class Saver:
    """Saves one rank's part of the run's checkpoints; every rank calls the same methods in the same order.

    A disk that fails does not end a run: earlier checkpoints stay, and rank 0 writes a notice.

    Args:
        tell: is called in the worker's own thread when a checkpoint is complete.

    Attributes:
        saved: rounds in the last checkpoint of this history; -1 if there is none.
    """

    def __init__(
        self,
        run: RunSpec,
        group: ProcessGroup,
        page: ControlPage,
        events: EventWriter,
        tell: Callable[[Saved], None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self.folder = CheckpointFolder(run.run_dir / "checkpoints")
        self._when = run.checkpoints
        self._group = group
        self._page = page
        self._events = events
        self._thread = BackgroundThread("saver")
        self._news: deque[Event] = deque()
        self._last_s = monotonic()
        resume = run.resume
        own = resume is not None and resume.folder == self.folder.path and not resume.reset_optimizer
        self.saved = resume.step if resume and own else -1
        # A server's snapshot needs a checkpoint for the rest.
        self._first = run.snapshots_every_s is not None and not (resume and resume.snapshots)

    def must_begin(self, done: int, rolls_back: bool) -> bool:
        """Whether a run saves before its first round: for a rollback, for snapshots, or after an older checkpoint."""
        if self._when is None or (self.saved == done and self.folder.steps()[-1:] == (done,)):
            return False
        return rolls_back or self._first or self.saved == done

    def newest(self) -> Checkpoint:
        """Returns the newest sound checkpoint of this run's own history.

        Raises:
            RunFailed: there is none.
        """
        for step in reversed([step for step in self.folder.steps() if step <= self.saved]):
            with suppress(CorruptCheckpoint):
                checkpoint = self.folder.open(step)
                checkpoint.verify()
                return checkpoint
        raise RunFailed(f"there is no sound checkpoint in {self.folder.path} to roll back to")

    @property
    def overdue(self) -> bool:
        """Whether it is time to save, by the clock."""
        when = self._when
        if when is None or when.every_s is None or self._thread.busy:
            return False
        return monotonic() - self._last_s >= when.every_s

    def ask(self, done: int, next_synchronization: int) -> None:
        """Lets rank 0 decide whether to save at the next synchronization, which is after so many rounds."""
        self._report()
        when = self._when
        if self._group.rank or when is None:
            return
        by_steps = when.every_steps is not None and done % when.every_steps == 0
        if by_steps or self.overdue:
            self._page.save_after = next_synchronization

    def wanted(self, done: int) -> bool:
        """Whether rank 0 has decided to save after so many rounds."""
        return self._page.save_after == done

    def save(self, done: int, taken: TakenState, began: float) -> None:
        """Starts a thread that writes this rank's part; waits for the previous one first.

        Rank 0's description is that of the checkpoint; `began` is when the copying began. Where the disk has taken too
        little of any rank's part, no rank writes.
        """
        self.wait()
        # The events of everything that a checkpoint holds are written before it, even if a process is killed next.
        self._events.flush()
        self._last_s = began
        self.saved = done
        problem = taken.problem
        # The thread has its own, because the group may change while it writes.
        rank, members = self._group.rank, self._group.members
        if rank == 0 and problem is None:
            try:
                self.folder.begin(done)
            except OSError as error:
                problem = error
        errors = [0.0] * len(members)
        if problem is not None:
            errors[rank] = problem.errno or -1
        # No rank writes into a folder before rank 0 has made it.
        *errors, incomplete = self._group.sum([*errors, float(taken.problem is not None)])
        stall_s = monotonic() - began
        if any(errors):
            if rank == 0:
                self.folder.abandon(done)
                text = problem.strerror or str(problem) if problem else os.strerror(int(next(filter(None, errors))))
                rows = " (saving needs room for the rows of sparse embeddings twice)" if incomplete else ""
                self._news.append(self._warning(done, f"{text}{rows}"))
            return
        self._thread.start(functools.partial(self._write, done, rank, members, taken, stall_s))

    def wait(self) -> None:
        """Waits until this rank's thread has ended; on rank 0 the checkpoint is then on disk, or was abandoned."""
        self._thread.wait()
        self._report()

    def close(self) -> None:
        """Ends the thread; one that still writes, as where a run has failed, ends by itself."""
        if not self._thread.busy:
            self._thread.close()

    def _report(self) -> None:
        # Only the worker's own thread writes events and raises errors.
        while self._news:
            event = self._news.popleft()
            self._events.write(event)
            if isinstance(event, Saved):
                self._tell(event)
        self._thread.check()

    def _write(
        self,
        done: int,
        rank: int,
        members: Sequence[int],
        taken: TakenState,
        stall_s: float,
    ) -> None:
        began = monotonic()
        self._write_part(done, rank, members[rank], taken)
        if rank == 0:
            self._commit(done, members, taken.description, stall_s, began)

    def _write_part(self, done: int, rank: int, member: int, taken: TakenState) -> None:
        saved = self._page.ranks[member].saved
        error = 0
        try:
            if taken.copied and not taken.copied.wait():
                error = _TORN
            else:
                record = self.folder.write(done, rank, taken.tensors)
                saved.digest[:] = list(bytes.fromhex(record.sha256))
                saved.nbytes = record.bytes
        except OSError as failure:
            error = failure.errno or -1
        saved.error = error
        # Last, because it says that the rest is complete.
        saved.step_plus_1 = done + 1

    def _commit(
        self, done: int, members: Sequence[int], description: Mapping[str, Any], stall_s: float, began: float
    ) -> None:
        lost = self._await(done, members)
        parts = [self._page.ranks[member].saved for member in members]
        errors = [_said(part.error) for part in parts if part.error]
        if lost is not None or errors:
            self.folder.abandon(done)
            problem = errors[0] if lost is None else f"rank {lost} was lost while it wrote its part"
            self._news.append(self._warning(done, problem))
            return
        files = [FileRecord(file_name(rank), part.nbytes, bytes(part.digest).hex()) for rank, part in enumerate(parts)]
        assert self._when is not None
        try:
            self.folder.commit(done, files, description, self._when.keep)
        except OSError as error:
            self.folder.abandon(done)
            if not self._is_there(done):
                self._news.append(self._warning(done, error.strerror or str(error)))
                return
            text = f"older checkpoints than step {done} in {self.folder.path} could not be deleted: {error.strerror}"
            self._news.append(Notice(0, self._events.now(), text))
        size = sum(record.bytes for record in files)
        self._news.append(Saved(0, self._events.now(), done, size, stall_s, monotonic() - began))

    def _await(self, done: int, members: Sequence[int]) -> int | None:
        """Blocks until all ranks have written their parts; returns a lost rank that never will, if there is one."""
        for member in members:
            saved = self._page.ranks[member].saved
            while saved.step_plus_1 != done + 1:
                # Asked first: a lost worker may have written its part before it was lost.
                gone = self._group.is_gone(member)
                if gone and saved.step_plus_1 != done + 1:
                    return member
                self._group.check()
                time.sleep(_LOOK_EVERY_S)
        return None

    def _is_there(self, done: int) -> bool:
        try:
            return done in self.folder.steps()
        except (OSError, CorruptCheckpoint):
            return False

    def _warning(self, done: int, problem: str) -> Notice:
        text = (
            f"no checkpoint at step {done}: {problem} in {self.folder.path}; training goes on, and the checkpoints "
            "before it are untouched"
        )
        return Notice(0, self._events.now(), text)


def _said(error: int) -> str:
    if error == _TORN:
        return "forward wrote to parameters of the model while they were copied to host memory; from now on it waits,"
    return os.strerror(error)
