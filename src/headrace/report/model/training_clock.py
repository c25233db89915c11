"""Training time: which part of a run's wall time rates and step times are taken from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.spec.events import Evaluated, Stepped

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
    """Training time: from the first step of an attempt to its last, evaluations cut out, all attempts together.

    Args:
        attempts: each attempt's steps, by rank.
        evaluated: of all attempts, by time.
    """

    def __init__(self, attempts: Iterable[Mapping[int, Sequence[Stepped]]], evaluated: Sequence[Evaluated]) -> None:
        self._windows = tuple(_Window(by_rank) for by_rank in attempts if by_rank)
        self._spans = tuple(span for window in self._windows for span in _without(evaluated, window.begin, window.end))

    def between(self, start: float, stop: float) -> float:
        """Seconds of training from `start` to `stop`."""
        overlaps = (min(end, stop) - max(begin, start) for begin, end in self._spans)
        return math.fsum(overlap for overlap in overlaps if overlap > 0)

    @property
    def seconds(self) -> float:
        """Seconds of training in all."""
        return self.until(math.inf)

    def until(self, time_s: float) -> float:
        """Seconds of training before a time."""
        return self.between(-math.inf, time_s)

    def rate(self) -> float | None:
        """Examples of all workers' steps that ended inside the windows, over their length; None without a step."""
        seconds = sum(self.between(window.opens, window.end) for window in self._windows)
        inside = [
            step for window in self._windows for steps in window.by_rank.values() for step in window.inside(steps)
        ]
        return sum(step.examples for step in inside) / seconds if inside and seconds > 0 else None

    def times(self, *ranks: int) -> StepTimes:
        """Returns the mean step of these workers, each of which has done one."""
        steps: list[Stepped] = []
        wall = 0.0
        for window in self._windows:
            for rank in (rank for rank in ranks if rank in window.by_rank):
                start, inside = window.measured(rank)
                wall += self.between(start, inside[-1].time_s)
                steps += inside
        wait, compute, exchange, update = (
            math.fsum(getattr(step, part) for step in steps) / len(steps)
            for part in ("wait_s", "compute_s", "exchange_s", "update_s")
        )
        return StepTimes(
            wait, compute, exchange, update, max(0.0, wall / len(steps) - wait - compute - exchange - update)
        )


class _Window:
    """One attempt's steps; the window opens when the last worker is warm, and closes with the last step of all."""

    def __init__(self, by_rank: Mapping[int, Sequence[Stepped]]) -> None:
        self.by_rank = by_rank
        self.begin = min(_began(steps[0]) for steps in by_rank.values())
        self.end = max(steps[-1].time_s for steps in by_rank.values())
        warm_up = min(WARM_UP_STEPS, *(len(steps) // 2 for steps in by_rank.values()))
        self.opens = max(steps[warm_up - 1].time_s for steps in by_rank.values()) if warm_up else self.begin

    def inside(self, steps: Iterable[Stepped]) -> list[Stepped]:
        """Those of the steps that ended after the warm-up."""
        return [step for step in steps if step.time_s > self.opens]

    def measured(self, rank: int) -> tuple[float, Sequence[Stepped]]:
        """Returns a worker's steps inside the window, its last if none is, and when the first of them began."""
        steps = self.by_rank[rank]
        inside = self.inside(steps) or steps[-1:]
        before = len(steps) - len(inside)
        return (steps[before - 1].time_s if before else _began(steps[0])), inside


def _without(evaluated: Iterable[Evaluated], begin: float, end: float) -> list[tuple[float, float]]:
    """Returns the pieces of the time from `begin` to `end` in which nothing was evaluated."""
    pieces = []
    for event in evaluated:
        if begin < event.time_s and event.time_s - event.seconds < end:
            pieces.append((begin, event.time_s - event.seconds))
            begin = event.time_s
    return [*pieces, (begin, end)]


def _began(step: Stepped) -> float:
    return step.time_s - (step.wait_s + step.compute_s + step.exchange_s + step.update_s)
