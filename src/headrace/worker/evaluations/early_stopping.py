"""Early stopping: a run ends where its evaluations get no better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.spec.events import ENDS_EARLY
from headrace.spec.options import EarlyStopping


class EarlyStopper:
    """Counts the evaluations without improvement; without the option it never stops the run."""

    def __init__(self, option: EarlyStopping | None) -> None:
        self._option = option
        self._follows = f"{option.mode} {option.metric}" if option else ""
        self._best = math.inf
        self._best_step = 0
        self._waited = 0

    @property
    def over(self) -> bool:
        """Whether the run is to stop."""
        return self._option is not None and self._waited >= self._option.patience

    def see(self, metrics: Mapping[str, float], step: int) -> str | None:
        """Adds an evaluation; returns a notice if the run stops because of it.

        Raises:
            UsageError: the evaluation has no such metric.
        """
        option = self._option
        if option is None:
            return None
        if option.metric not in metrics:
            raise UsageError(
                f"early stopping follows {option.metric!r}, and the evaluation has {', '.join(metrics)} alone"
            )
        sign = 1 if option.mode == "min" else -1
        value = sign * metrics[option.metric]
        # NaN is no improvement.
        if value < self._best - option.min_delta:
            self._best, self._best_step, self._waited = value, step, 0
            return None
        self._waited += 1
        if not self.over:
            return None
        return (
            f"{ENDS_EARLY}{option.metric} has got no better for {option.patience} "
            f"evaluation{'s' * (option.patience != 1)}; "
            f"best {sign * self._best:.4g} after {self._best_step} step{'s' * (self._best_step != 1)}"
        )

    def agree(self, group: ProcessGroup) -> None:
        """Copies the state of the group's first worker, which has seen the most evaluations."""
        own = (self._best if math.isfinite(self._best) else math.nan, self._best_step, self._waited)
        best, step, waited = group.sum(own if group.rank == 0 else [0.0] * len(own))
        self._best = math.inf if math.isnan(best) else best
        self._best_step, self._waited = int(step), int(waited)

    def state(self) -> dict[str, float | str | None]:
        """Returns the state as JSON values."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "best_step": self._best_step, "waited": self._waited, "follows": self._follows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what `state` returned, if the option is the same."""
        if state["follows"] != self._follows:
            return
        self._best = math.inf if state["best"] is None else float(state["best"])
        self._best_step, self._waited = int(state["best_step"]), int(state["waited"])
