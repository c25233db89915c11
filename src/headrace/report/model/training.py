"""Training time: which part of a run's wall time rates and step times are taken from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean

from msgspec.structs import replace

from headrace.policies.measurement import spread_of
from headrace.policies.roles import split
from headrace.report.model.events import Attempt, of_kind
from headrace.spec.events import Evaluated, ParametersAveraged, SharesBalanced, Stepped, ValuesLogged

WARM_UP_STEPS = 5
"""Steps of each worker that rates leave out: allocations, first touches of memory, caches."""

STEP_PARTS: Mapping[str, str] = {
    "wait_s": "waiting for data",
    "compute_s": "compute",
    "exchange_s": "exchange",
    "update_s": "update",
    "other_s": "between steps",
}
"""The parts of a step's time: attribute of `StepTimes` to name."""

STEPPED_PARTS = ("wait_s", "compute_s", "exchange_s", "update_s")
"""The parts that a worker measures: attributes of `Stepped`."""


@dataclass(frozen=True)
class StepTimes:
    """Where the mean step's time went, in the window of `Training.examples_per_s`; `other_s`: between steps."""

    wait_s: float
    compute_s: float
    exchange_s: float
    update_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.compute_s + self.exchange_s + self.update_s + self.other_s


_PARTS = 4
_ROUNDS_A_PART = 4
_SPREAD_S = 1.0
"""Parts of a measurement whose rates are compared, the fewest rounds of each, and the least seconds of all."""


class TrainingClock:
    """Training time: from the first step of an attempt to its last, without evaluations, all attempts together."""

    def __init__(self, attempts: Iterable[Mapping[int, Sequence[Stepped]]], evaluated: Sequence[Evaluated]) -> None:
        self._windows = tuple(_Window(by_rank) for by_rank in attempts if by_rank)
        self._spans = tuple(span for window in self._windows for span in without(evaluated, window.begin, window.end))

    def between(self, start: float, stop: float) -> float:
        """Returns the seconds of training from `start` to `stop`."""
        overlaps = (min(end, stop) - max(begin, start) for begin, end in self._spans)
        return math.fsum(overlap for overlap in overlaps if overlap > 0)

    @property
    def seconds(self) -> float:
        return self.until(math.inf)

    def until(self, time_s: float) -> float:
        return self.between(-math.inf, time_s)

    def rate(self) -> float | None:
        """Returns the examples of all steps that ended inside the windows over the windows' length, or None."""
        seconds = sum(self.between(window.opens, window.end) for window in self._windows)
        every = [
            (each, step) for each in self._windows for steps in each.by_rank.values() for step in each.inside(steps)
        ]
        inside = [step for window, step in every if window.counts(step)]
        return sum(step.examples for step in inside) / seconds if inside and seconds > 0 else None

    def spread(self) -> float | None:
        """Returns the spread between the parts of the longest window, `(fastest - slowest) / mean` of their rates."""
        window = max(self._windows, key=lambda each: each.end - each.opens, default=None)
        if window is None:
            return None
        steps = sorted(
            (step for steps in window.by_rank.values() for step in window.inside(steps)), key=lambda step: step.time_s
        )
        # Every part has as many steps of each worker, if they go in lock-step.
        rounds = len(steps) // len(window.by_rank)
        size = rounds // _PARTS * len(window.by_rank)
        if rounds // _PARTS < _ROUNDS_A_PART or self.between(window.opens, window.end) < _SPREAD_S:
            return None
        rates, begin = [], window.opens
        for part in range(_PARTS):
            chosen = steps[part * size : (part + 1) * size]
            seconds = self.between(begin, chosen[-1].time_s)
            begin = chosen[-1].time_s
            rates.append(sum(step.examples for step in chosen) / seconds if seconds > 0 else 0.0)
        return spread_of(rates)

    def times(self, *ranks: int) -> StepTimes:
        """Returns the mean step of these workers, each of which has done one."""
        steps: list[Stepped] = []
        wall = 0.0
        for window in self._windows:
            for rank in (rank for rank in ranks if rank in window.by_rank):
                start, inside = window.measured(rank)
                wall += self.between(start, inside[-1].time_s)
                steps += inside
        return _mean(steps, wall)

    def times_of_last(self) -> StepTimes | None:
        """Returns the mean step of the worker that comes last to each exchange, and waits for none; None for one."""
        last: list[Stepped] = []
        for window in self._windows:
            rounds: dict[int, list[Stepped]] = defaultdict(list)
            for steps in window.by_rank.values():
                for step in window.inside(steps):
                    rounds[step.step].append(step)
            last += [min(each, key=lambda step: step.exchange_s) for each in rounds.values() if len(each) > 1]
        return _mean(last, math.fsum(step.time_s - step_began_s(step) for step in last)) if last else None


def _mean(steps: Sequence[Stepped], wall: float) -> StepTimes:
    parts = {part: math.fsum(getattr(step, part) for step in steps) / len(steps) for part in STEPPED_PARTS}
    return StepTimes(**parts, other_s=max(0.0, wall / len(steps) - sum(parts.values())))


