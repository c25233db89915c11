"""What a run did and what it cost, from its event files alone."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from headrace.errors import DataError
from headrace.report.events import EventLog, read_log
from headrace.report.training_clock import StepTimes, TrainingClock
from headrace.spec.event import (
    Evaluated,
    Event,
    Failed,
    Notice,
    RunEnded,
    RunStarted,
    Stepped,
    WorkerEnded,
    WorkerStarted,
)

__all__ = [
    "CURVE_POINTS",
    "Cost",
    "Curves",
    "EvaluationPoint",
    "LossPoint",
    "Outcome",
    "Summary",
    "Training",
    "summarize",
]

CURVE_POINTS = 400
"""Most points of a loss curve."""

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Outcome:
    """How the run ended.

    Attributes:
        status: "ok", "failed", "interrupted"; "unfinished" where the launcher did not live to say (or the run
            goes on).
        failure: the first failure that a process reported.
        notices: lines for the user, each once.
        hosts: names of the machines, in the order of their first rank.
        torn_lines: event files that end in half a line.
    """

    status: str
    failure: Failed | None
    notices: tuple[str, ...]
    hosts: tuple[str, ...]
    torn_lines: int


@dataclass(frozen=True)
class Training:
    """How much was trained, and how fast.

    Attributes:
        steps: rounds of which at least one worker finished its step.
        epochs: `examples` over the length of the training set.
        examples: of all workers' steps.
        seconds: from the begin of the first step to the end of the last, without evaluations.
        examples_per_s: steady state. The window opens when the last worker has finished its warm-up
            (`WARM_UP_STEPS` steps, or half of the fewest steps of any worker if that is less) and closes with
            the last step of all. The rate is the examples of all workers' steps that ended inside the window,
            over its length without the evaluations in it. None where no step is in it.
    """

    steps: int
    epochs: float
    examples: int
    seconds: float
    examples_per_s: float | None


@dataclass(frozen=True)
class Cost:
    """What the run took of the machine; None where not every worker lived to say.

    Attributes:
        moved_bytes_per_step: sent, or written for others to read, and received, all workers together.
        peak_memory_bytes: of the largest process; known as soon as one worker has said it.
        parameter_bytes, optimizer_bytes: all workers together.
    """

    moved_bytes_per_step: float | None
    peak_memory_bytes: int | None
    parameter_bytes: int | None
    optimizer_bytes: int | None


@dataclass(frozen=True)
class LossPoint:
    """Attributes:
    examples: seen by all workers so far.
    seconds: trained so far, without evaluations.
    loss: weighted mean over the workers, and over the consecutive steps that the point stands for.
    """

    examples: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class EvaluationPoint:
    """Attributes:
    step: steps done when it was made.
    epochs: visits of the training set by then.
    seconds: trained by then, without evaluations.
    metrics: name to value.
    took_s: how long it took.
    """

    step: int
    epochs: float
    seconds: float
    metrics: Mapping[str, float]
    took_s: float


@dataclass(frozen=True)
class Curves:
    """What changed over the run.

    Attributes:
        loss: at most `CURVE_POINTS` points; a step whose loss is not finite is left out.
        evaluations: in the order in which they were made.
    """

    loss: tuple[LossPoint, ...]
    evaluations: tuple[EvaluationPoint, ...]


@dataclass(frozen=True)
class Summary:
    """One run.

    Attributes:
        label: the name of its directory.
        started: what was asked for.
        outcome: how it ended.
        training: how much was trained, how fast.
        times: the mean step of all workers; None where no step was done.
        times_by_rank: the mean step of each.
        cost: bytes and memory.
        curves: loss and evaluations.
    """

    label: str
    started: RunStarted
    outcome: Outcome
    training: Training
    times: StepTimes | None
    times_by_rank: Mapping[int, StepTimes]
    cost: Cost
    curves: Curves

    @property
    def name(self) -> str:
        """What to call it beside others: the label, with the strategy where the label does not say it."""
        return self.label if self.strategy in self.label else f"{self.label} ({self.strategy})"

    @property
    def strategy(self) -> str:
        """The registered name."""
        return self.started.strategy

    @property
    def workers(self) -> int:
        """How many computed."""
        return self.started.workers

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self.started.device

    @property
    def threads(self) -> int:
        """Threads a worker."""
        return self.started.threads

    @property
    def status(self) -> str:
        """See `Outcome`."""
        return self.outcome.status

    @property
    def failure(self) -> Failed | None:
        """The first failure that a process reported."""
        return self.outcome.failure

    @property
    def steps(self) -> int:
        """Rounds done."""
        return self.training.steps

    @property
    def examples_per_s(self) -> float | None:
        """Steady state; see `Training`."""
        return self.training.examples_per_s

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last evaluation; empty without one."""
        return self.curves.evaluations[-1].metrics if self.curves.evaluations else {}


