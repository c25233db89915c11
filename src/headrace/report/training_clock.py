"""Training time: which part of a run's wall time rates and step times are taken from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.spec.event import Evaluated, Stepped

__all__ = ["WARM_UP_STEPS", "StepTimes", "TrainingClock"]

WARM_UP_STEPS = 5
"""Steps of each worker that rates leave out: allocations, first touches of memory, caches."""


@dataclass(frozen=True)
class StepTimes:
    """Where the mean step's time went, in the window of `Training.examples_per_s`.

    Attributes:
        wait_s, compute_s, exchange_s, update_s: as in `Stepped`; wait: for data.
        other_s: what passed between the steps, evaluations left out.
    """

    wait_s: float
    compute_s: float
    exchange_s: float
    update_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """Wall time of the mean step."""
        return self.wait_s + self.compute_s + self.exchange_s + self.update_s + self.other_s


class TrainingClock:
    """Training time: wall time from the first step on, evaluations cut out."""

    def __init__(self, by_rank: Mapping[int, Sequence[Stepped]], evaluated: Iterable[Evaluated]) -> None:
        self._pauses = tuple((event.time_s - event.seconds, event.time_s) for event in evaluated)
        self.begin = min((_began(steps[0]) for steps in by_rank.values()), default=0.0)
        self.end = max((steps[-1].time_s for steps in by_rank.values()), default=0.0)
        warm_up = min((WARM_UP_STEPS, *(len(steps) // 2 for steps in by_rank.values())))
        self.opens = max(steps[warm_up - 1].time_s for steps in by_rank.values()) if by_rank and warm_up else self.begin

    def between(self, start: float, stop: float) -> float:
        """Seconds from `start` to `stop` without evaluations."""
        pauses = (min(until, stop) - max(since, start) for since, until in self._pauses)
        return stop - start - sum(pause for pause in pauses if pause > 0)

    def inside(self, steps: Iterable[Stepped]) -> list[Stepped]:
        """Those of the steps that ended after the warm-up."""
        return [step for step in steps if step.time_s > self.opens]

    def times(self, steps: Sequence[Stepped]) -> StepTimes:
        inside = self.inside(steps) or steps[-1:]
        before = steps[len(steps) - len(inside) - 1] if len(inside) < len(steps) else None
        start = before.time_s if before else _began(steps[0])
        wall = self.between(start, inside[-1].time_s) / len(inside)
        wait, compute, exchange, update = (
            math.fsum(getattr(step, part) for step in inside) / len(inside)
            for part in ("wait_s", "compute_s", "exchange_s", "update_s")
        )
        return StepTimes(wait, compute, exchange, update, max(0.0, wall - wait - compute - exchange - update))


def _began(step: Stepped) -> float:
    return step.time_s - (step.wait_s + step.compute_s + step.exchange_s + step.update_s)
