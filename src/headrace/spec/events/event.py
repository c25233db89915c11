"""The evidence: the only thing that comes out of a run.

A process appends its events as JSON lines to one file, `<run>/events/rank-<n>.jsonl`; the launcher writes
`<run>/events/launcher.jsonl`. Reports and the planner read these files, never live objects. Times are seconds
on the host's monotonic clock since the run began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.spec.events.averaged import ParametersAveraged
from headrace.spec.events.base import Event
from headrace.spec.events.pipeline import PipelineStepTimed
from headrace.spec.events.tallies import InputStageStats, ShardStats
from headrace.spec.plain import from_plain, to_plain


@dataclass(frozen=True)
class RunStarted(Event):
    """By the launcher, first.

    Attributes:
        strategy: the registered name.
        workers: how many compute.
        device: "cpu" or "cuda".
        threads: threads a worker.
        global_batch_size: examples a round.
        examples_per_epoch: length of the training set.
        started_at: wall time, ISO 8601, for display only.
        plan: the plan as JSON values.
        versions: "headrace", "torch", "python" to version.
        clock_s: the run's begin on the host's monotonic clock.
        resumed_step: rounds that an earlier attempt had done; what it did beyond them is done again. The events of
            all attempts follow each other in the same files, on one clock.
        resumed_leases: of the rounds beyond them, from each to before another: those that were done as well.
    """

    kind: ClassVar[str] = "run_started"
    strategy: str
    workers: int
    device: str
    threads: int
    global_batch_size: int
    examples_per_epoch: int
    started_at: str
    plan: Mapping[str, object]
    versions: Mapping[str, str]
    clock_s: float = 0.0
    resumed_step: int = 0
    resumed_leases: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class WorkerStarted(Event):
    """By a worker, when its replica stands."""

    kind: ClassVar[str] = "worker_started"
    host: str
    pid: int
    device: str
    threads: int


@dataclass(frozen=True)
class Stepped(Event):
    """By a worker, after each step.

    Attributes:
        step: counted from 0 over the whole run.
        epoch: counted from 0.
        examples: this worker's, in this step; 0 where the last batch had none for it.
        loss: mean over this worker's examples; None where it had none.
        weight: what the loss weighs in the global batch's mean (examples, or tokens for `Mean` losses).
        wait_s, compute_s, exchange_s, update_s: where the step's time went (wait: for data).
        lease: of its data, where that is leased; -1 elsewhere.
    """

    kind: ClassVar[str] = "stepped"
    step: int
    epoch: int
    examples: int
    loss: float | None
    weight: float
    wait_s: float
    compute_s: float
    exchange_s: float
    update_s: float
    lease: int = -1


@dataclass(frozen=True)
class InputStats(Event):
    """By a worker, about once a second and at its end: how its batches have been read since it began.

    Attributes:
        parallel: "inline", "threads" or "processes".
        readers: how many threads or processes read; 1 where the worker does it itself.
        seconds: since the first batch was asked for.
        waited_s: of those, in which the worker waited for a batch.
        ready: batches that were there when one was asked for, summed; over `batches`, the queue's mean occupancy.
        batches, examples, bytes: that came.
        skipped: examples that could not be had and were left out.
        stages: the source, each transform, and what makes the batch.
    """

    kind: ClassVar[str] = "fed"
    parallel: str
    readers: int
    seconds: float
    waited_s: float
    ready: int
    batches: int
    examples: int
    bytes: int
    skipped: int
    stages: tuple[InputStageStats, ...]


@dataclass(frozen=True)
class Evaluated(Event):
    """By rank 0, after an evaluation over the whole evaluation set.

    Attributes:
        step: steps done when it was made.
        epoch: epochs done.
        examples: how many were counted, all workers together.
        metrics: name to value; "loss" among them.
        seconds: how long it took.
    """

    kind: ClassVar[str] = "evaluated"
    step: int
    epoch: int
    examples: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Saved(Event):
    """By rank 0, when a checkpoint is on the disk.

    Attributes:
        step: rounds that it holds.
        bytes: of all its files.
        stall_s: how long training stood still on rank 0, for the copy.
        write_s: how long writing took, while training went on.
    """

    kind: ClassVar[str] = "saved"
    step: int
    bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True)
class NonFinite(Event):
    """By rank 0, or by the rank whose loss ends the run: a loss or gradient was NaN or infinite.

    Nothing of it has reached the parameters.

    Attributes:
        step: of the round, counted from 0.
        ranks: whose loss it was; empty if only the gradient was.
        action: "raise", "skip" or "rollback".
    """

    kind: ClassVar[str] = "non_finite"
    step: int
    ranks: tuple[int, ...]
    action: str


@dataclass(frozen=True)
class Notice(Event):
    """A line for the user."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True)
