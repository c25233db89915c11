"""Means over workers that some of them cannot spoil: of gradients, or of parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.errors import UsageError


class WorkerMean(GradientAggregation):
    """A mean over workers, element by element, in the place of the weighted one.

    It is a rule of `Aggregated`, and the `mean` of `ParameterServer` with `staleness_bound=0` and of
    `ParameterAveraging`, where servers or workers apply it to pieces that may begin and end within a parameter. As a
    rule, what counts of a worker is the gradient of its part of the batch, times the number of workers; one without an
    example does not count.

    Examples:
        >>> class Largest(hr.WorkerMean):
        ...     def mean(self, values, weights):
        ...         return torch.stack(list(values)).amax(0)
        >>> hr.fit(job, hr.ParameterAveraging(workers=2, period=2, mean=Largest())).status
        'ok'
    """

    @abstractmethod
    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Returns a tensor like each of the values, one of each worker that counts; the weights add up to 1."""

    def fewest(self) -> int:
        """Returns how many workers it needs."""
        return 1

    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: WorkerGroup
    ) -> Sequence[Tensor]:
        counted, every = workers.with_examples(), workers.gather(gradients)
        count = len(counted)
        columns = zip(*(every[rank] for rank in counted), strict=True)
        return [self.mean([each.mul_(count) for each in column], [1 / count] * count) for column in columns]

    def traffic(self, workers: int) -> float:
        # All workers' gradients come to each, where a sum comes twice.
        return workers / 2


@dataclass(frozen=True)
class TrimmedMean(WorkerMean):
    """Leaves out of each element the largest and the smallest values of the workers, and takes the mean of the others.

    Yin et al., "Byzantine-robust distributed learning", 2018, definition 2; with a half of the workers at each end it
    is definition 1, the median. Up to `trim` workers may send what they want. All workers weigh the same. Where fewer
    workers count than it needs, as in a short batch, it is their median.

    Attributes:
        trim: how many values at each end; None for all but the middle one, or the middle two: the median.

    Raises:
        UsageError: the number is negative.

    Examples:
        >>> hr.fit(job, hr.Aggregated(workers=3, by=hr.TrimmedMean())).status
        'ok'
    """

    trim: int | None = None

    def __post_init__(self) -> None:
        known = self.trim is None or (isinstance(self.trim, int) and not isinstance(self.trim, bool) and self.trim >= 0)
        if not known:
            raise UsageError(f"trim must be a whole number of at least 0, or None for the median, got {self.trim!r}")

    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        most = (len(values) - 1) // 2
        trim = most if self.trim is None else min(self.trim, most)
        return torch.stack(list(values)).sort(0).values[trim : len(values) - trim].mean(0)

    def fewest(self) -> int:
        return 2 * (self.trim or 0) + 1
