"""Where the time of a run's steps went so far, by worker, and what limits their speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.report.model.bottleneck import Bottleneck, bottleneck_of
from headrace.report.model.inputs import InputSummary
from headrace.report.model.training import WARM_UP_STEPS, StepTimes
from headrace.spec.events import Evaluated, Event, InputStats, RunStarted
from headrace.watch.steps import Floats, Steps

_MOST_RANKS = 1024
_COMPUTE, _EXCHANGE, _UPDATE, _WAIT, _BETWEEN, _COUNT = range(6)


class StepSums:
    """Sums over the steps of each worker, without its first ones and without evaluations, and its last input event."""

    def __init__(self) -> None:
        self._sums: dict[int, Floats] = {}
        self._fed: dict[int, InputStats] = {}
        self._paused_s = 0.0

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether it is of the input or an evaluation."""
        match event:
            case InputStats() if len(self._fed) < _MOST_RANKS or event.rank in self._fed:
                before = self._fed.get(event.rank, event)
                self._fed[event.rank] = max(before, event, key=lambda each: each.time_s)
            case Evaluated():
                self._paused_s += max(0.0, event.seconds)
            case _:
                return False
        return True

    def add_steps(self, steps: Steps) -> None:
        """Takes steps."""
        steps = steps.chosen(steps.step >= WARM_UP_STEPS)
        between = np.where(np.isfinite(steps.before_s), np.maximum(0.0, steps.began_s - steps.before_s), 0.0)
        values = np.column_stack((steps.spent_s, between, np.ones(len(steps))))
        for rank in np.unique(steps.rank).tolist():
            if rank in self._sums or len(self._sums) < _MOST_RANKS:
                own = values[steps.rank == rank].sum(axis=0)
                self._sums[rank] = self._sums.get(rank, np.zeros(_COUNT + 1)) + own

    def bottleneck(self, started: RunStarted | None) -> Bottleneck | None:
        """Returns what limits the run's speed; None where that is not known, as of stages and without input events."""
        if not self._fed or started is None or started.plan.get("partition"):
            return None
        return bottleneck_of(self._times(), InputSummary(dict(sorted(self._fed.items()))), started)

    def message(self) -> dict[str, Any]:
        """Returns the seconds of each worker's mean step, in the order of their parts."""
        times = self._times()
        return {"ranks": list(times), "seconds": [list(vars(each).values()) for each in times.values()]}

    def _times(self) -> dict[int, StepTimes]:
        found = {}
        for rank, sums in sorted(self._sums.items()):
            sums = sums.copy()
            sums[_BETWEEN] = max(0.0, sums[_BETWEEN] - self._paused_s)
            mean = (sums / sums[_COUNT]).tolist()
            order = (_WAIT, _COMPUTE, _EXCHANGE, _UPDATE, _BETWEEN)
            found[rank] = StepTimes(*(mean[part] for part in order))
        return found
