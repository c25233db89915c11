"""The sum of all workers' gradients: in shared memory, or by a collective of the devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.errors import UsageError
from headrace.training.gradients import FlatGradients, FlatLayout, GradientSink, UsedParameters


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


BUCKET_BYTES = 25 << 20
"""As DDP's: large enough for the wire's full speed, small enough to begin early."""


class OverlappedGradients:
    """Takes each gradient when autograd has made it, and starts a bucket's all-reduce when it is whole.

    Buckets leave in the same order on every worker, whatever the order in which their gradients come. A
    parameter without a gradient holds its bucket back until the pass is over.

    Args:
        module: the model, whose trainable parameters are those of the layout, in order.
        layout: places of the gradients.
        region: `(layout.nbytes,)` uint8, on the model's device.
        presence: told what exists.
        wire: of all workers.
        bucket_bytes: when a bucket is full.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        region: Tensor,
        presence: UsedParameters,
        wire: Collective,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._views = layout.views(region)
        self._presence = presence
        self._wire = wire
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        runs = buckets(sizes, bucket_bytes)
        self._bucket_of = [0] * len(parameters)
        self._flats: list[list[Tensor]] = []
        for number, (start, stop) in enumerate(runs):
            self._bucket_of[start:stop] = [number] * (stop - start)
            self._flats.append(layout.runs(region, start, stop))
        self._sizes = [stop - start for start, stop in runs]
        self._lacking = list(self._sizes)
        self._arrived = [False] * len(parameters)
        self._sent = 0
        self._waits: list[Callable[[], None]] = []
        for index, parameter in enumerate(parameters):
            parameter.register_hook(partial(self._take, index))

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self._presence.publish(gradients)
        for index, arrived in enumerate(self._arrived):
            gradient = gradients[index]
            if not arrived and gradient is not None:
                self._views[index].copy_(gradient)
            elif gradient is None:
                self._views[index].zero_()
        self._finish()

    def store_nothing(self) -> None:
        self._presence.publish_nothing()
        for view in self._views:
            view.zero_()
        self._finish()

    def wait(self) -> None:
        """Returns when every bucket's sum is there."""
        for wait in self._waits:
            wait()
        self._waits.clear()

    def _take(self, index: int, gradient: Tensor) -> None:
        self._views[index].copy_(gradient)
        self._arrived[index] = True
        self._lacking[self._bucket_of[index]] -= 1
        while self._sent < len(self._lacking) and self._lacking[self._sent] == 0:
            self._send()

    def _send(self) -> None:
        self._waits += [self._wire.start_all_reduce(flat) for flat in self._flats[self._sent]]
        self._sent += 1

    def _finish(self) -> None:
        while self._sent < len(self._lacking):
            self._send()
        self._sent = 0
        self._lacking[:] = self._sizes
        self._arrived[:] = [False] * len(self._arrived)


def buckets(sizes: Sequence[int], bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns runs `(start, stop)` of parameter indices, in the order in which their gradients are ready.

    Backward runs from the last parameter to the first, so the first bucket ends with the last parameter. A
    bucket closes as soon as it has `bucket_bytes`: each is at least that large, but for the last, which holds
    what is left, and none would still be that large without its own first parameter.

    >>> buckets((40, 10, 10, 30, 5), 20)
    ((3, 5), (1, 3), (0, 1))

    Args:
        sizes: bytes of each parameter, in the model's order.
        bucket_bytes: when a bucket is full.

    Raises:
        UsageError: `bucket_bytes` is below 1.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    runs = []
    stop = len(sizes)
    held = 0
    for start in reversed(range(len(sizes))):
        held += sizes[start]
        if held >= bucket_bytes or start == 0:
            runs.append((start, stop))
            stop, held = start, 0
    return tuple(runs)