def summarize(run_dir: Path | str) -> Summary:
    """Returns what the event files of a run say, also of one that failed, was interrupted or goes on.

    Raises:
        UsageError: the directory holds no events.
        DataError: a line is no event, or the launcher never said that the run began.
    """
    run_dir = Path(run_dir)
    log = read_log(run_dir)
    started = next(_of(RunStarted, log.events), None)
    if started is None:
        raise DataError(f"{run_dir} holds no run_started event: its launcher was killed before the run began")
    evaluated = tuple(_of(Evaluated, log.events))
    by_rank: dict[int, list[Stepped]] = defaultdict(list)
    for step in _of(Stepped, log.events):
        by_rank[step.rank].append(step)
    clock = TrainingClock(by_rank, evaluated)
    times = {rank: clock.times(steps) for rank, steps in sorted(by_rank.items())}
    return Summary(
        label=run_dir.resolve().name,
        started=started,
        outcome=_outcome(log),
        training=_training(by_rank, clock, started.examples_per_epoch),
        times=_mean_times(times, by_rank, clock),
        times_by_rank=times,
        cost=_cost(tuple(_of(WorkerEnded, log.events)), started.workers),
        curves=_curves(by_rank, evaluated, clock, started.examples_per_epoch),
    )


def _of(kind: type[E], events: Iterable[Event]) -> Iterator[E]:
    return (event for event in events if isinstance(event, kind))


def _outcome(log: EventLog) -> Outcome:
    ended = next(_of(RunEnded, log.events), None)
    hosts = {event.rank: event.host for event in _of(WorkerStarted, log.events)}
    return Outcome(
        status=ended.status if ended else "unfinished",
        failure=next(_of(Failed, log.events), None),
        notices=tuple(dict.fromkeys(event.text for event in _of(Notice, log.events))),
        hosts=tuple(dict.fromkeys(host for _, host in sorted(hosts.items()))),
        torn_lines=log.torn_lines,
    )


def _training(by_rank: Mapping[int, Sequence[Stepped]], clock: TrainingClock, examples_per_epoch: int) -> Training:
    every = [step for steps in by_rank.values() for step in steps]
    examples = sum(step.examples for step in every)
    window_s = clock.between(clock.opens, clock.end)
    inside = clock.inside(every)
    return Training(
        steps=len({step.step for step in every}),
        epochs=examples / examples_per_epoch if examples_per_epoch else 0.0,
        examples=examples,
        seconds=clock.between(clock.begin, clock.end),
        examples_per_s=sum(step.examples for step in inside) / window_s if inside and window_s > 0 else None,
    )


def _mean_times(
    times: Mapping[int, StepTimes], by_rank: Mapping[int, Sequence[Stepped]], clock: TrainingClock
) -> StepTimes | None:
    if not times:
        return None
    counts = {rank: len(clock.inside(steps)) or 1 for rank, steps in by_rank.items()}
    total = sum(counts.values())
    return StepTimes(
        *(
            math.fsum(getattr(times[rank], field.name) * count for rank, count in counts.items()) / total
            for field in fields(StepTimes)
        )
    )


def _cost(ended: Sequence[WorkerEnded], workers: int) -> Cost:
    peak = max((event.peak_memory_bytes for event in ended), default=None)
    steps = max((event.steps for event in ended), default=0)
    # A sum over some of the workers would look like a cheaper run.
    if len(ended) < workers:
        return Cost(None, peak, None, None)
    return Cost(
        moved_bytes_per_step=sum(event.moved_bytes for event in ended) / steps if steps else None,
        peak_memory_bytes=peak,
        parameter_bytes=sum(event.parameter_bytes for event in ended),
        optimizer_bytes=sum(event.optimizer_bytes for event in ended),
    )


@dataclass
class _Round:
    """The steps of one index, of all workers, added up."""

    examples: int = 0
    time_s: float = 0.0
    loss: float = 0.0
    weight: float = 0.0

    def add(self, step: Stepped) -> None:
        self.examples += step.examples
        self.time_s = max(self.time_s, step.time_s)
        if step.loss is not None and math.isfinite(step.loss):
            self.loss += step.loss * step.weight
            self.weight += step.weight


def _curves(
    by_rank: Mapping[int, Sequence[Stepped]],
    evaluated: Iterable[Evaluated],
    clock: TrainingClock,
    examples_per_epoch: int,
) -> Curves:
    rounds: dict[int, _Round] = defaultdict(_Round)
    for steps in by_rank.values():
        for step in steps:
            rounds[step.step].add(step)
    order = sorted(rounds)
    seen = list(accumulate((rounds[step].examples for step in order), initial=0))
    # Workers that run ahead finish a later step before others an earlier one; the curve goes forward only.
    times = list(accumulate((rounds[step].time_s for step in order), max))
    width = max(1, math.ceil(len(order) / CURVE_POINTS))
    loss = []
    for start in range(0, len(order), width):
        stop = min(start + width, len(order))
        piece = [rounds[step] for step in order[start:stop]]
        weight = math.fsum(each.weight for each in piece)
        if weight > 0:
            mean = math.fsum(each.loss for each in piece) / weight
            loss.append(LossPoint(seen[stop], clock.between(clock.begin, times[stop - 1]), mean))
    return Curves(
        loss=tuple(loss),
        evaluations=tuple(
            EvaluationPoint(
                step=event.step,
                epochs=seen[bisect_left(order, event.step)] / examples_per_epoch if examples_per_epoch else 0.0,
                seconds=max(0.0, clock.between(clock.begin, event.time_s)),
                metrics=event.metrics,
                took_s=event.seconds,
            )
            for event in evaluated
        ),
    )
