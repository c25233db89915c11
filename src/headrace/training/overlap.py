"""Exchange while backward still runs: buckets of gradients leave as soon as they are whole.

    backward    │ layer 4 │ layer 3 │ layer 2 │ layer 1 │
    all-reduce            │ bucket 0 (4, 3)   │ bucket 1 (2, 1) │

It pays where the wire works by itself (NCCL on a GPU's copy engines, a network card). On a CPU host the cores that
would exchange are those that compute, so it is not used there: see benchmarks/overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.training.buckets import buckets
from headrace.training.flat_layout import FlatLayout
from headrace.training.gradients import UsedParameters

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
