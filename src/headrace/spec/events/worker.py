"""Events that workers write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.spec.events.run import Event


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
class InputStageStats:
    """What one stage of a worker's input has cost, in all threads or processes together.

    Attributes:
        name: "source", "map(augment)", "batch".
        busy_s: seconds in it.
        waiting_s: of those, in which it did not compute: it waited for a disk, a network, a lock or a core.
    """

    name: str
    busy_s: float
    waiting_s: float


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
class ParametersAveraged(Event):
    """When workers have met and their parameters were averaged: by rank 0, or by each where they meet through servers.

    Attributes:
        step: rounds done.
        rounds: since the meeting before.
        period: rounds until the next.
        why: that many, in words.
        drift: the largest distance of a worker's parameters from the workers' mean, over the norm of the mean.
        exchange_s: how long the meeting took rank 0, its wait for the others among it.
        left_out: ranks whose parameters were not finite; they went on from the others' mean.
        meeting: its number where each worker tells of it: then drift and time are that worker's own; else 0.
    """

    kind = "averaged"
    step: int
    rounds: int
    period: int
    why: str
    drift: float
    exchange_s: float
    left_out: tuple[int, ...] = ()
    meeting: int = 0


@dataclass(frozen=True)
class StagePass:
    """One micro-batch through one stage, forward or backward.

    Attributes:
        stage, micro_batch: which.
        backward: in which direction.
        began_s, ended_s: on the clock of the run, or of the host where nobody has told it.
        waited_s: of that, for what other stages make.
    """

    stage: int
    micro_batch: int
    backward: bool
    began_s: float
    ended_s: float
    waited_s: float


@dataclass(frozen=True)
class PipelineStepTimed(Event):
    """By a worker of a pipeline, after some of its steps.

    Attributes:
        step: counted from 0 over the whole run.
        in_flight: most micro-batches so far whose activations waited for their backward at a time.
        passes: of this worker in this step, in order.
    """

    kind = "passed"
    step: int
    in_flight: int
    passes: tuple[StagePass, ...]


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
