"""One attempt at a run: its directory is held, and what it goes on from is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.api.preparation import JobInfo
from headrace.api.resumption import find, resumption
from headrace.api.run_dir_lock import RunDirLock, refuse_living
from headrace.errors import CorruptCheckpoint
from headrace.parameter_server.server.snapshots import SnapshotSet, forget, newest
from headrace.worker.run_spec import SNAPSHOTS, AttemptInfo, ResumePoint, RunSpec


@dataclass(frozen=True)
class ResumeRequest:
    """What a run goes on from.

    Attributes:
        resume: True for the last checkpoint of its own directory; another run's, or one checkpoint; False to begin.
        reset_optimizer: leave the optimizer's state and the schedule behind.
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
    found, damaged = newest(resume.snapshots_folder, len(order.plan.servers))
    if found is None or (found.done, bool(found.committed)) <= (resume.step, False) or found.until > rounds:
        return None, damaged
    if found.done > resume.step and order.job.options.early_stopping is not None:
        # Nobody knows what the evaluations between the two have said.
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
