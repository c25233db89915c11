"""What probes try: a model, some examples of the job's data, and the objective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from headrace.batches import examples_of
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import trial
from headrace.training.user_code.untouched import untouched
from headrace.training.whole_model import cut


@dataclass(frozen=True)
class Sample:
    """A model with at least two examples and the objective; a probe leaves all as they were."""

    module: nn.Module
    batch: Any
    objective: Objective

    @cached_property
    def count(self) -> int:
        """How many examples there are."""
        return examples_of(self.batch)

    def part(self, low: int, high: int) -> Any:
        """Returns some of the examples as a batch."""
        return cut(self.batch, low, high, self.count, "a probe")

    def halves(self) -> tuple[Sample, Sample]:
        """Returns two samples of equally many examples."""
        half = self.count // 2
        one, other = (replace(self, batch=self.part(low, low + half)) for low in (0, half))
        return one, other

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Runs without gradients; afterwards the model, the loss and all generators are as they were."""
        with trial(self.module), untouched(self.objective.loss):
            yield
