"""One attempt at a run: its directory is held, and what it goes on from is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.engine.claim import Claim, refuse_living
from headrace.engine.order import Attempt, Order, Resumption
from headrace.engine.preparation import Prepared
from headrace.engine.resumption import find, resumption

__all__ = ["Going", "begin"]


@dataclass(frozen=True)
class Going:
    """What a run goes on from.

    Attributes:
        resume: True for the last checkpoint of its own directory; another run's, or one checkpoint; False to begin.
        reset_optimizer: leave the optimizer's state and the schedule behind.
    """

    resume: bool | Path | str = False
    reset_optimizer: bool = False


@contextmanager
def begin(order: Order, prepared: Prepared, going: Going) -> Iterator[tuple[Order, tuple[str, ...]]]:
    """Holds the run's directory; gives the order as this attempt carries it out, and lines for the user.

    Raises:
        UsageError: the directory holds a run already, or one that lives; there is nothing to resume.
        CheckpointMismatch, CorruptCheckpoint: what there is cannot be resumed.
        UnfitMachine: the directory cannot be written to.
    """
    resume, notices = _resume(order, prepared, going) if going.resume else (None, ())
    continues = resume is not None and resume.folder.parent.resolve() == order.run_dir.resolve()
    claim = Claim(order.run_dir, continues, _checkpoint_bytes(prepared) if order.checkpoints else 0)
    try:
        began = order.started - claim.attempt_s
        attempt = Attempt(claim.attempt_s, claim.lock)
        yield replace(order, resume=resume, started=began, attempt=attempt), notices
    finally:
        claim.close()


def _resume(order: Order, prepared: Prepared, going: Going) -> tuple[Resumption, tuple[str, ...]]:
    refuse_living(order.run_dir)
    checkpoint, wrong = find(order.run_dir, True if isinstance(going.resume, bool) else going.resume)
    resume, changes = resumption(checkpoint, order.description, prepared, going.reset_optimizer)
    rounds = order.job.steps or (order.job.epochs or 0) * -(-prepared.examples // order.job.global_batch_size)
    over = f"the checkpoint has {checkpoint.step} rounds and the job {rounds}: nothing is left to do"
    notices = (
        *(f"damaged, left out: {error.path}: {error.reason}" for error in wrong),
        f"goes on from {checkpoint.path}",
        *(f"since it was saved: {change}" for change in changes),
        *((over,) if checkpoint.step >= rounds else ()),
    )
    return resume, notices


def _checkpoint_bytes(prepared: Prepared) -> int:
    """Returns about how much: the weights, and as much again for what an optimizer keeps."""
    return 2 * sum(parameter.bytes for parameter in prepared.model.parameters)
