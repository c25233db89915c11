"""Tensor parallelism: the layers of one model are split over devices, which all compute the same batch.

    compute                                synchronize                       update
    each layer's part on each device;      nothing: every device has the     optimizer on the part
    a sum of activations at the cuts       whole gradient of its part

A pair of layers is split by the outputs of the first and the inputs of the second, so that what is between them stays
where it is (Shoeybi et al., "Megatron-LM", 2019, section 3):

    rank 0   x ─► columns 0 of A ─► relu ─► rows 0 of B ─┐
                                                         ├─ sum ──► y: the same on both
    rank 1   x ─► columns 1 of A ─► relu ─► rows 1 of B ─┘
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import UnknownName, UsageError
from headrace.metrics import Mean
from headrace.policies.roles import require_memory, worker_roles
from headrace.policies.sharding import everywhere
from headrace.spec.cluster import Cluster
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.strategy import (
    ModelParallelGroup,
    Strategy,
    WorkerContext,
    broadcast,
    check_count,
    describe_options,
    require_own_chance,
)
from headrace.tensor_parallel import RULES, RewrittenModel
from headrace.tensor_parallel.rewriting import split
from headrace.training.clipping import StepDecision
from headrace.training.compute import Compute, Computed, describe
from headrace.training.exchange import Exchange, Replica
from headrace.training.gradients import GradientSink
from headrace.training.optimizer_state import StatePiece
from headrace.training.synchronization import PeriodicSync, SyncResult
from headrace.training.whole_model import WholeModel


@dataclass(frozen=True)
class TensorParallel(Strategy):
    """One model, whose layers are split over devices.

    Rules, for layers by name or pattern ("classifier.*"); the first that fits counts, and what none fits is whole on
    every device:
    "column": a linear layer by its outputs, an embedding by the length of its vectors; "row": by its inputs, or its
    vectors; "channels": a convolution by its output channels, one in groups by its groups; "heads": attention;
    "batch": a module that stays whole and computes some of the examples on each device; "replicate".

    Attributes:
        devices: how many; None for the launcher's processes or the machine's accelerators.
        rules: "auto" finds pairs of layers that need one sum each way, and attention; or a dict.
    """

    devices: int | None = None
    rules: str | Mapping[str, str] = "auto"

    name = "tensor_parallel"
    synchronous = True

    def __post_init__(self) -> None:
        check_count("devices", self.devices)
        if isinstance(self.rules, str) and self.rules != "auto":
            raise UsageError(f"rules must be 'auto' or a dict such as {{'head.*': 'column'}}, got {self.rules!r}")
        for kind in () if isinstance(self.rules, str) else self.rules.values():
            if kind not in RULES:
                raise UnknownName("rule", kind, RULES)

    def check(self, options: Options) -> None:
        if options.compile:
            raise UsageError(
                "compile=True makes one program of a model, and split layers talk in the middle of it; use "
                "compile=False, or mirrored"
            )

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles = worker_roles(self.name, self.devices, cluster, spread=True)
        require_sliceable(self.name, model)
        # Each builds the whole model before it keeps a part, and nobody knows yet how small the parts are.
        require_memory(self.name, max(2 * len(roles), model.copies) * model.trainable_bytes, cluster)
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=tuple(replace(role, data_rank=0, stage=role.rank) for role in roles),
            shares=(1,),
            gradient_bytes=model.trainable_bytes,
            segments=everywhere(model.parameters),
        )

    def cuts(self, module: nn.Module, devices: int) -> dict[str, int]:
        """Returns along which dim each parameter would be cut that would be; the module stays as it is."""
        made = split(copy.deepcopy(module), self.rules, ThreadCollective(ThreadGroup(devices), 0))
        return {name: cut.dim for name, cut in made.cuts.items()}

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        alone = ThreadCollective(ThreadGroup(1), 0)
        inside = self.inside(context, context.group, alone)
        own = replace(context, model=inside.model, group=alone, connect=None, inside=inside)
        exchange = LocalExchange(everywhere(own.model.parameters), own)
        return inside.finish(Replica(own.whole_model(), exchange))

    def inside(self, context: WorkerContext, everyone: ProcessGroup, mates: ProcessGroup) -> ModelParallelGroup:
        """Splits a module in place over the workers of `parts`, who hold one replica together.

        Args:
            context: of this worker.
            everyone: the ranks of all replicas.
            mates: the ranks that hold the same slice.
        """
        group = context.group
        require_own_chance(context.module, group)
        broadcast(context.module, context.wire or group)
        # torch.fx traces in one thread, and meanwhile no other may run a model.
        group.barrier()
        made = split(context.module, self.rules, context.wire or group)
        group.barrier()
        return _Slice(made, group, everyone, mates, describe(context.module, context.model.sliceable))


def require_sliceable(strategy: str, model: ModelSpec) -> None:
    """Refuses optimizers that look at whole matrices.

    Raises:
        UsageError: the job's does.
    """
    if not model.sliceable:
        raise UsageError(
            f"the job's optimizer looks at whole matrices, of which each device has a part under {strategy}; use one "
            "that treats every element alone (SGD, Adam), or mirrored"
        )


class _Slice(ModelParallelGroup):
    """One rank's slices of the layers of a replica.

    Args:
        split: what was split.
        group: the ranks of the replica.
        everyone: the ranks of all replicas.
        mates: the ranks that hold the same slice.
        model: what this rank holds.
    """

    def __init__(
        self,
        split: RewrittenModel,
        group: ProcessGroup,
        everyone: ProcessGroup,
        mates: ProcessGroup,
        model: ModelSpec,
    ) -> None:
        self.group = group
        self.everyone = everyone
        self.model = model
        self._split = split
        self._mates = mates
        self.repeated = split.repeated

    def compute(self, whole: WholeModel, sink: GradientSink | None) -> Compute:
        compute = SplitModel(whole, self._split, self._mates)
        if self.everyone.rank == 0:
            compute.notes = (str(self._split),)
        return compute

    def spread(self) -> None:
        for name, parameter in self._split.module.named_parameters():
            if name in self.repeated and parameter.requires_grad:
                dense = parameter.data.contiguous()
                self.group.broadcast(dense)
                parameter.data.copy_(dense)

    def finish(self, replica: Replica) -> Replica:
        meetings = SplitMeetings(replica.meetings, self._split) if replica.meetings else None
        return replace(replica, exchange=SplitExchange(replica.exchange, self._split), meetings=meetings)


class SplitModel(Compute):
    """Computes with slices of layers, together with the other ranks of the replica.

    Args:
        whole: computes, as if it had all.
        split: what was split.
        mates: the ranks that hold the same slice.
    """

    def __init__(self, whole: WholeModel, split: RewrittenModel, mates: ProcessGroup) -> None:
        self.module = whole.module
        self.counts = split.group.rank == 0
        self.mates = mates
        self._whole = whole
        self._split = split
        # Whatever runs the model first, a loop of the user's own, too.
        self._first = whole.module.register_forward_pre_hook(self._align)

    def run(self, share: Share) -> Computed:
        return self._spoken(self._whole.run(share))

    def backward(self, loss: Tensor | Mean, share: Share) -> Computed:
        return self._spoken(self._whole.backward(loss, share))

    def predict(self, batch: Any) -> Any:
        return self._whole.predict(batch)

    def place(self, batch: Any) -> Any:
        return self._whole.place(batch)

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        if leads:
            yield from self._split.whole_tensors()

    def _spoken(self, computed: Computed) -> Computed:
        """Leaves the loss to the rank that counts."""
        return computed if self.counts else replace(computed, loss=None)

    def _align(self, *_: object) -> None:
        """Lets all ranks draw what the first one draws: whatever they compute alike must be alike."""
        self._first.remove()
        group, device = self._split.group, next(self.module.parameters()).device
        if not isinstance(group, ThreadCollective):
            torch.set_rng_state(_told(torch.get_rng_state(), group, device))
        if device.type == "cuda":
            torch.cuda.set_rng_state(_told(torch.cuda.get_rng_state(device), group, device), device)


def _told(state: Tensor, group: Collective, device: torch.device) -> Tensor:
    told = state.to(device)
    group.broadcast(told)
    return told.cpu()


class SplitExchange(Exchange):
    """Exchanges parts, and saves and loads whole tensors.

    Args:
        exchange: of the parts.
        split: what was split.
    """

    def __init__(self, exchange: Exchange, split: RewrittenModel) -> None:
        self._exchange = exchange
        self._split = split

    def begin(self, round_: int) -> None:
        self._exchange.begin(round_)

    def synchronize(self, finite: bool = True) -> StepDecision:
        return self._exchange.synchronize(finite)

    def update(self, round_: int) -> None:
        self._exchange.update(round_)

    def skip(self, round_: int) -> None:
        self._exchange.skip(round_)

    def swap_weights(self, averaged: bool) -> None:
        self._exchange.swap_weights(averaged)

    def state(self) -> tuple[StatePiece, ...]:
        return self._split.join(self._exchange.state())

    def settings(self) -> dict[str, Any]:
        return self._exchange.settings()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._exchange.load(self._split.divide(pieces), settings)

    def memory(self) -> tuple[int, int]:
        return self._exchange.memory()


class SplitMeetings(PeriodicSync):
    """Brings together those who hold the same slice.

    Args:
        meetings: of the slices.
        split: what was split.
    """

    def __init__(self, meetings: PeriodicSync, split: RewrittenModel) -> None:
        self._meetings = meetings
        self._split = split

    def coming(self, done: int) -> int:
        return self._meetings.coming(done)

    def weigh(self, weight: float) -> None:
        self._meetings.weigh(weight)

    def meet(self, done: int) -> SyncResult:
        return self._meetings.meet(done)

    def end(self, done: int) -> SyncResult | None:
        return self._meetings.end(done)

    def swap_weights(self, averaged: bool) -> None:
        self._meetings.swap_weights(averaged)

    def own(self) -> tuple[StatePiece, ...]:
        return self._split.mark(self._meetings.own())
