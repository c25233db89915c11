"""Buckets of gradients, which leave for a collective while backward still computes.

    backward    │ layer 4 │ layer 3 │ layer 2 │ layer 1 │
    all-reduce            │ bucket 0 (4, 3)   │ bucket 1 (2, 1) │

It pays where the transport works by itself (NCCL on a GPU's copy engines, a network card). On a CPU host the cores that
would exchange are those that compute, so it is not used there: see benchmarks/overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.collectives.compression import Compression
from headrace.errors import UsageError
from headrace.training.gradients import FlatLayout, UsedParameters


class BucketSink:
    """Takes each gradient when autograd has made it, and starts a bucket's all-reduce when the bucket is complete.

    Buckets leave in the same order on every worker, whatever the order in which their gradients come. A parameter
    without a gradient holds its bucket back until backward is over.
    """

    def __init__(
        self,
        module: nn.Module,
        sizes: Sequence[int],
        layout: FlatLayout,
        region: Tensor,
        used: UsedParameters,
        collective: Collective,
        compression: Compression,
    ) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._collective = collective
        self._compression = compression
        self._used = used
        self._views = layout.views(region)
        runs = buckets(sizes, *collective.bucket_bytes)
        self._bucket_of = [0] * len(parameters)
        self._flats: list[list[Tensor]] = []
        for number, (start, stop) in enumerate(runs):
            self._bucket_of[start:stop] = [number] * (stop - start)
            self._flats.append(layout.runs(region, start, stop))
        self._sizes = [stop - start for start, stop in runs]
        self._missing = list(self._sizes)
        self._arrived = [False] * len(parameters)
        self._sent = 0
        self._sends = False
        self._waits: list[Callable[[], None]] = []
        for index, parameter in enumerate(parameters):
            parameter.register_hook(partial(self._take, index))

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """See `GradientSink`."""
        self._used.publish(gradients)
        for index, arrived in enumerate(self._arrived):
            gradient = gradients[index]
            if gradient is None:
                self._views[index].zero_()
            elif not arrived:
                self._views[index].copy_(gradient)
        self._send_rest()

    def store_nothing(self) -> None:
        """See `GradientSink`."""
        self._used.publish_nothing()
        for view in self._views:
            view.zero_()
        self._send_rest()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """See `EarlySink`."""
        self._sends = True
        try:
            yield
        finally:
            self._sends = False

    def wait(self) -> None:
        """Waits until all buckets are summed."""
        for wait in self._waits:
            wait()
        self._waits.clear()

    def drop(self) -> None:
        """Drops sums of a round that is done again, which may be on their way in the group that was."""
        self._waits.clear()
        self._begin()

    def _take(self, index: int, gradient: Tensor) -> None:
        # Also called where user code asks autograd for gradients.
        if not self._sends:
            return
        self._views[index].copy_(gradient)
        self._arrived[index] = True
        self._missing[self._bucket_of[index]] -= 1
        while self._sent < len(self._missing) and self._missing[self._sent] == 0:
            self._send()

    def _send(self) -> None:
        self._waits += [self._collective.start_all_reduce(flat, self._compression) for flat in self._flats[self._sent]]
        self._sent += 1

    def _send_rest(self) -> None:
        while self._sent < len(self._missing):
            self._send()
        self._begin()

    def _begin(self) -> None:
        """Expects the next backward."""
        self._sent = 0
        self._missing[:] = self._sizes
        self._arrived[:] = [False] * len(self._arrived)


def buckets(sizes: Sequence[int], first_bytes: int, most_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns runs `(start, stop)` of parameter indices, in the order in which their gradients are ready.

    `sizes` are the bytes of each parameter, in the model's order. Backward runs from the last parameter to the first,
    so the first bucket ends with the last parameter. A bucket closes as soon as it has its bytes: `first_bytes`, and
    each next one twice as many, at most `most_bytes`. None would still be that large without its own first parameter;
    the last holds what is left.

    >>> buckets((40, 10, 10, 30, 5), 20, 20)
    ((3, 5), (1, 3), (0, 1))
    >>> buckets((10, 10, 10, 10, 10), 10, 20)
    ((4, 5), (2, 4), (0, 2))

    Raises:
        UsageError: `first_bytes` is below 1, or above `most_bytes`.
    """
    if not 1 <= first_bytes <= most_bytes:
        raise UsageError(f"the first bucket must have 1 to {most_bytes} bytes, got {first_bytes}")
    runs = []
    stop = len(sizes)
    held, bucket_bytes = 0, first_bytes
    for start in reversed(range(len(sizes))):
        held += sizes[start]
        if held >= bucket_bytes or start == 0:
            runs.append((start, stop))
            stop, held = start, 0
            bucket_bytes = min(2 * bucket_bytes, most_bytes)
    return tuple(runs)
