"""The values that describe a run to an engine, and where its files are."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from headrace.machine import disk
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.options import Checkpoints
from headrace.spec.plan import Plan, needs_snapshots

if TYPE_CHECKING:
    # For the type only: strategies import torch, and an engine starts before that.
    from headrace.parameter_server.server.snapshots import SnapshotSet
    from headrace.strategies.strategy import Strategy
    from headrace.worker.callbacks.callback import Callback
    from headrace.worker.guards.caller import CallerProcess

SNAPSHOTS = "snapshots"
"""The folder of the servers' snapshots in a run's directory."""

RENDEZVOUS = "rendezvous"
"""The file in a run's directory in which the workers of accelerators find each other."""

_BLOCK_BYTES = 1 << 16

LAST_LOG_LINE = "headrace: this rank ends because of"
"""The line of a rank's log that its error follows."""


def events_path(run_dir: Path, rank: int) -> Path:
    """Returns the file of a rank's events; of the launcher's for rank -1."""
    return run_dir / "events" / ("launcher.jsonl" if rank < 0 else f"rank-{rank}.jsonl")


def last_line(path: Path) -> str:
    """Returns the last line of an event file, whole or not, and reads no more: the file of a long run has gigabytes."""
    with path.open("rb") as stream:
        begin = stream.seek(0, os.SEEK_END)
        content = b""
        while begin and b"\n" not in content[:-1]:
            count = min(begin, _BLOCK_BYTES)
            begin = stream.seek(begin - count)
            content = stream.read(count) + content
    return content.removesuffix(b"\n").rpartition(b"\n")[2].decode(errors="replace")


def lines_of_kind(path: Path, kind: str) -> list[str]:
    """Returns the whole lines of an event file that are events of one kind; none where there is no file.

    A full disk takes only a part of a line; the rest follows when there is room.
    """
    if not disk.exists(path):
        return []
    begin = f'{{"kind":"{kind}"'
    with path.open(encoding="utf-8", errors="replace") as stream:
        return [line for line in stream if line.startswith(begin) and line.endswith("\n")]


def log_path(run_dir: Path, rank: int) -> Path:
    """Returns the file of a rank's standard output and error."""
    return run_dir / "logs" / f"rank-{rank}.log"


def model_path(run_dir: Path) -> Path:
    """Returns the file of the trained model."""
    return run_dir / "model.safetensors"


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes from: a checkpoint, and the servers' snapshots if they are newer.

    `same` tells whether strategy and workers are those of the saved run, so that each rank loads its own state.
    """

    folder: Path
    step: int
    same: bool
    reset_optimizer: bool
    snapshots: SnapshotSet | None = None

    @property
    def done(self) -> int:
        """Rounds that are done; some leases of later rounds may be done, too."""
        return self.snapshots.done if self.snapshots else self.step

    @property
    def snapshots_folder(self) -> Path:
        """The snapshots of the checkpoint's run."""
        return self.folder.parent / SNAPSHOTS


@dataclass(frozen=True)
class AttemptInfo:
    """One attempt at a run, from a start or a resumption to its end; it began at `began_s` on the run's clock.

    `lock` is a descriptor that locks the directory while any process holds it; -1 for none. A directory that is not
    `lasting` is deleted when the run has failed.
    """

    began_s: float = 0.0
    lock: int = -1
    lasting: bool = True


@dataclass(frozen=True)
class Timeouts:
    """After how many seconds a process without a sign of life counts as lost, and a collective of devices has failed.

    A collective fails whose ranks have not all come to it, or that has not ended though they have.
    """

    silence_s: float = 10.0
    collective_s: float = 600.0


@dataclass(frozen=True)
class RunSpec:
    """One run.

    Attributes:
        train: the user's own loop, `train(worker)`; None for the usual one.
        weighed: whether the job's loss is a `Mean`.
        started: the run's begin on the host's monotonic clock, seconds.
        timeouts: how long processes and collectives are waited for.
        seconds: end the run after this time; None for the job's own end.
        checkpoints: when to save; None for never.
        resume: where to resume from; None to start anew.
        callbacks: the user's, which rank 0 calls.
        caller: what its process has that the run's processes need; None where they are the same.
    """

    job: Job
    train: Callable[[Any], None] | None
    strategy: Strategy
    plan: Plan
    model: ModelSpec
    weighed: bool
    run_dir: Path
    started: float
    timeouts: Timeouts = Timeouts()
    seconds: float | None = None
    checkpoints: Checkpoints | None = None
    resume: ResumePoint | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    attempt: AttemptInfo = AttemptInfo()
    callbacks: tuple[Callback, ...] = ()
    caller: CallerProcess | None = None

    @property
    def timeout_s(self) -> float:
        """After this time without a sign of life a process counts as lost."""
        return self.timeouts.silence_s

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of headrace that this run's workers need beside those of every run."""
        needed = {
            type(self.strategy).__module__: True,
            "headrace.worker.evaluations.evaluation": self.job.eval_data is not None,
            "headrace.worker.guards.losses": self.train is not None,
            "headrace.worker.loops.members": self.plan.min_workers is not None,
            "headrace.training.turns": self.job.turns is not None,
        }
        return tuple(name for name, needs in needed.items() if needs and name.startswith("headrace."))

    def of_set(self, job: Job, names: Collection[str]) -> RunSpec:
        """Returns the run of a job that trains the parameters of these names alone."""
        parameters = tuple(each for each in self.model.parameters if each.name in names)
        segments = tuple(each for each in self.plan.segments if each.parameter in names)
        model, plan = replace(self.model, parameters=parameters), replace(self.plan, segments=segments)
        return replace(self, job=job, model=model, plan=plan)

    def deadline(self, replaces: bool) -> float:
        """Returns when the run is to end, on the host's monotonic clock.

        A worker that replaces a lost one has the rest of its time.
        """
        began = self.started + self.attempt.began_s if replaces else monotonic()
        return began + (math.inf if self.seconds is None else self.seconds)

    def rounds(self, rounds_per_epoch: int) -> int:
        """Returns how many rounds the job has."""
        return self.job.steps or (self.job.epochs or 0) * rounds_per_epoch

    def rounds_of(self, examples: int) -> int:
        """Returns how many rounds the job has, where an epoch has so many examples."""
        return self.rounds(-(-examples // self.job.global_batch_size))

    @property
    def swaps_weights(self) -> bool:
        """Whether the model that is evaluated, and left at the end, has other weights than training goes on from."""
        return self.job.options.ema_decay is not None or self.model.optimizer.modes

    @property
    def snapshots_every_s(self) -> float | None:
        """Seconds between two snapshots of a server; None for no snapshots, as with backups, which replace them."""
        snapshots = self.strategy.snapshots and needs_snapshots(self.plan) and self.checkpoints
        return snapshots.snapshots_every_s if snapshots else None
