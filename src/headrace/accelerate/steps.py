"""An optimizer and a schedule that wait while gradients are accumulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from headrace.accelerate.progress import LoopProgress


class PreparedOptimizer(torch.optim.Optimizer):
    """Steps, and sets gradients to zero, in the last pass of those that are accumulated.

    Attributes:
        optimizer: the script's own, whose groups and state these are.
        step_was_skipped: False; without a scaler of gradients no step is.
    """

    step_was_skipped = False

    def __init__(self, optimizer: torch.optim.Optimizer, progress: LoopProgress) -> None:
        # Not that of the base: it would make groups and state of its own.
        self.optimizer, self._progress = optimizer, progress

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._progress.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure) if self._progress.sync_gradients else None


class PreparedScheduler:
    """Steps once for each process with each step of the optimizers, as the schedule of Accelerate counts batches.

    With `split_batches=True` it steps once: batches are those of one process then.
    """

    def __init__(self, scheduler: Any, progress: LoopProgress, times: int | None, with_optimizer: bool) -> None:
        self.scheduler = scheduler
        self._progress, self._times, self._with_optimizer = progress, times, with_optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **named: Any) -> None:
        """Takes the steps, but none while gradients are accumulated."""
        if not self._with_optimizer or (self._times is None and self._progress.sync_gradients):
            self.scheduler.step(*arguments, **named)
            return
        for _ in range(self._times or 0 if self._progress.sync_gradients else 0):
            # The steps of a batch that completes an epoch may be more than a schedule has.
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*arguments, **named)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Yields the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
