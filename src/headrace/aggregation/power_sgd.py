"""PowerSGD: gradients of low rank, which are summed as they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.errors import UsageError


@dataclass(frozen=True)
class PowerSGD(GradientAggregation):
    """Sends two thin factors of each matrix, P (n, r) and Q (m, r), with error feedback.

    Vogels et al., "PowerSGD: practical low-rank gradient compression", 2019: algorithm 1, one step of a power
    iteration that begins with the last round's Q, and of algorithm 2 the error feedback; momentum is the optimizer's.
    A tensor of more dimensions is the matrix of its first by all others. Vectors, and matrices that their factors would
    not make smaller, travel as they are. A worker sends r (n + m) of n m elements.

    Attributes:
        rank: r, the columns of the factors.

    Raises:
        UsageError: the rank is no whole number of at least 1.

    Examples:
        >>> hr.fit(job, hr.Aggregated(workers=2, by=hr.PowerSGD(rank=1))).status
        'ok'
    """

    rank: int = 2

    own_state = ("residual",)
    common_state = ("factor",)

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise UsageError(f"rank must be a whole number of at least 1, got {self.rank!r}")

    def begin(self, like: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        if not self._shrinks(like):
            return {name: like.new_zeros(0) for name in ("residual", "factor")}
        columns = like[0].numel()
        factor = torch.randn(columns, self.rank, generator=generator, dtype=torch.float64)
        return {"residual": torch.zeros_like(like), "factor": factor.to(like)}

    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: WorkerGroup
    ) -> Sequence[Tensor]:
        low = [index for index, each in enumerate(gradients) if self._shrinks(each)]
        whole = [index for index in range(len(gradients)) if index not in low]
        wanted = [(gradients[index] + state[index]["residual"]).flatten(1) for index in low]
        factors = [state[index]["factor"] for index in low]
        sums = workers.sum(
            [*(each @ factor for each, factor in zip(wanted, factors, strict=True)), *(gradients[i] for i in whole)]
        )
        # Of 16 bits there is no such decomposition.
        wide = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in sums[: len(low)])
        bases = [torch.linalg.qr(each).Q.to(own.dtype) for each, own in zip(wide, wanted, strict=True)]
        parts = [each.T @ base for each, base in zip(wanted, bases, strict=True)]
        results = dict(zip(whole, sums[len(low) :], strict=True))
        for index, each, base, part, total in zip(low, wanted, bases, parts, workers.sum(parts), strict=True):
            state[index]["residual"].copy_((each - base @ part.T).view_as(gradients[index]))
            state[index]["factor"].copy_(total)
            results[index] = (base @ total.T).view_as(gradients[index])
        return [results[index] for index in range(len(gradients))]

    def _shrinks(self, like: Tensor) -> bool:
        rows = len(like) if like.dim() > 1 else 1
        columns = like.numel() // max(1, rows)
        return rows > 1 and self.rank * (rows + columns) < like.numel()