class _Window:
    """One attempt's steps; the window opens when the last worker is warm, and closes with the last step of all."""

    def __init__(self, by_rank: Mapping[int, Sequence[Stepped]]) -> None:
        self.by_rank = by_rank
        self.begin = min(step_began_s(steps[0]) for steps in by_rank.values())
        self.end = max(steps[-1].time_s for steps in by_rank.values())
        warm_up = min(WARM_UP_STEPS, *(len(steps) // 2 for steps in by_rank.values()))
        self.opens = max(steps[warm_up - 1].time_s for steps in by_rank.values()) if warm_up else self.begin

        self._again: dict[int, float] = {}
        for steps in by_rank.values():
            seen = set()
            for step in steps:
                if step.lease < 0 and step.step in seen:
                    self._again[step.step] = max(self._again.get(step.step, -math.inf), step_began_s(step))
                seen.add(step.step)

    def counts(self, step: Stepped) -> bool:
        """Tells whether the round was not done again later, by workers that had lost one."""
        return step.lease >= 0 or step.time_s > self._again.get(step.step, -math.inf)

    def inside(self, steps: Iterable[Stepped]) -> list[Stepped]:
        """Returns the steps that ended after the warm-up."""
        return [step for step in steps if step.time_s > self.opens]

    def measured(self, rank: int) -> tuple[float, Sequence[Stepped]]:
        """Returns a worker's steps inside the window, its last if none is, and when the first of them began."""
        steps = self.by_rank[rank]
        inside = self.inside(steps) or steps[-1:]
        before = len(steps) - len(inside)
        return (steps[before - 1].time_s if before else step_began_s(steps[0])), inside


def without(evaluated: Iterable[Evaluated], begin: float, end: float) -> list[tuple[float, float]]:
    """Returns the pieces of the time from `begin` to `end` without an evaluation."""
    pieces = []
    for event in evaluated:
        if begin < event.time_s and event.time_s - event.seconds < end:
            pieces.append((begin, event.time_s - event.seconds))
            begin = event.time_s
    return [*pieces, (begin, end)]


def step_began_s(step: Stepped) -> float:
    """Returns when a worker's step began, on the run's clock."""
    return step.time_s - (step.wait_s + step.compute_s + step.exchange_s + step.update_s)


CURVE_POINTS = 400
"""Most points of a loss curve."""


SMOOTH = 20
"""A loss curve is shown as the mean over this part (1/20) of its points around each."""


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the centred mean of the second numbers, over fewer points at both ends."""
    reach = len(points) // (2 * SMOOTH)
    result = []
    for index, (x, _) in enumerate(points):
        half = min(reach, index)
        near = points[index - half : index + half + 1]
        result.append((x, sum(y for _, y in near) / len(near)))
    return result


@dataclass(frozen=True)
class LossPoint:
    """A point of the loss curve: the weighted mean over the workers and over consecutive steps.

    `examples` and `seconds` (without evaluations) are those of the training so far.
    """

    examples: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation; `seconds` and `epochs` are those of the training before it, `took_s` its own duration."""

    step: int
    epochs: float
    seconds: float
    metrics: Mapping[str, float]
    took_s: float


@dataclass(frozen=True)
class Curves:
    """The loss, at most `CURVE_POINTS` points without steps whose loss is not finite, and the evaluations in order.

    `first_loss` is of the first round, the untrained model's. Where sets of parameters take turns, each has a loss of
    its own in `set_losses`, and there is no other.
    """

    loss: tuple[LossPoint, ...]
    evaluations: tuple[EvaluationPoint, ...]
    first_loss: float | None = None
    set_losses: Mapping[str, tuple[LossPoint, ...]] = field(default_factory=dict)


def logged_curves(event: ValuesLogged) -> dict[str, float]:
    """Returns numbers by the names of their curves; those of another rank than 0 end in "/rank-1"."""
    of_rank = f"/rank-{event.rank}" if event.rank else ""
    return {f"{name}{of_rank}": value for name, value in event.values.items()}


def rank_of(curve: str) -> tuple[str, str]:
    """Returns the name of a logged number, and which rank's it is: "drift", "rank 1" of "drift/rank-1"."""
    name, rank, number = curve.rpartition("/rank-")
    return (name, f"rank {number}") if rank and number.isdecimal() else (curve, "rank 0")


def numbers_of(events: Iterable[ValuesLogged]) -> Mapping[str, tuple[tuple[int, float], ...]]:
    """Returns the numbers that a run has logged by curve: after so many rounds, which number."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for event in events:
        for name, value in logged_curves(event).items():
            found[name].append((event.step, value))
    return {name: tuple(points) for name, points in sorted(found.items())}


def curves_of(
    steps: Iterable[Stepped], evaluated: Iterable[Evaluated], clock: TrainingClock, examples_per_epoch: int
) -> Curves:
    """Returns the curves of the steps of all workers and of the evaluations."""
    rounds: dict[int, _Round] = defaultdict(_Round)
    for step in steps:
        rounds[step.step].add(step)
    order = sorted(rounds)
    seen = list(accumulate((rounds[index].examples for index in order), initial=0))
    # Workers that run ahead finish a later step before others an earlier one; the curve goes forward only.
    times = list(accumulate((rounds[index].time_s for index in order), max))
    by_set: dict[str, list[int]] = defaultdict(list)
    for place, index in enumerate(order):
        by_set[rounds[index].turn].append(place)
    losses: dict[str, tuple[LossPoint, ...]] = {}
    for name, places in by_set.items():
        width = max(1, math.ceil(len(places) / CURVE_POINTS))
        points = []
        for start in range(0, len(places), width):
            chosen = places[start : start + width]
            piece = [rounds[order[place]] for place in chosen]
            weight = math.fsum(each.weight for each in piece)
            if weight > 0:
                mean = math.fsum(each.loss for each in piece) / weight
                points.append(LossPoint(seen[chosen[-1] + 1], clock.until(times[chosen[-1]]), mean))
        losses[name] = tuple(points)
    loss = losses.pop("", ())
    evaluations = []
    for event in evaluated:
        epochs = seen[bisect_left(order, event.step)] / examples_per_epoch if examples_per_epoch else 0.0
        point = EvaluationPoint(event.step, epochs, clock.until(event.time_s), event.metrics, event.seconds)
        evaluations.append(point)
    begun = rounds[order[0]] if order and not losses else _Round()
    return Curves(loss, tuple(evaluations), begun.loss / begun.weight if begun.weight > 0 else None, losses)


@dataclass
class _Round:
    """The steps of one index, of all workers, added up."""

    examples: int = 0
    time_s: float = 0.0
    loss: float = 0.0
    weight: float = 0.0
    turn: str = ""

    def add(self, step: Stepped) -> None:
        self.turn = step.turn
        self.examples += step.examples
        self.time_s = max(self.time_s, step.time_s)
        if step.loss is not None and math.isfinite(step.loss):
            self.loss += step.loss * step.weight
            self.weight += step.weight


@dataclass(frozen=True)
class AveragingSummary:
    """The meetings of a run in order, at least one; what a later attempt repeated counts once."""

    meetings: tuple[ParametersAveraged, ...]

    @property
    def last(self) -> ParametersAveraged:
        return self.meetings[-1]

    @property
    def mean_exchange_s(self) -> float:
        return fmean(each.exchange_s for each in self.meetings)

    @property
    def mean_rounds(self) -> float:
        return fmean(each.rounds for each in self.meetings)

    @property
    def mean_drift(self) -> float:
        return fmean(each.drift for each in self.meetings)

    @property
    def furthest(self) -> ParametersAveraged:
        return max(self.meetings, key=lambda each: each.drift)

    @property
    def left_out(self) -> Mapping[int, int]:
        """Rank to the number of its copies that were not finite and were left out."""
        return dict(sorted(Counter(rank for each in self.meetings for rank in each.left_out).items()))


@dataclass(frozen=True)
class BalanceSummary:
    """How a batch was split: from which step on, into how many examples by worker; what was repeated counts once."""

    splits: tuple[tuple[int, tuple[int, ...]], ...]
    steps: int

    @property
    def last(self) -> tuple[int, ...]:
        """The last sizes."""
        return self.splits[-1][1]


def balance_of(attempts: Sequence[Attempt]) -> BalanceSummary | None:
    """Returns how a batch was split; None for a run whose shares never changed."""
    balanced = [list(of_kind(SharesBalanced, attempt.events)) for attempt in attempts]
    if not any(balanced):
        return None
    splits: dict[int, tuple[int, ...]] = {}
    for attempt, events in zip(attempts, balanced, strict=True):
        started = attempt.started
        splits = {step: sizes for step, sizes in splits.items() if step < started.resumed_step}
        splits[started.resumed_step] = split(started.global_batch_size, (1,) * started.workers)
        splits |= {each.step: each.sizes for each in events if each.sizes}
    steps = 1 + max((each.step for each in of_kind(Stepped, attempts[-1].events)), default=0)
    return BalanceSummary(tuple(sorted(splits.items())), steps) if len(set(splits.values())) > 1 else None


def averaging_of(attempts: Sequence[Attempt]) -> AveragingSummary | None:
    """Returns the meetings of a run; None where there were none."""
    meetings: list[ParametersAveraged] = []
    for attempt in attempts:
        # Any later attempt may go back further than the one before it.
        meetings = [each for each in meetings if each.step <= attempt.started.resumed_step]
        meetings += _merged(list(of_kind(ParametersAveraged, attempt.events)))
    return AveragingSummary(tuple(meetings)) if meetings else None


def _merged(events: Sequence[ParametersAveraged]) -> list[ParametersAveraged]:
    """Returns one event a meeting; where each worker wrote one, that with the largest drift."""
    meetings: dict[int, list[ParametersAveraged]] = {}
    for each in events:
        # The event of one worker for all has the number 0.
        meetings.setdefault(each.meeting or -1 - len(meetings), []).append(each)
    merged = []
    for every in meetings.values():
        furthest = max(every, key=lambda each: each.drift)
        left_out = tuple(sorted({rank for each in every for rank in each.left_out}))
        merged.append(replace(furthest, exchange_s=fmean(each.exchange_s for each in every), left_out=left_out))
    return merged
