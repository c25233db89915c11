"""Central storage: one copy of parameters and optimizer state in the host's memory, for all replicas.

    compute                             synchronize                  update
    the same on each worker, on         each worker reduces its      each worker updates its
    parameters read from the one copy   slice of the gradients       slice of the one copy

On a CPU host the model's parameters *are* the one copy: nothing is fetched. On GPUs each replica fetches the
copy before it computes and brings its gradients to host memory after.

    worker 0   │ grads ──► G0 ─┐            ┌─► sum of slice 0 ──► optimizer on P[slice 0] ─┐
               │               ├─ barrier ──┤                                               ├─ barrier
    worker 1   │ grads ──► G1 ─┘            └─► sum of slice 1 ──► optimizer on P[slice 1] ─┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.policies.roles import require_memory, worker_roles
from headrace.policies.sharding import slices, whole
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.strategy import (
    Strategy,
    WorkerContext,
    broadcast,
    check_count,
    describe_options,
)
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Replica
from headrace.training.gradients import FlatGradients, FlatLayout, UsedParameters
from headrace.training.optimizer import build, build_over
from headrace.training.optimizer_state import StatePiece
from headrace.training.reduction import shared_traffic
from headrace.training.update import UpdatingExchange


@dataclass(frozen=True)
class CentralStorage(Strategy):
    """Parameters and optimizer state once a host (tf.distribute.experimental.CentralStorageStrategy's way).

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
    """

    workers: int | None = None

    name = "central_storage"
    synchronous = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles = worker_roles(self.name, self.workers, cluster)
        # Once: the parameters. Each worker: what autograd makes, what it shares.
        require_memory(self.name, (2 * len(roles) + 1) * model.trainable_bytes, cluster)
        cut = slices if model.sliceable else whole
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=roles,
            shares=(1,) * len(roles),
            gradient_bytes=model.trainable_bytes,
            segments=cut(model.parameters, len(roles)),
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        if context.device.type == "cpu":
            broadcast(context.module, context.group)
        storage = CentralCopy(context)
        presence = UsedParameters(context.group, len(context.model.trainable))
        sink = FlatGradients(storage.gradient_layout, storage.local_gradients, presence)
        return Replica(
            context.whole_model(sink, always), CentralStorageExchange(plan, rank, context, storage, presence)
        )


class CentralCopy:
    """The one copy, every worker's gradients beside it, and the way between them and a device.

    Args:
        context: of this worker. Its module's parameters become views: of the one copy on a CPU, of one flat
            buffer on another device.

    Attributes:
        layout, gradient_layout: places of all parameters, and of the trainable ones' gradients.
        parameters: the one copy, `(layout.nbytes,)` uint8.
        gradients: by rank, `(gradient_layout.nbytes,)` uint8, in host memory.
        local_gradients: where this worker's backward puts its own.
    """

    def __init__(self, context: WorkerContext) -> None:
        group = context.group
        self.layout, self.parameters = one_copy(context.module, context.model, group)
        self.gradient_layout = FlatLayout(context.model.trainable)
        self.gradients = group.share(self.gradient_layout.nbytes)
        self._own = self.gradients[group.rank]
        if context.device.type == "cpu":
            self._near = self.parameters
            self.local_gradients = self._own
        else:
            for region in (self.parameters, self._own):
                _pin(region)
            self._near = torch.empty_like(self.parameters, device=context.device)
            self.local_gradients = torch.zeros_like(self._own, device=context.device)
        seat(context.module, self.layout, self._near)

    def fetch(self) -> None:
        """Brings the parameters to the device."""
        if self._near is not self.parameters:
            self._near.copy_(self.parameters, non_blocking=True)

    def bring(self) -> None:
        """Brings this worker's gradients to host memory."""
        if self.local_gradients is not self._own:
            self._own.copy_(self.local_gradients)


def one_copy(module: nn.Module, model: ModelSpec, group: ProcessGroup) -> tuple[FlatLayout, Tensor]:
    """Puts rank 0's parameters into memory that all workers see; returns their places and the memory."""
    layout = FlatLayout(model.parameters)
    region = group.share(0 if group.rank else layout.nbytes)[0]
    if group.rank == 0:
        for view, parameter in zip(layout.views(region), module.parameters(), strict=True):
            view.copy_(parameter.data)
    group.barrier()
    return layout, region


def seat(module: nn.Module, layout: FlatLayout, region: Tensor) -> None:
    """Lets a module's parameters be views of a region."""
    for view, parameter in zip(layout.views(region), module.parameters(), strict=True):
        parameter.data = view


class CentralStorageExchange(UpdatingExchange):
    """Args:
    plan: the run's.
    rank: this worker's.
    context: of this worker.
    storage: the one copy.
    presence: says which gradients exist.
    """

    def __init__(
        self, plan: Plan, rank: int, context: WorkerContext, storage: CentralCopy, presence: UsedParameters
    ) -> None:
        self._group = context.group
        self._storage = storage
        self._presence = presence
        self._conditioner = context.conditioner()
        self._own_segments = [segment for segment in plan.segments if segment.owner == rank]
        shapes = {parameter.name: parameter.shape for parameter in context.model.parameters}
        elements = {parameter.name: parameter.elements for parameter in context.model.parameters}
        self._pieces: list[nn.Parameter] = []
        self._sums: list[Tensor] = []
        self._others: list[list[Tensor]] = [[] for _ in range(context.group.world - 1)]
        others = [region for peer, region in enumerate(storage.gradients) if peer != rank]
        for segment in self._own_segments:
            cut = slice(segment.start, segment.stop)
            uncut = segment.stop - segment.start == elements[segment.parameter]
            # A whole parameter keeps its shape, for optimizers that look at it.
            shape = shapes[segment.parameter] if uncut else (-1,)
            piece = storage.layout.flat(storage.parameters, segment.parameter)[cut].view(shape)
            self._pieces.append(nn.Parameter(piece))
            own = storage.gradients[rank]
            self._sums.append(storage.gradient_layout.flat(own, segment.parameter)[cut].view(shape))
            for pieces, region in zip(self._others, others, strict=True):
                pieces.append(storage.gradient_layout.flat(region, segment.parameter)[cut].view(shape))
        template = build(context.optimizer, context.module.named_parameters())
        by_name: dict[str, list[Tensor]] = {}
        for segment, piece in zip(self._own_segments, self._pieces, strict=True):
            by_name.setdefault(segment.parameter, []).append(piece)
        optimizer = build_over(template, by_name)
        owned = list(zip(self._own_segments, self._pieces, strict=True))
        self.updater = context.updater(optimizer, owned, template)
        self._names = [parameter.name for parameter in context.model.trainable]
        self._missing: tuple[int, ...] = ()
        self._assign(())
        self._traffic = shared_traffic(storage.gradient_layout.nbytes, context.group.world)
        self.parameter_bytes = 0 if rank else storage.layout.nbytes

    def begin(self, round_: int) -> None:
        self._storage.fetch()

    def synchronize(self, finite: bool = True) -> StepDecision:
        self._storage.bring()
        missing = self._presence.settle()
        if self._sums:
            for pieces in self._others:
                torch._foreach_add_(self._sums, pieces)
        verdict = self._conditioner.condition(self._sums, self._sums, finite)
        if missing != self._missing:
            self._assign(missing)
        self._group.moved_bytes += self._traffic
        return verdict

    def update(self, round_: int) -> None:
        super().update(round_)
        self._group.barrier()

    def swap_weights(self, averaged: bool) -> None:
        # Nobody may still read what is changed, nor read on before all of it is.
        self._group.barrier()
        super().swap_weights(averaged)
        self._group.barrier()
        self._storage.fetch()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        # Weights may be among the pieces, and they are everybody's.
        self._group.barrier()
        super().load(pieces, settings)
        self._group.barrier()
        self._storage.fetch()

    def _assign(self, missing: tuple[int, ...]) -> None:
        absent = {self._names[index] for index in missing}
        for segment, piece, total in zip(self._own_segments, self._pieces, self._sums, strict=True):
            piece.grad = None if segment.parameter in absent else total
        self._missing = missing


def _pin(region: Tensor) -> None:
    """Lets a GPU copy to and from shared memory directly."""
    if region.numel():
        code = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {region.numel():,} bytes failed with code {int(code)}")
