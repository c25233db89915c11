"""signSGD: each worker sends the signs of its gradient, and the majority decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.errors import UsageError


@dataclass(frozen=True)
class SignSGD(GradientAggregation):
    """Sends one bit an element; the gradient becomes 1, -1, or 0 where as many workers vote for one as for the other.

    Bernstein et al., "signSGD: compressed optimisation for non-convex problems", 2018, algorithm 3 (majority vote), and
    Signum with a momentum: each worker votes by the sign of its moving average. The learning rate is the length of a
    step in every element: take 1e-4 to 1e-2 with plain SGD. An element that is 0 votes for 1, as there; workers
    without an example do not vote.

    Attributes:
        momentum: how much of the moving average stays; 0 for the gradient itself.

    Raises:
        UsageError: the momentum is out of its range.

    Examples:
        >>> hr.fit(job, hr.Aggregated(workers=2, by=hr.SignSGD(momentum=0.9))).status
        'ok'
    """

    momentum: float = 0.0

    own_state = ("average",)

    def __post_init__(self) -> None:
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise UsageError(f"momentum must be a number of at least 0 and below 1, got {self.momentum!r}")

    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: WorkerGroup
    ) -> Sequence[Tensor]:
        votes = []
        for gradient, kept in zip(gradients, state, strict=True):
            average = kept["average"]
            if not workers.idle:
                average.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
            votes.append(packed(average >= 0))
        voters = workers.with_examples()
        totals = [torch.zeros_like(each) for each in gradients]
        for rank, theirs in enumerate(workers.gather(votes)):
            for total, bits in zip(totals, theirs, strict=True) if rank in voters else ():
                total.add_(unpacked(bits, total.numel()).view_as(total).to(total.dtype).mul_(2).sub_(1))
        return [total.sign_() for total in totals]

    def traffic(self, workers: int) -> float:
        # One bit of 32; all workers' come to each, where a sum comes twice.
        return workers / 64


def packed(bits: Tensor) -> Tensor:
    """Returns bools of any shape as bits, `(ceil(elements / 8),)` uint8; the first is the lowest bit of the first byte.

    >>> packed(torch.tensor([True, False, True])).tolist()
    [5]
    """
    flat = torch.nn.functional.pad(bits.reshape(-1).to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpacked(data: Tensor, elements: int) -> Tensor:
    """Returns the bools of so many bits, `(elements,)`."""
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, None] >> places) & 1).view(-1)[:elements].bool()
