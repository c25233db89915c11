"""What changed over a run: loss and evaluations, against the work done and against time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from headrace.report.model.training_clock import TrainingClock
from headrace.spec.events import Evaluated, Stepped

CURVE_POINTS = 400
"""Most points of a loss curve."""


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


def curves_of(
    steps: Iterable[Stepped], evaluated: Iterable[Evaluated], clock: TrainingClock, examples_per_epoch: int
) -> Curves:
    """Returns what the steps of all workers, and the evaluations, say over time."""
    rounds: dict[int, _Round] = defaultdict(_Round)
    for step in steps:
        rounds[step.step].add(step)
    order = sorted(rounds)
    seen = list(accumulate((rounds[index].examples for index in order), initial=0))
    # Workers that run ahead finish a later step before others an earlier one; the curve goes forward only.
    times = list(accumulate((rounds[index].time_s for index in order), max))
    width = max(1, math.ceil(len(order) / CURVE_POINTS))
    loss = []
    for start in range(0, len(order), width):
        stop = min(start + width, len(order))
        piece = [rounds[index] for index in order[start:stop]]
        weight = math.fsum(each.weight for each in piece)
        if weight > 0:
            mean = math.fsum(each.loss for each in piece) / weight
            loss.append(LossPoint(seen[stop], clock.until(times[stop - 1]), mean))
    return Curves(
        loss=tuple(loss),
        evaluations=tuple(
            EvaluationPoint(
                step=event.step,
                epochs=seen[bisect_left(order, event.step)] / examples_per_epoch if examples_per_epoch else 0.0,
                seconds=clock.until(event.time_s),
                metrics=event.metrics,
                took_s=event.seconds,
            )
            for event in evaluated
        ),
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
