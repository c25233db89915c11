"""Top-k: each worker sends the elements of its gradient that are largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.errors import UsageError


@dataclass(frozen=True)
class TopK(GradientAggregation):
    """Sends of each parameter the elements of the largest magnitude, with error feedback.

    Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; Stich et al., "Sparsified SGD with
    memory", 2018, algorithm 1, whose memory has the learning rate in it. What is not sent is added to the next
    gradient. A worker sends 4 bytes of index beside each value.

    Attributes:
        share: of the elements of each parameter, at least one; above 0 and at most 1.

    Raises:
        UsageError: the share is out of its range.

    Examples:
        >>> hr.fit(job, hr.Aggregated(workers=2, by=hr.TopK(share=0.1))).status
        'ok'
    """

    share: float = 0.01

    own_state = ("residual",)

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise UsageError(f"share must be a number above 0 and at most 1, got {self.share!r}")

    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: WorkerGroup
    ) -> Sequence[Tensor]:
        sent: list[Tensor] = []
        for gradient, kept in zip(gradients, state, strict=True):
            residual = kept["residual"].add_(gradient).view(-1)
            indices = residual.abs().topk(max(1, round(self.share * residual.numel())), sorted=False).indices
            sent += residual[indices], indices.to(torch.int32)
            residual[indices] = 0
        totals = [torch.zeros_like(each) for each in gradients]
        for theirs in workers.gather(sent):
            for total, values, indices in zip(totals, theirs[::2], theirs[1::2], strict=True):
                total.view(-1).index_add_(0, indices.long(), values)
        return totals

    def traffic(self, workers: int) -> float:
        # Of float32: a value and an index of 4 bytes each; all workers' come to each, where a sum comes twice.
        return min(1.0, 2 * self.share) * workers / 2
