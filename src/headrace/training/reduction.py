"""The sum of all workers' gradients: in shared memory, or by a collective of the devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.compression import PLAIN, Compression
from headrace.internals import foreach_copy_
from headrace.spec.model import ParameterSpec
from headrace.training.buckets import BucketSink, SummedUse
from headrace.training.clipping import GradientClipper
from headrace.training.gradients import (
    FlatGradients,
    FlatLayout,
    GradientSink,
    GradientUse,
    SharedGradients,
    UsedParameters,
    assign,
)
from headrace.training.optimizer import StatePiece, has_step_hooks
from headrace.training.reducing import Reduced, ReducingExchange
from headrace.training.synchronization import ElasticState
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
    used: GradientUse
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
        """Yields what a codec has rounded and will send later."""
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
                    yield StatePiece.of(name, RESIDUAL, first, flat[first : (high - begin) // size])

    def load_residuals(self, pieces: Iterable[StatePiece]) -> None:
        """Loads those that belong to this rank."""
        for piece in pieces:
            if piece.key == RESIDUAL:
                piece.copy_to(self.layout.flat(self.compression.residuals, piece.parameter), 0)

    def _lay_out(self, trainable: Sequence[ParameterSpec], used: GradientUse, rank: int, result: Tensor) -> None:
        """Takes memory for a sum that every device has, and that the first one measures."""
        self.layout = FlatLayout(trainable)
        self.used, self.result = used, result
        self.held = [span.of(self.result) for span in self.layout.spans]
        self._lead(rank)

    def _lead(self, rank: int) -> None:
        self.measured = [] if rank else self.held


class SharedMemoryReduction(Reduction):
    """Sums through shared memory: each rank its part, in rank order, into one result for all."""

    def __init__(self, trainable: Sequence[ParameterSpec], group: ProcessGroup) -> None:
        self._group = group
        self._shared = SharedGradients(trainable, group)
        self.layout, self.sink = self._shared.layout, self._shared.sink
        self._divide()

    def regroup(self) -> None:
        self._shared.regroup()
        self._divide()

    def reduce(self) -> None:
        if self._group.world > 1:
            for total, sources in zip(self.held, self._sources, strict=True):
                torch.add(sources[0], sources[1], out=total)
                for source in sources[2:]:
                    total.add_(source)
        self._group.moved_bytes += self._traffic

    def _divide(self) -> None:
        """Gives each member its part of the sum."""
        group, regions, nbytes = self._group, self._shared.regions, self.layout.nbytes
        self.used = self._shared.used
        self.result = regions[0] if group.world == 1 else group.share(0 if group.rank else nbytes)[0]
        parts = [span.part(group.rank, group.world) for span in self.layout.spans]
        self.held = self.measured = [part.of(self.result) for part in parts]
        self._sources = [[part.of(region) for region in regions] for part in parts]
        self._traffic = shared_traffic(nbytes, group.world)


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
        result = torch.zeros(FlatLayout(trainable).nbytes, dtype=torch.uint8, device=device)
        used = UsedParameters(group, len(trainable))
        self._lay_out(trainable, used, collective.rank, result)
        self.compression = Compression(codec, self.result)
        self.sink = FlatGradients(self.layout, self.result, used)

    def regroup(self) -> None:
        self.compression.forget()
        self._lead(self._collective.rank)

    def reduce(self) -> None:
        for total in self.held:
            self._collective.start_all_reduce(total, self.compression)()


class BucketReduction(Reduction):
    """Sums by a collective of the devices, bucket by bucket; if `overlap`, while backward still runs.

    The gradients' use is found in the sum where it lies on an accelerator, so that no worker waits for it.
    """

    def __init__(
        self,
        trainable: Sequence[ParameterSpec],
        group: ProcessGroup,
        collective: Collective,
        module: nn.Module,
        device: torch.device,
        codec: str = "plain",
        overlap: bool = True,
    ) -> None:
        used: GradientUse
        if device.type == "cpu" or (codec != "plain" and not collective.queued):
            # A codec would round the counts.
            used = UsedParameters(group, len(trainable))
            result = torch.zeros(FlatLayout(trainable).nbytes, dtype=torch.uint8, device=device)
        else:
            used = SummedUse(group, trainable, device, lambda: self._buckets.wait())
            result = used.region
        self._lay_out(trainable, used, collective.rank, result)
        self._collective = collective
        self.compression = Compression(codec, self.result)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes = [parameter.bytes for parameter in trainable]
        self._buckets = BucketSink(
            parameters, sizes, self.layout, self.result, used, collective, self.compression, overlap
        )
        self.sink = self._buckets

    def regroup(self) -> None:
        self._buckets.drop()
        self.compression.forget()
        self._lead(self._collective.rank)

    def reduce(self) -> None:
        self._buckets.wait()


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
        if reduction.used.meets_later:
            clipper.leave_meeting_to(reduction.used.meets_later)
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
