"""What a rule of one's own for gradients is: the base class, and how it reaches the other workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from headrace.collectives.base import Collective, ProcessGroup
from headrace.trees import as_bytes


class WorkerGroup:
    """All workers, as one of them reaches the others. Every worker makes the same calls in the same order.

    Attributes:
        rank, count: this worker's number, and how many there are.
        sent_bytes: payload that this worker has given to `sum` and `gather` so far.
        idle: whether this worker has no example of this round's batch.
    """

    def __init__(self, collective: Collective, group: ProcessGroup, place: torch.device) -> None:
        self.rank, self.count, self.sent_bytes = group.rank, group.world, 0
        self.idle = False
        self._collective, self._group, self._place = collective, group, place

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sum over workers of each tensor, in new memory and the same bits on all; one operation a type."""
        sums = list(tensors)
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            chosen = [index for index, each in enumerate(tensors) if each.dtype == dtype]
            total = torch.cat([tensors[index].reshape(-1) for index in chosen]).to(self._place)
            self.sent_bytes += total.nbytes
            self._collective.all_reduce(total)
            for index, part in zip(chosen, total.split([tensors[index].numel() for index in chosen]), strict=True):
                sums[index] = part.view(tensors[index].shape).to(tensors[index].device)
        return sums

    def gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns every worker's tensors, by rank; each is of the same shape and type on all workers."""
        pieces = [as_bytes(each.contiguous().to(self._place)).view(-1) for each in tensors]
        own = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
        self.sent_bytes += own.nbytes
        every = self._collective.gather(own) if own.nbytes else own.new_empty(self.count, 0)
        sizes = [each.nbytes for each in pieces]
        return [
            [
                part.clone().view(each.dtype).view(each.shape).to(each.device)
                for part, each in zip(row.split(sizes), tensors, strict=True)
            ]
            for row in every
        ]

    def with_examples(self) -> list[int]:
        """Returns the ranks that have an example of this round's batch; the gradients of the others are 0."""
        every = self._group.gather_numbers([float(not self.idle)])
        return [rank for rank, (busy,) in enumerate(every) if busy]


class GradientAggregation(ABC):
    """A rule by which the workers' gradients become one: what each sends, and what it makes of what all have sent.

    A subclass is a frozen dataclass of its options, without other attributes: what it must have again in the next round
    is in `state`.

    Attributes:
        own_state: names of tensors that each worker has for itself, one of each for every parameter: a residual. They
            are saved by each rank, and read by the same rank.
        common_state: names of tensors that are the same on all workers, saved once.

    Examples:
        >>> import torch
        >>> class Doubled(hr.GradientAggregation):
        ...     def aggregate(self, gradients, state, workers):
        ...         return [2 * total for total in workers.sum(gradients)]
        >>> hr.fit(job, hr.Aggregated(workers=2, by=Doubled())).status
        'ok'
    """

    own_state: ClassVar[tuple[str, ...]] = ()
    common_state: ClassVar[tuple[str, ...]] = ()

    def begin(self, like: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Returns the state of a parameter at the begin, by name: zeros of the gradient's shape if not overridden.

        Args:
            like: a contiguous tensor of the gradient's shape, type and device.
            generator: draws the same numbers on all workers, on the host; it is seeded with the job's seed.
        """
        return {name: torch.zeros_like(like) for name in (*self.own_state, *self.common_state)}

    @abstractmethod
    def aggregate(
        self, gradients: Sequence[Tensor], state: Sequence[dict[str, Tensor]], workers: WorkerGroup
    ) -> Sequence[Tensor]:
        """Returns the gradients that every worker's optimizer gets: the same bits on all workers.

        Args:
            gradients: this worker's, of the parameters that the loss of any worker depends on, `(parameters)`. Each is
                weighed by the worker's part of the batch, so that their sum over workers is the batch's gradient.
                They may be changed in place, and are contiguous, finite and not empty.
            state: what is kept of each of these parameters, by name; to be changed, or replaced by tensors of the same
                shape.
            workers: sums and gathers.
        """

    def traffic(self, workers: int) -> float | None:
        """Returns what a worker sends and receives, as a part of what an all-reduce of the gradients moves.

        None where that depends on the model's shapes; the strategy is then not simulated.
        """
        return None
