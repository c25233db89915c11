"""A mean that some workers cannot spoil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.aggregation.gradients import GradientAggregation, Workers
from headrace.errors import UsageError


@dataclass(frozen=True)
class TrimmedMean(GradientAggregation):
    """Leaves out of each element the largest and the smallest values of the workers, and takes the mean of the others.

    Yin et al., "Byzantine-robust distributed learning", 2018, definition 2; with a half of the workers at each end it
    is definition 1, the median. Up to `trim` workers may send what they want. What counts of a worker is the gradient
    of its part of the batch, times the number of workers; those without an example do not count.

    Attributes:
        trim: how many values at each end; None for all but the middle one, or the middle two: the median.

    Raises:
        UsageError: the number is negative, or leaves no worker.

    Examples:
        >>> hr.fit(job, hr.Aggregated(workers=3, by=hr.TrimmedMean())).status
        'ok'
    """

    trim: int | None = None

    def __post_init__(self) -> None:
        known = self.trim is None or (isinstance(self.trim, int) and not isinstance(self.trim, bool) and self.trim >= 0)
        if not known:
            raise UsageError(f"trim must be a whole number of at least 0, or None for the median, got {self.trim!r}")

    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: Workers
    ) -> Sequence[Tensor]:
        counted = workers.with_examples()
        every = workers.gather(gradients)
        trim = (len(counted) - 1) // 2 if self.trim is None else self.trim
        if 2 * trim >= len(counted):
            raise UsageError(
                f"trim={trim} leaves out {2 * trim} of {len(counted)} workers; use more workers, or a smaller trim"
            )
        columns = zip(*(every[rank] for rank in counted), strict=True)
        return [
            torch.stack(column).sort(0).values[trim : len(counted) - trim].mean(0).mul_(len(counted))
            for column in columns
        ]

    def traffic(self, workers: int) -> float:
        # All workers' gradients come to each, where a sum comes twice.
        return workers / 2
