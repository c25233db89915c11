"""How far a script is in its loaders, and whether the next step of its optimizers is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LoopProgress:
    """What the parts of an Accelerator know in common.

    Attributes:
        steps: backward passes before a step of the optimizers.
        sync_gradients: whether the current pass is the last before a step.
        passes: of `accumulate`, since a loader's last batch.
        loaders: those that are iterated over now, the innermost last.
        resumed: what sets the random numbers that were loaded; they go on where batches are no longer skipped.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.sync_gradients = True
        self.loaders: list[Any] = []
        self.resumed: list[Callable[[], None]] = []
        self.passes = 0

    @property
    def is_last_batch(self) -> bool:
        """Whether the innermost loader has given its last batch."""
        return bool(self.loaders) and bool(self.loaders[-1].end_of_dataloader)

    def resume(self) -> None:
        """Lets random numbers go on as they were saved, once."""
        while self.resumed:
            self.resumed.pop()()

    def begin_pass(self) -> None:
        """Counts a pass of `accumulate`; a loader's last batch ends what is accumulated."""
        if self.is_last_batch:
            self.passes = 0
            self.sync_gradients = True
        else:
            self.passes += 1
            self.sync_gradients = self.passes % self.steps == 0
