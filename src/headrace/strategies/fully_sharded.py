"""Fully sharded data parallelism: every worker holds a part of every parameter, and gathers a unit while it computes.

    compute                                synchronize                          update
    each on its share; a unit's            during backward, unit by unit: each  optimizer on each worker's
    parameters are gathered before it      worker gets the sum of its part of   part of every parameter
    runs, and released after it            the gradients

It is torch's `fully_shard` (FSDP2; Rajbhandari et al., "ZeRO", 2020, stage 3; Zhao et al., "PyTorch FSDP", 2023), whose
collectives go through the memory that the workers of a host share, between hosts through headrace's own, and among
accelerators through theirs (NCCL):

    worker 0   P[part 0] ─┐            ┌─► unit ─► forward ... backward ─► gradient ─┐           ┌─► P[part 0]
                          ├─ gather ───┤                                             ├─ scatter ─┤
    worker 1   P[part 1] ─┘            └─► unit ─► forward ... backward ─► gradient ─┘           └─► P[part 1]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.fully_sharded.units import AUTO, find_units, refuse_cast, refuse_hooks, refuse_kept
from headrace.hooks import hooked_parameters
from headrace.machine.allocator import give_back
from headrace.modules import without_data
from headrace.policies.behaviour import Behaviour, GradientSum
from headrace.policies.roles import data_parallel_plan
from headrace.policies.segments import evenly, rows
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import EVERY_WORKER, Plan, Segment
from headrace.strategies.broadcast import broadcast, broadcast_tensors
from headrace.strategies.checks import check_count, defer, refuse_coupled, refuse_derived_state, refuse_parts
from headrace.strategies.context import ModelProbe, WorkerContext, total_of
from headrace.strategies.refusals import Refusal, one_program
from headrace.strategies.sharded_memory import require_accelerators, require_parts_fit
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica
from headrace.training.gradients import UsedParameters
from headrace.training.update import Updater

_BF16 = 'use Options(precision="bf16"), or leave param_dtype out'


@dataclass(frozen=True)
class FullySharded(Strategy):
    """Parameters, gradients and optimizer state divided among the workers (torch's FSDP2).

    Attributes:
        workers: how many; None for what there is.
        units: what is gathered as one. "auto": each entry of the outermost Sequentials and ModuleLists; or names of
            modules, or patterns (["encoder.layers.*"]), of which the outermost modules count. What is in none of them
            is one more unit, so that [] makes the whole model one.
        reshard_after_forward: release a unit between its forward and its backward, and gather it again: less memory,
            and half as many bytes more. None for True; over pipelines (`hr.Hybrid`) for False, as a stage has many
            forwards before its last backward.
        param_dtype: "bf16" gathers units, computes, and sums gradients in bfloat16, half as many bytes, as torch's
            `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`; parts and optimizer stay as they are, and the model's
            output is float32. It takes the place of autocast, and `Options(precision="bf16")` must be given, too. The
            numbers are not those of one device, whose gradients are float32.
        deferred: make the model one parameter at a time, bit for bit as its constructor does, so that no process holds
            the whole. The constructor is recorded first, without memory for its large tensors. A model that cannot be
            recorded is built whole, which a notice says with the reason.
        offload: keep parts of parameters and gradients, and what the optimizer keeps of them, in pinned memory of the
            host, where the update is made: torch's `CPUOffloadPolicy`, DeepSpeed's ZeRO-Offload. A device then holds
            the units that it computes with, and a step takes longer by the copies. For accelerators alone.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> hr.FullySharded(workers=2, units=["encoder.*"]).units
        ['encoder.*']
    """

    workers: int | None = None
    units: str | Sequence[str] = AUTO
    reshard_after_forward: bool | None = None
    param_dtype: str | None = None
    deferred: bool = False
    offload: bool = False

    name = "fully_sharded"
    whole_model = False
    reads_parts = True
    collectives = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        texts = not isinstance(self.units, str) and all(isinstance(each, str) and each for each in self.units)
        if self.units != AUTO and not texts:
            raise UsageError(
                f"units is 'auto', or a list of modules' names or patterns such as ['blocks.*'], got {self.units!r}"
            )
        if not isinstance(self.reshard_after_forward, bool | None):
            raise UsageError(f"reshard_after_forward must be True, False or None, got {self.reshard_after_forward!r}")
        if self.param_dtype not in (None, "bf16"):
            raise UsageError(f"param_dtype is 'bf16' or None, got {self.param_dtype!r}")
        if not isinstance(self.offload, bool):
            raise UsageError(f"offload must be True or False, got {self.offload!r}")
        defer(self, self.deferred)

    @property
    def equals_one_device(self) -> bool:
        return self.param_dtype is None

    def refusals(self) -> tuple[Refusal, ...]:
        own = one_program("its units are gathered in the middle of it")
        if self.param_dtype is None:
            return (own,)
        others = (
            Refusal("precision", other, f"param_dtype='bf16' computes in bf16, and precision is {other!r}", _BF16)
            for other in ("fp32", "fp16")
        )
        return own, *others

    def imports(self) -> tuple[str, ...]:
        return internals.COMPILER, "headrace.fully_sharded.replica"

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        # Only to refuse what cannot be sharded before any process starts.
        refuse_derived_state(self.name, probe.module, carries_frozen=True)
        if self.param_dtype:
            refuse_cast(probe.module)
        find_units(probe.module, self.units)
        refuse_hooks(hooked_parameters(dict(probe.module.named_parameters())))
        refuse_kept(probe.module)
        return model

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        offload = require_accelerators(self.offload, cluster)
        return sharded_plan(self.name, describe_options(self), self.workers, model, cluster, offload=offload)

    def behave(self, workers: int) -> Behaviour:
        return Behaviour(sums_of(self, workers), not_rehearsed=refuse_parts(self.equals_one_device))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        return self.in_replicas(context, context.group, context.device_group())

    def in_replicas(
        self,
        context: WorkerContext,
        within: ProcessGroup,
        carrier: Collective | None,
        mates: Collective | None = None,
        weighing: WorkerContext | None = None,
    ) -> Replica:
        """Returns what a rank runs where ranks `within` shard a replica, and `mates` hold the same part of others.

        `carrier` moves what the ranks `within` exchange; None for the memory that they share. The group of `weighing`
        are the ranks over which losses are weighed, where several have the same share of a batch.
        """
        # Here, because importing torch.distributed costs what the other strategies need not pay.
        from headrace.fully_sharded.replica import ShardedExchange, ShardedModel
        from headrace.fully_sharded.sharding import ShardedModule, UnitForm

        require_own_backward(context)
        module, group = context.module, context.group
        collective = context.device_group() or group
        if context.weights and context.model.optimizer.values:
            # The optimizer is made from them, before a rank has its part.
            context.weights.read(module)
        broadcast(module, collective)
        fill = _broadcast_parts(module, collective, context.weights.tensors.keys() if context.weights else ())
        units = find_units(module, self.units)
        communicates = context.synchronise_batch_norm()
        whole = whole_parameters(context)
        half = torch.bfloat16 if self.param_dtype else None
        weighing = weighing or context
        # While parameters are where the module computes.
        total = total_of(weighing)
        reshard = self.reshard_after_forward is not False
        form = UnitForm(reshard, half, self.offload)
        sharded = ShardedModule(module, units, within, carrier, form, context.closing, fill)
        if context.weights:
            context.weights.read_parts(sharded.parts())
            context.weights.read(module, module.named_buffers())
        held = rows(context.model.parameters, within.world)
        segments = [each for each in held if each.owner in (within.rank, EVERY_WORKER)]
        updater = updater_of_parts(segments, sharded.pieces, whole, context)
        used = UsedParameters(group, len(sharded.pieces), weighing.group.world)
        objective, options, sample = context.objective, context.options, context.sample
        compute = ShardedModel(sharded, objective, options, used, sample, total, communicates, context.scale)
        if group.rank == 0:
            compute.notes = (sharded.describe(),)
        # What several ranks hold, one measures.
        measured = frozenset(sharded.pieces) if not mates or not mates.rank else frozenset()
        measured -= sharded.whole if group.rank else frozenset()
        inside = context.inside
        if inside and inside.group.rank:
            measured -= inside.repeated
        clipper = context.clipper({} if inside else None, in_host=self.offload)
        exchange = ShardedExchange(sharded, updater, clipper, used, measured, mates)
        return Replica(inside.compute(lambda: compute, None, context.scale) if inside else compute, exchange)

    def check_stages(self) -> None:
        """Refuses options that have no meaning over replicas that are pipelines, with a UsageError."""
        if self.units != AUTO:
            raise UsageError(
                f"units={self.units!r}: what is gathered as one in a pipeline is a rank's stages; leave units out"
            )
        if self.param_dtype:
            raise UsageError("param_dtype='bf16' is for units of a model, and a pipeline has stages; leave it out")
        if self.offload:
            raise UsageError(
                "offload=True keeps parts of a model's units in host memory, and a pipeline has stages; leave it out"
            )
        if self.reshard_after_forward:
            raise UsageError(
                "reshard_after_forward=True releases parameters between forward and backward, and a stage of a "
                "pipeline runs many forwards before its last backward; leave it out"
            )

    def over_stages(
        self,
        rank: int,
        context: WorkerContext,
        within: ProcessGroup,
        carrier: Collective | None,
        mates: Collective | None,
        measured: frozenset[str],
    ) -> Replica:
        """Returns what a rank runs that holds stages of a pipeline; the ranks of `context` hold the same ones.

        Of these the ranks `within` divide them, and `mates` hold the same part; `measured` are the names of the
        parameters whose part no other rank measures. `carrier` is as in `in_replicas`.
        """
        from headrace.fully_sharded.stages import DividedCompute, DividedExchange, DividedParameters, PartialSums

        group, held = context.group, context.model.parameters
        broadcast(context.module, context.device_group() or group)
        whole = whole_parameters(context)
        named = dict(context.module.named_parameters())
        divided = DividedParameters({each.name: named[each.name] for each in held}, within, carrier)
        segments = [each for each in evenly(held, within.world) if each.owner == within.rank]
        updater = updater_of_parts(segments, divided.pieces, whole, context)
        used = UsedParameters(group, len(divided.trained))
        compute = DividedCompute(context.whole_model(PartialSums(divided, used)), divided)
        if group.rank == 0:
            compute.notes = (
                f"rank {rank} holds {divided.part_bytes:,} of its stage's {divided.whole_bytes:,} bytes of parameters "
                f"between rounds, and what the optimizer keeps of them: one part of {within.world}",
            )
        return Replica(compute, DividedExchange(updater, context.clipper({}), used, divided, measured, mates))


def _broadcast_parts(
    module: nn.Module, collective: Collective, stored: Collection[str]
) -> Callable[[Sequence[str]], None]:
    """Returns what gives memory to named parameters of a model that is made in parts: rank 0 makes, and all get them.

    All ranks call it together. Values that are `stored` come later, and memory that no rank has written to is free.
    """
    from headrace.training.deferred.parts import parts_of

    parts = parts_of(module)
    if parts is None:
        return lambda names: None
    device = next(each.device for each in module.parameters() if not each.is_meta)

    def make(name: str, empty: Tensor) -> Tensor:
        if collective.rank == 0 and name not in stored:
            value = parts.value(name).to(device)
        else:
            value = torch.empty(empty.shape, dtype=empty.dtype, device=device)
        if name not in stored:
            broadcast_tensors([value], collective)
        return value

    def fill(names: Sequence[str]) -> None:
        parts.fill(module, names, make)
        # The C library would keep it between what stays, and take new memory for the next unit.
        give_back()

    return fill


def require_own_backward(context: WorkerContext) -> None:
    """Refuses workers that are threads on accelerators with a UsageError: they exchange units during backward."""
    if context.device.type != HOST and isinstance(context.group, ThreadCollective) and context.group.world > 1:
        raise UsageError(
            f"{context.group.world} workers of ThreadEngine share the thread in which torch runs backward on "
            f"{context.device}, and each would wait for the others in it; leave out engine=, and they are processes"
        )


def whole_parameters(context: WorkerContext) -> list[tuple[str, torch.Tensor]]:
    """Returns all parameters of the model before they are divided: without memory, unless the optimizer needs it."""
    named = context.module.named_parameters()
    if context.model.optimizer.values:
        return [(name, each.detach().requires_grad_(each.requires_grad)) for name, each in named]
    return [(name, without_data(each)) for name, each in named]


def updater_of_parts(
    segments: Sequence[Segment],
    pieces: dict[str, torch.nn.Parameter],
    whole: Sequence[tuple[str, torch.Tensor]],
    context: WorkerContext,
) -> Updater:
    """Returns what updates a rank's segments; `pieces`, its parts by name, become the optimizer's parameters."""
    owned = [(segment, pieces[segment.parameter]) for segment in segments]
    for segment, piece in owned:
        assert piece.numel() == segment.stop - segment.start, (segment, piece.shape)
    updater = context.updater_over(owned, whole)
    pieces |= {segment.parameter: each for segment, each in zip(segments, updater.parameters, strict=True)}
    return updater


def sums_of(sharded: FullySharded, parts: int, *, stages: bool = False) -> GradientSum:
    """Returns how so many parts of a replica, of its stages where it has some, sum gradients."""
    again = sharded.reshard_after_forward is not False and not stages
    return GradientSum(0.5 if sharded.param_dtype else 1.0, overlap=True, parts=parts, gathers=1 + again)


def sharded_plan(
    name: str,
    options: Mapping[str, object],
    workers: int | None,
    model: ModelSpec,
    cluster: Cluster,
    replicas: int = 1,
    offload: bool = False,
) -> Plan:
    """Plans workers of which each has a part of every parameter, in one replica or in several that are alike.

    With `offload` the parts are in host memory.
    """
    require_sliceable(name, model)
    plan = data_parallel_plan(
        name,
        options,
        workers,
        model,
        cluster,
        copies=(0, 0),
        cut=lambda parameters, count: rows(parameters, count // replicas),
        spread=True,
    )
    for host in cluster.hosts:
        workers = sum(role.host == host.name for role in plan.roles)
        on_device = cluster.device != HOST
        require_parts_fit(plan, workers, replicas, model, host, on_device, on_device and not offload)
    return plan


def require_sliceable(name: str, model: ModelSpec) -> None:
    """Refuses an optimizer that needs whole parameters, with a UsageError."""
    refuse_coupled(name, model)
    if not model.sliceable:
        raise UsageError(
            "the job's optimizer needs whole parameters (it looks at matrices, or at blocks of elements), of which "
            f"each worker has a part under {name}; use one that treats every element alone (SGD, Adam), or mirrored"
        )
