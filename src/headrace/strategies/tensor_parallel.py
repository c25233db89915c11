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

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from headrace.collectives.base import ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import PeerLost, UnknownName, UsageError
from headrace.modules import copy_module, describe
from headrace.policies.behaviour import Behaviour, Slices
from headrace.policies.roles import require_memory, worker_roles
from headrace.policies.segments import everywhere
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count, defer, refuse_coupled, refuse_derived_state, refuse_parts
from headrace.strategies.context import ModelProbe, WorkerContext
from headrace.strategies.deferred import make_own, require_same_parts
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.refusals import Refusal, one_program
from headrace.strategies.strategy import Strategy, describe_options
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.replica import RewrittenModel, SlicedReplica
from headrace.tensor_parallel.rewriting import RULES, split
from headrace.training.exchange import Replica
from headrace.training.whole_model import ModelParallelGroup
from headrace.trees import map_tensors

if TYPE_CHECKING:
    from headrace.weights.reading import StoredValues


def stored_slices(context: WorkerContext, inside: ModelParallelGroup | None) -> StoredValues | None:
    """Returns what reads a rank's slices of the model's stored values; None where there are none to read."""
    made = inside.slices if inside else None
    if context.weights is None or not isinstance(made, RewrittenModel):
        return context.weights
    return context.weights.sliced(made.runs, made.group.rank, made.group.world)


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
        sequence: divide what is between split blocks along the sequence: norms, dropout, residual sums.
        deferred: each device makes one parameter after the other, bit for bit as the constructor does, and keeps its
            slice; see `FullySharded`.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.TensorParallel(devices=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    devices: int | None = None
    rules: str | Mapping[str, str] = "auto"
    sequence: bool = False
    deferred: bool = False

    name = "tensor_parallel"
    equals_one_device = True
    reads_parts = True
    whole_model = False
    divided = True
    collectives = True

    def __post_init__(self) -> None:
        check_count("devices", self.devices)
        if not isinstance(self.sequence, bool):
            raise UsageError(f"sequence must be True or False, got {self.sequence!r}")
        defer(self, self.deferred)
        if isinstance(self.rules, str) and self.rules != "auto":
            raise UsageError(f"rules must be 'auto' or a dict such as {{'head.*': 'column'}}, got {self.rules!r}")
        for kind in () if isinstance(self.rules, str) else self.rules.values():
            if kind not in RULES:
                raise UnknownName("rule", kind, RULES)

    def refusals(self) -> tuple[Refusal, ...]:
        return (one_program("split layers communicate in the middle of it"),)

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        refuse_derived_state(self.name, probe.module)
        return model

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles = worker_roles(self.name, self.devices, cluster, spread=True)
        refuse_coupled(self.name, model)
        if not model.sliceable:
            raise UsageError(
                "the job's optimizer needs whole parameters (it looks at matrices, or at blocks of elements), of which "
                f"each device has a part under {self.name}; use one that treats every element alone (SGD, Adam), or "
                "mirrored"
            )
        if model.optimizer.placed:
            raise UsageError(
                "the state that the job's optimizer makes in its constructor goes by an element's place in its "
                f"parameter, and {self.name} makes it over slices; use mirrored, or fully_sharded"
            )
        # Each builds the whole model before it keeps a part, and how small the parts are is not known yet.
        built = 1 if model.in_parts else 2 * len(roles)
        needed = max(built, model.copies) * model.trainable_bytes
        require_memory(self.name, needed, cluster, roles, model)
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=tuple(replace(role, data_rank=0, stage=role.rank) for role in roles),
            shares=(1,),
            gradient_bytes=model.trainable_bytes,
            segments=everywhere(model.parameters),
        )

    def behave(self, workers: int) -> Behaviour:
        return Behaviour(division=Slices(workers), not_rehearsed=refuse_parts(self.equals_one_device))

    def cuts(self, module: nn.Module, devices: int, trial: Trial) -> dict[str, int]:
        """Returns the dim along which each parameter will be cut, as the devices decide; the module stays as it is."""
        return {name: cut.dim for name, cut in self.tried(module, devices, trial)[0].cuts.items()}

    def tried(self, module: nn.Module, devices: int, trial: Trial) -> list[RewrittenModel]:
        """Returns what each device would have of a module, which stays as it is; the devices are threads."""
        everyone = ThreadGroup(devices)
        made: dict[int, RewrittenModel] = {}
        errors: dict[int, Exception] = {}

        def device(rank: int) -> None:
            try:
                made[rank] = split(copies[rank], self.rules, ThreadCollective(everyone, rank), trial)
            except Exception as error:
                errors[rank] = error
                everyone.abort(rank)

        copies = [copy_module(module) for _ in range(devices)]
        threads = [threading.Thread(target=device, args=(rank,)) for rank in range(devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors.values() if not isinstance(error, PeerLost)), errors[min(errors)])
        return [made[rank] for rank in range(devices)]

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        alone = ThreadCollective(ThreadGroup(1), 0)
        inside = self.inside(context, context.group, alone)
        inside.connects = context.device_group, context.device_group
        make_own(context.module, context.device, stored_slices(context, inside))
        own = replace(context, model=inside.model, group=alone, device_group=lambda: None, inside=inside)
        exchange = LocalExchange(everywhere(own.model.parameters), own)
        return Replica(own.whole_model(), exchange, slices=inside.slices)

    def inside(self, context: WorkerContext, everyone: ProcessGroup, mates: ProcessGroup) -> ModelParallelGroup:
        """Splits a module in place over the ranks of one replica.

        `everyone` are the ranks of all replicas, `mates` those that hold the same slice.
        """
        group = context.group
        context.require_own_generators()
        broadcast(context.module, context.device_group() or group)
        require_same_parts(context.module, group)
        batch = map_tensors(lambda each: each.to(context.device), context.sample())
        trial = Trial(batch, context.objective.inputs)
        # A trial may keep torch from compiling, for all threads, of which none may run a model meanwhile.
        group.barrier()
        made = split(context.module, self.rules, context.device_group() or group, trial, self.sequence)
        group.barrier()
        model = replace(describe(context.module), sliceable=context.model.sliceable, optimizer=context.model.optimizer)
        return SlicedReplica(made, group, everyone, mates, model)
