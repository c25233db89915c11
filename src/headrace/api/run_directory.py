"""The directory of a run: locked for one run, and prepared for one attempt at it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.api.checks import JobInfo
from headrace.api.resume import find, resumption
from headrace.errors import CorruptCheckpoint, UnfitMachine, UsageError
from headrace.parameter_server.server.snapshots import SnapshotSet, forget, newest_of
from headrace.spec.events import LAUNCHER, decode
from headrace.worker.events import events_path
from headrace.worker.run_spec import SNAPSHOTS, AttemptInfo, ResumePoint, RunSpec

_LOCK = "lock"


class RunDirLock:
    """Holds a directory until `close`, or until this process and all that got `lock` have ended.

    Args:
        continues: whether an interrupted run goes on in it; else it must hold none.
        needed_bytes: what must fit on its disk.

    Attributes:
        attempt_s: where on the run's clock this attempt begins.

    Raises:
        UsageError: it holds a run already, or one that lives.
        UnfitMachine: it cannot be written to, or has too little space.
    """

    def __init__(self, directory: Path, continues: bool, needed_bytes: int = 0) -> None:
        if events_path(directory, LAUNCHER).exists() and not continues:
            refuse_living(directory)
            raise UsageError(
                f"{directory} holds a run already; name another run_dir, or delete it; resume=True (--resume) goes on "
                "from its last checkpoint"
            )
        try:
            events_path(directory, LAUNCHER).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            self.lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise _living(directory) from None
        try:
            self._sign(directory)
            _require_space(directory, needed_bytes)
            self.attempt_s = _mend(directory)
        except BaseException:
            self.close()
            raise

    def _sign(self, directory: Path) -> None:
        """Says who holds it."""
        try:
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise _unwritable(directory, error) from error

    def close(self) -> None:
        """Lets go of it, as far as this process is concerned."""
        os.close(self.lock)


def _unwritable(directory: Path, error: OSError) -> UnfitMachine:
    return UnfitMachine(f"cannot write to the run directory {directory}: {error.strerror}; name another")


def _require_space(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise UnfitMachine(
            f"a checkpoint takes about {needed_bytes:,} bytes and {directory} has {free:,} left; free some, name "
            "another run_dir, or save nothing (checkpoints=False)"
        )


def refuse_living(directory: Path) -> None:
    """Raises:
    UsageError: a run lives in the directory.
    """
    try:
        lock = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # no run has ever held it, or it cannot be read, which `RunDirLock` reports
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _living(directory) from None
    finally:
        os.close(lock)


def _living(directory: Path) -> UsageError:
    who = (directory / _LOCK).read_text(encoding="ascii", errors="replace")[:20]
    return UsageError(
        f"{directory} is in use by a run that lives (process {who or 'unknown'}); wait for its end, end it, or name "
        "another run_dir"
    )


def _mend(directory: Path) -> float:
    """Cuts off half a line that a killed process has left in its events; returns the last time in them, seconds."""
    last_s = 0.0
    for path in events_path(directory, LAUNCHER).parent.glob("*.jsonl"):
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        lines = content[:whole].splitlines()
        # A line that is no event is the reports' to complain of.
        with suppress(ValueError):
            for line in lines[-1:]:
                last_s = max(last_s, decode(line.decode()).time_s)
    return last_s


@dataclass(frozen=True)
class ResumeRequest:
    """What a run goes on from.

    Attributes:
        resume: True for the last checkpoint of its own directory; another run's, or one checkpoint; False to begin.
    """

    resume: bool | Path | str = False
    reset_optimizer: bool = False


@contextmanager
def begin_attempt(order: RunSpec, prepared: JobInfo, going: ResumeRequest) -> Iterator[tuple[RunSpec, tuple[str, ...]]]:
    """Holds the run's directory; gives the order as this attempt carries it out, and lines for the user.

    Raises:
        UsageError: the directory holds a run already, or one that lives; there is nothing to resume.
        CheckpointMismatch, CorruptCheckpoint: what there is cannot be resumed.
        UnfitMachine: the directory cannot be written to.
    """
    resume, notices = _resume(order, prepared, going) if going.resume else (None, ())
    continues = resume is not None and resume.folder.parent.resolve() == order.run_dir.resolve()
    claim = RunDirLock(order.run_dir, continues, _checkpoint_bytes(prepared) if order.checkpoints else 0)
    try:
        if continues:
            forget(order.run_dir / SNAPSHOTS, resume.snapshots.names if resume and resume.snapshots else ())
        began = order.started - claim.attempt_s
        attempt = AttemptInfo(claim.attempt_s, claim.lock)
        yield replace(order, resume=resume, started=began, attempt=attempt), notices
    finally:
        claim.close()


def _resume(order: RunSpec, prepared: JobInfo, going: ResumeRequest) -> tuple[ResumePoint, tuple[str, ...]]:
    refuse_living(order.run_dir)
    checkpoint, wrong = find(order.run_dir, True if isinstance(going.resume, bool) else going.resume)
    resume, changes = resumption(checkpoint, order.description, prepared, going.reset_optimizer)
    rounds = order.job.steps or (order.job.epochs or 0) * -(-prepared.examples // order.job.global_batch_size)
    kept, damaged = _snapshots(order, going, resume, rounds)
    resume = replace(resume, snapshots=kept)
    over = f"the checkpoint has {checkpoint.step} rounds and the job {rounds}: nothing is left to do"
    notices = (
        *(f"damaged, left out: {error.path}: {error.reason}" for error in (*wrong, *damaged)),
        f"goes on from {checkpoint.path}",
        *(_newer(resume) if kept else ()),
        *(f"since it was saved: {change}" for change in changes),
        *((over,) if checkpoint.step >= rounds else ()),
    )
    return resume, notices


def _snapshots(
    order: RunSpec, going: ResumeRequest, resume: ResumePoint, rounds: int
) -> tuple[SnapshotSet | None, tuple[CorruptCheckpoint, ...]]:
    """Returns the servers' snapshots to go on from, if they are newer than the checkpoint, and which are damaged."""
    one = not isinstance(going.resume, bool) and resume.folder.parent.resolve() != Path(going.resume).resolve()
    if one or order.snapshots_every_s is None or not resume.same or resume.reset_optimizer:
        return None, ()
    found, damaged = newest_of(order.plan, resume.snapshots_folder)
    if found is None or (found.done, bool(found.committed)) <= (resume.step, False) or found.until > rounds:
        return None, damaged
    if found.done > resume.step and order.job.options.early_stopping is not None:
        # The results of the evaluations between the two are not known.
        return None, damaged
    return found, damaged


def _newer(resume: ResumePoint) -> tuple[str]:
    found = resume.snapshots
    assert found is not None
    leases = sum(stop - first for first, stop in found.committed)
    return (f"the servers go on from snapshots: {found.done} rounds and {leases} portions of the next ones are done",)


def _checkpoint_bytes(prepared: JobInfo) -> int:
    """Returns about how much: the weights, and as much again for what an optimizer keeps."""
    return 2 * sum(parameter.bytes for parameter in prepared.model.parameters)
