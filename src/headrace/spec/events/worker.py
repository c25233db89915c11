"""Events that workers write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.spec.events.run import Event


@dataclass(frozen=True)
class WorkerStarted(Event, kind="worker_started"):
    """A worker has built its replica."""

    host: str
    pid: int
    device: str
    threads: int


@dataclass(frozen=True)
class Stepped(Event, kind="stepped"):
    """A worker has finished a step.

    Attributes:
        step, epoch: counted from 0 over the whole run.
        examples: of this worker in this step; 0 where the last batch had none for it.
        loss: mean over this worker's examples; None without examples.
        weight: weight of the loss in the global batch's mean (examples, or tokens for `Mean` losses).
        wait_s, compute_s, exchange_s, update_s: parts of the step's time; `wait_s` is for data.
        lease: the data lease, where data is leased; else -1.
        pulled: the version of the servers' parameters that the worker took over before it computed: one number for all
            shards, or one for each where they differ; () where it went on with its own parameters.
        turn: the set of parameters that was trained, where sets take turns; else "".
    """

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
    pulled: tuple[int, ...] = ()
    turn: str = ""


@dataclass(frozen=True)
class InputStageStats:
    """The cost of one stage ("source", "map(augment)", "batch") of a worker's input, in all threads or processes.

    `waiting_s` is the part of `busy_s` without computing: waiting for a disk, a network, a lock or a core.
    """

    name: str
    busy_s: float
    waiting_s: float


@dataclass(frozen=True)
class InputStats(Event, kind="fed"):
    """How a worker's batches were read since it started: about once a second, and at its end.

    Attributes:
        parallel: "inline", "threads" or "processes".
        readers: threads or processes that read; 1 where the worker itself reads.
        seconds: since the first request for a batch.
        waited_s: the part of it in which the worker waited for a batch.
        ready: sum, over all requests, of the batches that were ready; divided by `batches`, the mean queue occupancy.
        batches, examples, bytes: received so far.
        skipped: examples that could not be read and were left out.
        stages: the source, each transform, and batching.
    """

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
class Evaluated(Event, kind="evaluated"):
    """By rank 0: an evaluation over the whole evaluation set.

    Attributes:
        step, epoch: how many were done before it.
        examples: counted by all workers together.
        metrics: name to value, "loss" among them.
    """

    step: int
    epoch: int
    examples: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Saved(Event, kind="saved"):
    """By rank 0: a checkpoint is on the disk.

    Attributes:
        step: rounds that it contains.
        stall_s: how long training stood still on rank 0, for the copy.
        write_s: how long writing took, while training continued.
    """

    step: int
    bytes: int
    stall_s: float
    write_s: float


@dataclass(frozen=True)
class NonFinite(Event, kind="non_finite"):
    """A loss or gradient was NaN or infinite, and did not reach the parameters.

    Rank 0 writes it, or the rank whose loss ends the run.

    Attributes:
        step: of the round, counted from 0.
        ranks: the ranks with such a loss; empty if only the gradient was not finite.
        action: "raise", "skip" or "rollback".
    """

    step: int
    ranks: tuple[int, ...]
    action: str


@dataclass(frozen=True)
class ParametersAveraged(Event, kind="averaged"):
    """Workers have averaged their parameters: by rank 0, or by each worker where they average through servers.

    Attributes:
        step: rounds done.
        rounds: since the last averaging.
        period: rounds until the next.
        why: the reason for that period, as text.
        drift: largest distance of a worker's parameters from the workers' mean, over the norm of the mean.
        exchange_s: how long the averaging took rank 0, its wait for the others included.
        left_out: ranks whose parameters were not finite; they continued from the others' mean.
        meeting: its number where each worker writes an event, with its own drift and time; else 0.
    """

    step: int
    rounds: int
    period: int
    why: str
    drift: float
    exchange_s: float
    left_out: tuple[int, ...] = ()
    meeting: int = 0


@dataclass(frozen=True)
class SharesBalanced(Event, kind="balanced"):
    """By the first worker: from the next step on a global batch is split otherwise.

    Attributes:
        step: rounds done.
        sizes: examples of a batch, by worker.
        seconds: that each worker has needed before for its share, by worker.
    """

    step: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def line(self) -> str:
        """What changes, as a sentence for the user."""
        sizes = " + ".join(map(str, self.sizes))
        times = f"{1e3 * min(self.seconds):.3g} to {1e3 * max(self.seconds):.3g} ms"
        return f"after {self.step} step{'s' * (self.step != 1)} the batch is split {sizes}: its shares took {times}"


@dataclass(frozen=True)
class StagePass:
    """One micro-batch through one stage, forward or backward.

    Attributes:
        began_s, ended_s: on the clock of the run, or of the host where the worker does not know the run's.
        waited_s: of that time, seconds in which the stage waited for other stages.
        part: of a backward pass in two parts, "input" or "weights"; "" of a whole one.
    """

    stage: int
    micro_batch: int
    backward: bool
    began_s: float
    ended_s: float
    waited_s: float
    part: str = ""


@dataclass(frozen=True)
class PipelineStepTimed(Event, kind="passed"):
    """By a worker of a pipeline, after some of its steps.

    Attributes:
        step: counted from 0 over the whole run.
        in_flight: the most micro-batches so far whose activations waited for their backward at a time.
        passes: of this worker in this step, in order.
    """

    step: int
    in_flight: int
    passes: tuple[StagePass, ...]


@dataclass(frozen=True)
class TableReads:
    """What one worker's steps have read of a table.

    Attributes:
        asked: how many rows; a row counts once each call of the layer.
        copied: those of them that it read from its copies of the hottest rows.
        early: those of them that were pulled during the step before.
        saved_bytes: of the copied rows, which did not travel.
        unforeseen: whether rows should be pulled early, and the layer's indices are in no batch.
    """

    name: str
    asked: int
    copied: int
    early: int
    saved_bytes: int
    unforeseen: bool = False


@dataclass(frozen=True)
class RowsRead(Event, kind="rows_read"):
    """By a worker that keeps rows of tables near, at its end: what its training steps have read."""

    tables: tuple[TableReads, ...]

    @property
    def line(self) -> str:
        """What could not be pulled early, as a sentence for the user; "" if there is nothing."""
        names = ", ".join(repr(each.name) for each in self.tables if each.unforeseen)
        return names and (
            f"prefetch pulls no rows of the sparse embedding {names} early: its indices are no part of a batch, and "
            "forward computes them; compute them in the data, as with .map(...)"
        )


@dataclass(frozen=True)
class ValuesLogged(Event, kind="values_logged"):
    """By rank 0: a callback has logged numbers, after `step` rounds."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class PictureLogged(Event, kind="picture_logged"):
    """By rank 0: a callback has saved a picture, after `step` rounds, as the PNG file `path`."""

    step: int
    name: str
    path: str


@dataclass(frozen=True)
class WorkerEnded(Event, kind="worker_ended"):
    """The last event of a worker.

    Attributes:
        moved_bytes: bytes that it sent or wrote for others to read, and received, in the exchange.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: bytes that it holds itself (rank 0 alone counts a copy that all share).
        runtime_bytes: its resident size before the model was made; 0 where it was not measured.
    """

    steps: int
    moved_bytes: int
    peak_memory_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    runtime_bytes: int = 0
