"""The sum of all workers' gradients: in shared memory, or by a collective of the devices."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.training.flat_layout import FlatLayout
from headrace.training.gradients import FlatGradients, GradientSink, UsedParameters
from headrace.training.overlap import OverlappedGradients


def shared_traffic(gradient_bytes: int, workers: int) -> int:
    """Returns the bytes that a worker writes for others and reads from them, where each sums 1/N of the rest's.

    It writes its gradients but its own part, reads that part of the others', writes the sum of it, and reads
    the other parts' sums: 3 (N - 1)/N + 1/N.
    """
    return gradient_bytes * (3 * workers - 2) // workers if workers > 1 else 0


class Reduction(ABC):
    """Sums the workers' flat gradients.

    Attributes:
        sink: takes this worker's.
        result: where the sum appears, `(nbytes,)` uint8.
        held: what this rank changes of the sum, where it is to be changed on all.
        measured: what this rank looks at; all ranks together look at every element once.
    """

    sink: GradientSink
    result: Tensor
    held: list[Tensor]
    measured: list[Tensor]

    @abstractmethod
    def reduce(self) -> None:
        """Sums; all workers' gradients are there."""


class SharedMemoryReduction(Reduction):
    """Through shared memory: each rank sums its part, in rank order; the result is one for all.

    Args:
        layout: places of the gradients.
        presence: told which exist.
        group: the workers of this host.
    """

    def __init__(self, layout: FlatLayout, presence: UsedParameters, group: ProcessGroup) -> None:
        regions = group.share(layout.nbytes)
        self._group = group
        own = regions[group.rank]
        self.sink = FlatGradients(layout, own, presence)
        self.result = own if group.world == 1 else group.share(0 if group.rank else layout.nbytes)[0]
        parts = [span.part(group.rank, group.world) for span in layout.spans]
        self.held = self.measured = [part.of(self.result) for part in parts]
        self._sources = [[part.of(region) for region in regions] for part in parts]
        self._traffic = shared_traffic(layout.nbytes, group.world)

    def reduce(self) -> None:
        if self._group.world > 1:
            for total, sources in zip(self.held, self._sources, strict=True):
                torch.add(sources[0], sources[1], out=total)
                for source in sources[2:]:
                    total.add_(source)
        self._group.moved_bytes += self._traffic


class CollectiveReduction(Reduction):
    """By a collective of the devices, when backward is over.

    Args:
        layout: places of the gradients.
        presence: told which exist.
        wire: of all workers.
        device: where gradients live.
    """

    def __init__(self, layout: FlatLayout, presence: UsedParameters, wire: Collective, device: torch.device) -> None:
        self._wire = wire
        self.result = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        self.sink = FlatGradients(layout, self.result, presence)
        self.held = [span.of(self.result) for span in layout.spans]
        self.measured = [] if wire.rank else self.held

    def reduce(self) -> None:
        for total in self.held:
            self._wire.all_reduce(total)


class OverlappedReduction(Reduction):
    """By a collective of the devices, bucket by bucket, while backward still runs.

    Args:
        layout: places of the gradients.
        presence: told which exist.
        wire: of all workers.
        module: the model.
    """

    def __init__(self, layout: FlatLayout, presence: UsedParameters, wire: Collective, module: nn.Module) -> None:
        device = next(module.parameters()).device
        self.result = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        self.sink = self._sink = OverlappedGradients(module, layout, self.result, presence, wire)
        self.held = [span.of(self.result) for span in layout.spans]
        self.measured = [] if wire.rank else self.held

    def reduce(self) -> None:
        self._sink.wait()
