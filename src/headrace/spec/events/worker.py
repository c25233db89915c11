"""Events that workers write."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from headrace.spec.events.run import Event
from headrace.spec.plain import FiniteFloat, Int64


class WorkerStarted(Event, frozen=True, tag="worker_started"):
    """A worker has built its replica."""

    host: str
    pid: Int64
    device: str
    threads: Int64


class Stepped(Event, frozen=True, tag="stepped", omit_defaults=True):
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

    step: Int64
    epoch: Int64
    examples: Int64
    loss: float | None
    weight: float
    wait_s: FiniteFloat
    compute_s: FiniteFloat
    exchange_s: FiniteFloat
    update_s: FiniteFloat
    lease: Int64 = -1
    pulled: tuple[Int64, ...] = ()
    turn: str = ""


class InputStageStats(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The cost of one stage ("source", "map(augment)", "batch") of a worker's input, in all threads or processes.

    `waiting_s` is the part of `busy_s` that waits for a disk, a network, a lock or a core; `draws`: random numbers.
    """

    name: str
    busy_s: FiniteFloat
    waiting_s: FiniteFloat
    draws: bool = False


class InputStats(Event, frozen=True, tag="fed"):
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
    readers: Int64
    seconds: FiniteFloat
    waited_s: FiniteFloat
    ready: Int64
    batches: Int64
    examples: Int64
    bytes: Int64
    skipped: Int64
    stages: tuple[InputStageStats, ...]


class Evaluated(Event, frozen=True, tag="evaluated"):
    """By rank 0: an evaluation over the whole evaluation set.

    Attributes:
        step, epoch: how many were done before it.
        examples: counted by all workers together.
        metrics: name to value, "loss" among them.
    """

    step: Int64
    epoch: Int64
    examples: Int64
    metrics: Mapping[str, float]
    seconds: FiniteFloat


class Saved(Event, frozen=True, tag="saved"):
    """By rank 0: a checkpoint is on the disk.

    Attributes:
        step: rounds that it contains.
        stall_s: how long training stood still on rank 0, for the copy.
        write_s: how long writing took, while training continued.
    """

    step: Int64
    bytes: Int64
    stall_s: FiniteFloat
    write_s: FiniteFloat


class NonFinite(Event, frozen=True, tag="non_finite"):
    """A loss or gradient was NaN or infinite, and did not reach the parameters.

    Rank 0 writes it, or the rank whose loss ends the run.

    Attributes:
        step: of the round, counted from 0.
        ranks: the ranks with such a loss; empty if only the gradient was not finite.
        action: "raise", "skip" or "rollback".
    """

    step: Int64
    ranks: tuple[Int64, ...]
    action: str


class ParametersAveraged(Event, frozen=True, tag="averaged"):
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

    step: Int64
    rounds: Int64
    period: Int64
    why: str
    drift: float
    exchange_s: FiniteFloat
    left_out: tuple[Int64, ...] = ()
    meeting: Int64 = 0


class SharesBalanced(Event, frozen=True, tag="balanced"):
    """By the first worker: from the next step on a global batch is split otherwise.

    Attributes:
        step: rounds done.
        sizes: examples of a batch, by worker.
        seconds: that each worker has needed before for its share, by worker.
    """

    step: Int64
    sizes: tuple[Int64, ...]
    seconds: tuple[FiniteFloat, ...]

    @property
    def line(self) -> str:
        """What changes, as a sentence for the user."""
        sizes = " + ".join(map(str, self.sizes))
        times = f"{1e3 * min(self.seconds):.3g} to {1e3 * max(self.seconds):.3g} ms"
        return f"after {self.step} step{'s' * (self.step != 1)} the batch is split {sizes}: its shares took {times}"


class StagePass(Struct, frozen=True, forbid_unknown_fields=True):
    """One micro-batch through one stage, forward or backward.

    Attributes:
        began_s, ended_s: on the clock of the run, or of the host where the worker does not know the run's.
        waited_s: of that time, seconds in which the stage waited for other stages.
        part: of a backward pass in two parts, "input" or "weights"; "" of a whole one.
    """

    stage: Int64
    micro_batch: Int64
    backward: bool
    began_s: FiniteFloat
    ended_s: FiniteFloat
    waited_s: FiniteFloat
    part: str = ""


class PipelineStepTimed(Event, frozen=True, tag="passed"):
    """By a worker of a pipeline, after some of its steps.

    Attributes:
        step: counted from 0 over the whole run.
        in_flight: the most micro-batches so far whose activations waited for their backward at a time.
        passes: of this worker in this step, in order.
    """

    step: Int64
    in_flight: Int64
    passes: tuple[StagePass, ...]


class TableReads(Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker's steps have read of a table.

    Attributes:
        asked: how many rows; a row counts once each call of the layer.
        copied: those of them that it read from its copies of the hottest rows.
        early: those of them that were pulled during the step before.
        saved_bytes: of the copied rows, which did not travel.
        unforeseen: whether rows should be pulled early, and the layer's indices are in no batch.
    """

    name: str
    asked: Int64
    copied: Int64
    early: Int64
    saved_bytes: Int64
    unforeseen: bool = False


class RowsRead(Event, frozen=True, tag="rows_read"):
    """By a worker that keeps rows of tables near, at its end: what its training steps have read."""

    tables: tuple[TableReads, ...]

    @property
    def line(self) -> str:
        """What could not be pulled early, as a sentence for the user; "" if there is nothing."""
        names = ", ".join(repr(table.name) for table in self.tables if table.unforeseen)
        return names and (
            f"prefetch pulls no rows of the sparse embedding {names} early: its indices are no part of a batch, and "
            "forward computes them; compute them in the data, as with .map(...)"
        )


class ValuesLogged(Event, frozen=True, tag="values_logged"):
    """A callback (of rank 0), a strategy or a loop has logged numbers, after `step` rounds."""

    step: Int64
    values: Mapping[str, float]


class PictureLogged(Event, frozen=True, tag="picture_logged"):
    """By rank 0: a callback has saved a picture, after `step` rounds, as the PNG file `path`."""

    step: Int64
    name: str
    path: str


class TextLogged(Event, frozen=True, tag="text_logged"):
    """By rank 0: a callback has logged a text, such as what the model writes, after `step` rounds."""

    step: Int64
    name: str
    text: str


class WorkerEnded(Event, frozen=True, tag="worker_ended"):
    """The last event of a worker.

    Attributes:
        moved_bytes: bytes that it sent or wrote for others to read, and received, in the exchange.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: bytes that it holds itself (rank 0 alone counts a copy that all share).
        runtime_bytes: its resident size before the model was made; 0 where it was not measured.
    """

    steps: Int64
    moved_bytes: Int64
    peak_memory_bytes: Int64
    parameter_bytes: Int64
    optimizer_bytes: Int64
    runtime_bytes: Int64 = 0