class Failed(Event):
    """A worker's error, or what the launcher knows of a process that is gone.

    Attributes:
        step: the one it was in.
        cause: one line.
        traceback: the worker's own, from the first frame of the user's code on.
        exit_code: what the command line ends with.
    """

    kind: ClassVar[str] = "failed"
    step: int
    cause: str
    traceback: str = field(default="", repr=False)
    exit_code: int = 1


@dataclass(frozen=True)
class Lost(Event):
    """By the launcher: a process is gone, and the run goes on.

    Attributes:
        lost: its rank.
        incarnation: how many there were in its place before.
        cause: one line.
        replaced: whether another one is started in its place.
    """

    kind: ClassVar[str] = "lost"
    lost: int
    incarnation: int
    cause: str
    replaced: bool

    @property
    def line(self) -> str:
        """What happened, for people."""
        then = "another one takes its place" if self.replaced else "the others go on without it"
        return f"rank {self.lost} was lost ({self.cause}): {then}"


@dataclass(frozen=True)
class WorkerEnded(Event):
    """By a worker, last.

    Attributes:
        steps: steps done.
        moved_bytes: bytes that this worker sent or wrote for others to read, and received, in the exchange.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: what this worker holds of its own (a copy shared by all is counted
            by rank 0 alone).
    """

    kind: ClassVar[str] = "worker_ended"
    steps: int
    moved_bytes: int
    peak_memory_bytes: int
    parameter_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class ServerStarted(Event):
    """By a server, when it holds its shards."""

    kind: ClassVar[str] = "server_started"
    host: str
    pid: int
    shards: int
    parameter_bytes: int


@dataclass(frozen=True)
class ServerStats(Event):
    """By a server, about once a second and at its end: what it has done since it began.

    Attributes:
        busy_s: seconds in which it was not waiting for messages.
        queue_mean, queue_longest: messages that were there when it looked.
        staleness: worker (its rank, or "-1" where a round's mean was applied) to staleness to how many shards' updates.
        waited_s: worker to the seconds that its requests took until they were answered.
        refused: reason to how many shards' pushes.
        shards: in the server's order.
    """

    kind: ClassVar[str] = "served"
    busy_s: float
    queue_mean: float
    queue_longest: int
    staleness: Mapping[str, Mapping[str, int]]
    waited_s: Mapping[str, float]
    refused: Mapping[str, int]
    shards: tuple[ShardStats, ...]


@dataclass(frozen=True)
class SnapshotTaken(Event):
    """By a server without a backup, when all that it is, between two updates, is on the disk.

    Attributes:
        bytes: of the file.
        pause_s: how long the server answered nobody, for the copy.
    """

    kind: ClassVar[str] = "snapshot_taken"
    bytes: int
    pause_s: float


@dataclass(frozen=True)
class ServerEnded(Event):
    """By a server, last.

    Attributes:
        moved_bytes: payload that was pushed to it and pulled from it.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: what it holds.
    """

    kind: ClassVar[str] = "server_ended"
    moved_bytes: int
    peak_memory_bytes: int
    parameter_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class RunEnded(Event):
    """By the launcher, last.

    Attributes:
        status: "ok", "failed" or "interrupted".
    """

    kind: ClassVar[str] = "run_ended"
    status: str


_KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        *(RunStarted, WorkerStarted, Stepped, Evaluated, Saved, NonFinite, Notice, Failed, Lost, WorkerEnded, RunEnded),
        *(InputStats, ParametersAveraged, PipelineStepTimed),
        *(ServerStarted, ServerStats, SnapshotTaken, ServerEnded),
    )
}


def encode(event: Event) -> str:
    """Returns the event as one line of JSON, without the line's end."""
    return json.dumps({"kind": event.kind, **to_plain(event)}, separators=(",", ":"))


def decode(line: str) -> Event:
    """Returns the event that `encode` wrote.

    Raises:
        ValueError: the line is no event.
    """
    try:
        plain = json.loads(line)
        return from_plain(_KINDS[plain.pop("kind")], plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {line[:120]!r} ({error})") from error
