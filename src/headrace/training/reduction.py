"""The sum of all workers' gradients: in shared memory, or by a collective of the devices.

A collective may run while backward still computes: buckets of gradients leave as soon as they are complete.

    backward    │ layer 4 │ layer 3 │ layer 2 │ layer 1 │
    all-reduce            │ bucket 0 (4, 3)   │ bucket 1 (2, 1) │

It pays where the transport works by itself (NCCL on a GPU's copy engines, a network card). On a CPU host the cores that
would exchange are those that compute, so it is not used there: see benchmarks/overlap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.compression import PLAIN, Compression
from headrace.errors import UsageError
from headrace.internals import foreach_copy_
from headrace.spec.model import ParameterSpec
from headrace.training.clipping import GradientClipper
from headrace.training.elastic import ElasticState
from headrace.training.gradients import (
    FlatGradients,
    FlatLayout,
    GradientSink,
    SharedGradients,
    UsedParameters,
    assign,
)
from headrace.training.optimizer import StatePiece, has_step_hooks
from headrace.training.reducing import Reduced, ReducingExchange
from headrace.training.update import Updater

RESIDUAL = "headrace.residual"
"""The key, in a worker's own state, of what a codec has rounded."""


class Reduction(ABC):
    """Sums the workers' flat gradients.

    Attributes:
        result: where the sum appears, `(nbytes,)` uint8.
        held: what this rank changes of the sum, where it is to be changed on all.
        measured: what this rank measures; all ranks together measure every element once.
        compression: of gradients that leave the host.
    """

    layout: FlatLayout
    used: UsedParameters
    sink: GradientSink
    result: Tensor
    held: list[Tensor]
    measured: list[Tensor]
    compression = PLAIN

    @abstractmethod
    def reduce(self) -> None:
        """Sums; all workers have stored their gradients."""

    def regroup(self) -> None:
        """Goes on with the group's present members; every member calls it."""
        raise NotImplementedError("the members of this reduction stay the same")

    def residuals(self) -> Iterator[StatePiece]:
        """Yields copies of what a codec has rounded and will send later."""
        if not self.compression.parts:
            return
        kept = self.compression.residuals
        for name in self.layout.names:
            flat = self.layout.flat(kept, name)
            begin, size = flat.data_ptr() - kept.data_ptr(), flat.element_size()
            for start, stop in sorted(self.compression.parts):
                low, high = max(start, begin), min(stop, begin + flat.nbytes)
                if low < high:
                    first = (low - begin) // size
                    yield StatePiece(name, RESIDUAL, first, flat[first : (high - begin) // size].clone())

    def load_residuals(self, pieces: Iterable[StatePiece]) -> None:
        """Loads those that belong to this rank."""
        for piece in pieces:
            if piece.key == RESIDUAL:
                piece.copy_to(self.layout.flat(self.compression.residuals, piece.parameter), 0)

    def _lay_out(
        self, trainable: Sequence[ParameterSpec], group: ProcessGroup, rank: int, device: torch.device
    ) -> None:
        """Makes room for a sum that every device has, and that the first one measures."""
        self.layout = FlatLayout(trainable)
        self.used = UsedParameters(group, len(trainable))
        self.result = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self.held = [span.of(self.result) for span in self.layout.spans]
        self._lead(rank)

    def _lead(self, rank: int) -> None:
        self.measured = [] if rank else self.held


class SharedMemoryReduction(Reduction):
    """Sums through shared memory: each rank its part, in rank order, into one result for all."""

    def __init__(self, trainable: Sequence[ParameterSpec], group: ProcessGroup) -> None:
        self._trainable = trainable
        self._group = group
        # Gradients go to it, because where they lie changes with the members.
        self.sink = self
        self.regroup()

    def regroup(self) -> None:
        group = self._group
        shared = SharedGradients(self._trainable, group)
        self.layout, self.used, self._stored = shared.layout, shared.used, shared.sink
        nbytes = self.layout.nbytes
        own = shared.regions[group.rank]
        self.result = own if group.world == 1 else group.share(0 if group.rank else nbytes)[0]
        parts = [span.part(group.rank, group.world) for span in self.layout.spans]
        self.held = self.measured = [part.of(self.result) for part in parts]
        self._sources = [[part.of(region) for region in shared.regions] for part in parts]
        self._traffic = shared_traffic(nbytes, group.world)

    def place(self, index: int) -> Tensor:
        # The others have read the last ones before they decided about the last step.
        return self._stored.place(index)

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self._stored.store(gradients)

    def store_nothing(self) -> None:
        self._stored.store_nothing()

    def reduce(self) -> None:
        if self._group.world > 1:
            for total, sources in zip(self.held, self._sources, strict=True):
                torch.add(sources[0], sources[1], out=total)
                for source in sources[2:]:
                    total.add_(source)
        self._group.moved_bytes += self._traffic


class CollectiveReduction(Reduction):
    """Sums by a collective of the devices, when backward is over."""

    def __init__(
        self,
        trainable: Sequence[ParameterSpec],
        group: ProcessGroup,
        collective: Collective,
        device: torch.device,
        codec: str = "plain",
    ) -> None:
        self._collective = collective
        self._lay_out(trainable, group, collective.rank, device)
        self.compression = Compression(codec, self.result)
        self.sink = FlatGradients(self.layout, self.result, self.used)

    def regroup(self) -> None:
        self.compression.forget()
        self._lead(self._collective.rank)

    def reduce(self) -> None:
        for total in self.held:
            self._collective.start_all_reduce(total, self.compression)()


class OverlappedReduction(Reduction):
    """Sums by a collective of the devices, bucket by bucket, while backward still runs.

    It takes each gradient when autograd has made it, and starts a bucket's all-reduce when the bucket is complete.
    Buckets leave in the same order on every worker, whatever the order in which their gradients come. A parameter
    without a gradient holds its bucket back until backward is over.
    """

    def __init__(
        self,
        trainable: Sequence[ParameterSpec],
        group: ProcessGroup,
        collective: Collective,
        module: nn.Module,
        device: torch.device,
        codec: str = "plain",
    ) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._collective = collective
        self._lay_out(trainable, group, collective.rank, device)
        self.compression = Compression(codec, self.result)
        self.sink = self
        self._views = self.layout.views(self.result)
        runs = buckets([parameter.bytes for parameter in trainable], *collective.bucket_bytes)
        self._bucket_of = [0] * len(parameters)
        self._flats: list[list[Tensor]] = []
        for number, (start, stop) in enumerate(runs):
            self._bucket_of[start:stop] = [number] * (stop - start)
            self._flats.append(self.layout.runs(self.result, start, stop))
        self._sizes = [stop - start for start, stop in runs]
        self._missing = list(self._sizes)
        self._arrived = [False] * len(parameters)
        self._sent = 0
        self._sends = False
        self._waits: list[Callable[[], None]] = []
        for index, parameter in enumerate(parameters):
            parameter.register_hook(partial(self._take, index))

    def regroup(self) -> None:
        # Sums of a round that is done again may be on their way, in the group that was.
        self._waits.clear()
        self._begin()
        self.compression.forget()
        self._lead(self._collective.rank)

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self.used.publish(gradients)
        for index, arrived in enumerate(self._arrived):
            gradient = gradients[index]
            if gradient is None:
                self._views[index].zero_()
            elif not arrived:
                self._views[index].copy_(gradient)
        self._send_rest()

    def store_nothing(self) -> None:
        self.used.publish_nothing()
        for view in self._views:
            view.zero_()
        self._send_rest()

    def reduce(self) -> None:
        for wait in self._waits:
            wait()
        self._waits.clear()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """See `EarlySink`."""
        self._sends = True
        try:
            yield
        finally:
            self._sends = False

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
        self._waits += [self._collective.start_all_reduce(flat, self.compression) for flat in self._flats[self._sent]]
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


class MirroredExchange(ReducingExchange):
    """Reduces the gradients, and updates a mirror of all parameters on every worker.

    `parameters` are this worker's trainable parameters, in order. If `copies`, the optimizer gets a copy of the sum on
    their device, because the result lies elsewhere, or is read by all workers of the host and might be written to; so
    it does where the sum lies in another order of memory than a parameter. If `hides`, the sum is in `.grad` during the
    update alone, so that user code between two rounds sees nothing that other workers read or write.
    """

    def __init__(
        self,
        updater: Updater,
        clipper: GradientClipper,
        reduction: Reduction,
        parameters: Sequence[nn.Parameter],
        parameter_bytes: int,
        copies: bool,
        hides: bool = False,
    ) -> None:
        self._reduction, self._hides = reduction, hides
        self._views = reduction.layout.views(reduction.result)
        # Fused kernels go over memory, so that gradients must lie in the order of their parameters.
        apart = any(view.stride() != each.stride() for view, each in zip(self._views, parameters, strict=True))
        self._private = [torch.zeros_like(each, requires_grad=False) for each in parameters] if copies or apart else []
        clipper.allow_votes()
        super().__init__(updater, clipper, reduction.used, parameters, self._private or self._views, parameter_bytes)

    def regroup(self) -> None:
        """Goes on with the group's present members; every member calls it."""
        self._reduction.regroup()
        self._views = self._reduction.layout.views(self._reduction.result)
        self._attach(self._reduction.used, self._private or self._views)

    def reduce(self) -> Reduced:
        self._reduction.reduce()
        return self._reduction.measured, self._reduction.held

    def own(self) -> tuple[StatePiece, ...]:
        return tuple(self._reduction.residuals())

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = tuple(pieces)
        super().load(every, settings)
        self._reduction.load_residuals(every)

    def update(self, round_: int) -> None:
        if self._private:
            foreach_copy_(self._private, self._views)
        if not self._hides:
            super().update(round_)
            return
        super()._put()
        super().update(round_)
        assign(self._parameters, [None] * len(self._parameters))

    def _put(self) -> None:
        if not self._hides:
            super()._put()


class MirroredState(ElasticState):
    """Every worker has all of the state, and each round counts by itself."""

    def __init__(self, exchange: MirroredExchange) -> None:
        self._exchange = exchange

    def regroup(self) -> None:
        self._exchange.regroup()

    def give(self) -> tuple[StatePiece, ...]:
        return self._exchange.state()

    def take(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any]) -> None:
        self._exchange.load(pieces, settings)


def may_write_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether a step may write into the gradients that it reads."""
    # torch's own optimizers only read them, those of foreach=True aside (SGD with nesterov writes). Hooks may.
    ours = type(optimizer).__module__.startswith("torch.optim") and not has_step_hooks(optimizer)
    return not ours or any(group.get("foreach") for group in optimizer.param_groups)


def shared_traffic(gradient_bytes: int, workers: int) -> int:
    """Returns the bytes that a worker writes for others and reads from them, where each sums 1/N of all gradients.

    It writes its gradients but its own part, reads that part of the others', writes the sum of it, and reads
    the other parts' sums: 3 (N - 1)/N + 1/N.
    """
    return gradient_bytes * (3 * workers - 2) // workers if workers > 1 else 0


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
