"""What a run did and what it cost, from its event files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import DataError
from headrace.report.model.bottleneck import Bottleneck, bottleneck_of
from headrace.report.model.ending import last_word
from headrace.report.model.events import Attempt, EventLog, attempts, of_kind, read_log
from headrace.report.model.glance import Brief
from headrace.report.model.inputs import InputSummary, inputs_of
from headrace.report.model.pipeline import PipelineStep, passed_of
from headrace.report.model.servers import ServerSummary, servers_of
from headrace.report.model.training import (
    AveragingSummary,
    BalanceSummary,
    Curves,
    StepTimes,
    TrainingClock,
    averaging_of,
    balance_of,
    curves_of,
    numbers_of,
)
from headrace.report.predicted import PredictedRun
from headrace.spec.events import (
    Evaluated,
    Event,
    Failed,
    NonFinite,
    Notice,
    RowsHeld,
    RunEnded,
    RunStarted,
    Saved,
    ServerEnded,
    ServerStarted,
    Stepped,
    TableStats,
    ValuesLogged,
    WorkerEnded,
    WorkerStarted,
)


@dataclass(frozen=True)
class Outcome:
    """How the run ended: its last attempt, where it was resumed.

    `status` is "ok", "failed", "interrupted", or "unfinished" where the launcher has not written the end; `cause` and
    `remedy` are those of `RunEnded`; `failure` is the first that a process reported; `hosts` are in the order of their
    first rank, `devices` those of the workers, by rank; `torn_lines` counts event files that end in half a line.
    """

    status: str
    failure: Failed | None
    notices: tuple[str, ...]
    hosts: tuple[str, ...]
    torn_lines: int
    attempts: int = 1
    devices: Mapping[int, str] = field(default_factory=dict)
    cause: str = ""
    remedy: str = ""

    @property
    def words(self) -> str:
        """Cause and remedy, as every view shows them."""
        return "; ".join(filter(None, (self.cause, self.remedy)))


@dataclass(frozen=True)
class Training:
    """How much all attempts together trained, and how fast; repeated rounds count once.

    `steps` are rounds of which at least one worker finished its step. `seconds` run from each attempt's first step to
    the end of its last, without evaluations. `examples_per_s` is the steady state: an attempt's window opens when the
    last worker has finished its warm-up (`WARM_UP_STEPS` steps, or half of the fewest steps of any worker if that is
    less) and closes with the last step; None without a step in a window. `spread` is between the rates of its four
    parts, (fastest - slowest) / mean; None for a window too short to say. `predicted` is what is kept of a simulation.
    """

    steps: int
    epochs: float
    examples: int
    seconds: float
    examples_per_s: float | None
    spread: float | None = None
    predicted: PredictedRun | None = None


@dataclass(frozen=True)
class Cost:
    """What the last attempt took of the machine; None where some worker or server has not written its end.

    `moved_bytes_per_step` counts bytes sent, or written for others to read, and received, by all workers together.
    `peak_memory_bytes` is of the largest process, and known as soon as one process has ended. `training_bytes` is the
    part of a worker's peak, the largest of all, that came after its runtime was there; None where not measured.
    `rows` are those of the sparse embeddings, of all servers together.
    """

    moved_bytes_per_step: float | None
    peak_memory_bytes: int | None
    parameter_bytes: int | None
    optimizer_bytes: int | None
    training_bytes: int | None = None
    rows: tuple[TableStats, ...] = ()


@dataclass(frozen=True)
class Saves:
    """The checkpoints that were written; `bytes` and `last_step` are the last one's.

    `share` is the part of the training time in which training stood still for them.
    """

    count: int
    last_step: int
    bytes: int
    mean_stall_s: float
    longest_stall_s: float
    share: float


@dataclass(frozen=True)
class NonFiniteRounds:
    """Rounds that were left out for a NaN or infinite loss or gradient, without and with a rollback to a checkpoint."""

    skipped: int
    rolled_back: int


@dataclass(frozen=True)
class Summary:
    """One run. A part is None where the run has nothing of it.

    `label` is the name of the run's directory; `started` is of the last attempt.
    """

    label: str
    started: RunStarted
    outcome: Outcome
    training: Training
    times: StepTimes | None
    times_by_rank: Mapping[int, StepTimes]
    cost: Cost
    curves: Curves
    saves: Saves | None = None
    non_finite: NonFiniteRounds | None = None
    servers: ServerSummary | None = None
    inputs: InputSummary | None = None
    averaging: AveragingSummary | None = None
    balance: BalanceSummary | None = None
    passed: PipelineStep | None = None
    times_of_last: StepTimes | None = None
    numbers: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)

    @property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the run's speed; None without input events, and for stages of which no step was timed."""
        if self.inputs is None or (self.started.plan.get("partition") and self.passed is None):
            return None
        return bottleneck_of(self.times_by_rank, self.inputs, self.started, self.passed, self.times_of_last)

    @property
    def name(self) -> str:
        """The label, with the strategy where the label does not contain it."""
        return self.label if self.strategy in self.label else f"{self.label} ({self.strategy})"

    @property
    def strategy(self) -> str:
        return self.started.strategy

    @property
    def workers(self) -> int:
        return self.started.workers

    @property
    def status(self) -> str:
        return self.outcome.status

    @property
    def steps(self) -> int:
        return self.training.steps

    @property
    def examples_per_s(self) -> float | None:
        return self.training.examples_per_s

    @property
    def mixed(self) -> bool:
        """Whether the workers are on devices of several kinds."""
        return len({device.partition(":")[0] for device in self.outcome.devices.values()}) > 1

    def named_rank(self, rank: int) -> str:
        """Returns "rank 1", with its device where the workers are on several kinds: "rank 1 (cpu)"."""
        return f"rank {rank} ({self.outcome.devices[rank]})" if self.mixed else f"rank {rank}"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last evaluation; empty without one."""
        return self.curves.evaluations[-1].metrics if self.curves.evaluations else {}


def brief_of(run: Summary) -> Brief:
    """Returns a run in the few values that its sentence and its tiles are made of."""
    training, points = run.training, run.curves.loss
    losses = run.curves.first_loss, points[-1].loss if points else None
    return Brief(
        *(run.started, run.status, run.outcome.words, training.epochs, training.steps, training.seconds),
        *(training.examples_per_s, run.metrics, losses, run.bottleneck),
    )


def summarize(run_dir: Path | str, log: EventLog | None = None) -> Summary:
    """Returns the summary of a run's event files, also of a run that failed, was interrupted or is still running.

    Args:
        run_dir: of the run.
        log: its events, where they have been read.

    Raises:
        UsageError: the directory holds no events.
        DataError: a line is no event, or there is no run_started event.
    """
    run_dir = Path(run_dir)
    log = log or read_log(run_dir)
    begun = attempts(log.events)
    if not begun:
        raise DataError(f"{run_dir} holds no run_started event: its launcher was killed before the run began")
    last = begun[-1]
    events = [event for attempt in begun for event in attempt.events]
    steps, evaluated = list(of_kind(Stepped, events)), list(of_kind(Evaluated, events))
    clock = TrainingClock((attempt.steps for attempt in begun), evaluated)
    ranks = sorted({step.rank for step in steps})
    examples_per_epoch = last.started.examples_per_epoch
    examples = sum(step.examples for step in steps)
    epochs = examples / examples_per_epoch if examples_per_epoch else 0.0
    training = Training(
        len({step.step for step in steps}),
        epochs,
        examples,
        clock.seconds,
        clock.rate(),
        clock.spread(),
        PredictedRun.of_run(run_dir),
    )
    return Summary(
        label=run_dir.resolve().name,
        started=last.started,
        outcome=_outcome(run_dir, last, len(begun), log.torn_lines),
        training=training,
        times=clock.times(*ranks) if ranks else None,
        times_by_rank={rank: clock.times(rank) for rank in ranks},
        times_of_last=clock.times_of_last(),
        cost=_cost(last),
        curves=curves_of(steps, evaluated, clock, examples_per_epoch),
        saves=_saves(list(of_kind(Saved, events)), clock, training.seconds),
        non_finite=_non_finite(events),
        servers=servers_of(begun, clock),
        inputs=inputs_of(begun),
        averaging=averaging_of(begun),
        balance=balance_of(begun),
        passed=passed_of(begun),
        numbers=numbers_of(of_kind(ValuesLogged, events)),
    )


def _outcome(run_dir: Path, last: Attempt, count: int, torn_lines: int) -> Outcome:
    failure = next(of_kind(Failed, last.events), None)
    ended = last_word(run_dir, next(of_kind(RunEnded, last.events), None), failure, last.started)
    workers = tuple(of_kind(WorkerStarted, last.events))
    started: list[WorkerStarted | ServerStarted] = [*workers]
    started += of_kind(ServerStarted, last.events)
    hosts = {event.rank: event.host for event in started}
    return Outcome(
        status=ended.status,
        failure=failure,
        notices=tuple(dict.fromkeys(event.text for event in of_kind(Notice, last.events))),
        hosts=tuple(dict.fromkeys(host for _, host in sorted(hosts.items()))),
        torn_lines=torn_lines,
        attempts=count,
        devices={each.rank: each.device for each in sorted(workers, key=lambda each: each.rank)},
        cause=ended.cause,
        remedy=ended.remedy,
    )


def _cost(last: Attempt) -> Cost:
    workers, servers = tuple(of_kind(WorkerEnded, last.events)), tuple(of_kind(ServerEnded, last.events))
    ended: tuple[WorkerEnded | ServerEnded, ...] = (*workers, *servers)
    peak = max((event.peak_memory_bytes for event in ended), default=None)
    steps = len({step.step for steps in last.steps.values() for step in steps})
    # A sum over some of the processes would look like a cheaper run.
    if len(workers) < last.started.workers or len(servers) < len(set(of_kind(ServerStarted, last.events))):
        return Cost(None, peak, None, None, rows=_rows(last))
    return Cost(
        # What servers have moved is what workers have.
        moved_bytes_per_step=sum(event.moved_bytes for event in workers) / steps if steps else None,
        peak_memory_bytes=peak,
        parameter_bytes=sum(event.parameter_bytes for event in ended),
        optimizer_bytes=sum(event.optimizer_bytes for event in ended),
        training_bytes=max(
            (event.peak_memory_bytes - event.runtime_bytes for event in workers if event.runtime_bytes), default=None
        ),
        rows=_rows(last),
    )


def _rows(last: Attempt) -> tuple[TableStats, ...]:
    """Returns the sums over the servers, each as it spoke last."""
    by_table: dict[str, list[TableStats]] = {}
    for held in {event.server: event for event in of_kind(RowsHeld, last.events)}.values():
        for table in held.tables:
            by_table.setdefault(table.name, []).append(table)
    return tuple(
        TableStats(name, *(sum(getattr(part, key) for part in parts) for key in ("held", "most", "evicted")))
        for name, parts in by_table.items()
    )


def _saves(saved: Sequence[Saved], clock: TrainingClock, seconds: float) -> Saves | None:
    if not saved:
        return None
    stalls = [event.stall_s for event in saved]
    # The stall of an attempt's last save comes after its last step, and no training waits for it.
    ends = (event.time_s - event.write_s for event in saved)
    stalled = sum(clock.between(end - stall, end) for end, stall in zip(ends, stalls, strict=True))
    return Saves(
        count=len(saved),
        last_step=saved[-1].step,
        bytes=saved[-1].bytes,
        mean_stall_s=sum(stalls) / len(stalls),
        longest_stall_s=max(stalls),
        share=stalled / seconds if seconds > 0 else 0.0,
    )


def _non_finite(events: Sequence[Event]) -> NonFiniteRounds | None:
    actions = Counter(event.action for event in of_kind(NonFinite, events))
    # The one that ended the run is its failure.
    found = NonFiniteRounds(actions["skip"], actions["rollback"])
    return found if found.skipped or found.rolled_back else None
