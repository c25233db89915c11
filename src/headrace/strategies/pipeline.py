"""The model in stages, each on a worker of its own; a batch goes through micro-batch after micro-batch.

    compute                                   synchronize                         update
    forward and backward of the stage in      nothing between stages, but the     optimizer on each stage
    a schedule's order; activations and       norm of all gradients where they
    their gradients between stages            are clipped

`headrace.pipeline.schedules` draws the orders of the passes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from headrace.collectives.base import ProcessGroup
from headrace.devices import HOST
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.modules import TRACING
from headrace.pipeline.buffers import RunningStatistics
from headrace.pipeline.channels import Channels, MailChannels
from headrace.pipeline.partition import COSTS, Terms, costs, is_partition, read, split
from headrace.pipeline.runner import RECOMPUTE, Runner
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import PipelineSchedule, held_by_stage
from headrace.pipeline.schedules.transfers import check_schedule
from headrace.pipeline.stage import Stage, buffers_of, cut
from headrace.pipeline.stage_module import StageModule, edges
from headrace.pipeline.staged import PipelineExchange, StagedModel
from headrace.pipeline.trace.tracing import trace
from headrace.policies.behaviour import Behaviour, Stages
from headrace.policies.roles import MICRO_BATCHES_A_STAGE, require_memory, worker_roles
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.plan import Plan, Role, Segment, StageCost
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count, defer, refuse_coupled, refuse_derived_state, refuse_parts
from headrace.strategies.context import ModelProbe, WorkerContext, total_of
from headrace.strategies.deferred import make_own, require_same_parts
from headrace.strategies.refusals import STAGES, WHOLE_BATCH_NORM, Refusal
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.deferred.lending import lending
from headrace.training.exchange import Replica
from headrace.training.on_device.totals import Total
from headrace.training.whole_model import HALF
from headrace.trees import map_tensors

_CHUNKS = 2
"""Stages on a worker, where the schedule has several and none is said."""


@dataclass(frozen=True)
class Pipeline(Strategy):
    """A model that is cut into stages (GPipe's way).

    Attributes:
        stages: on how many workers; None for the launcher's processes or the machine's accelerators.
        micro_batches: into how many parts a batch is cut; "auto" for four a stage. A batch with fewer examples has
            fewer.
        schedule: in which order they go through: "gpipe", "1f1b", "zb_h1" and "zb_h2" (1F1B whose weights'
            gradients are made late); "interleaved" and "breadth_first", where each worker has `chunks` stages;
            "zb_v", "v_half" and "dualpipe_v", where each has two, the first worker the model's first and last; or one
            of one's own, "mine.py:MySchedule".
        recompute: what is run again for backward, so that activations need not be kept: "never" anything, "always"
            every forward pass, "except_last" all but those whose backward follows at once.
        partition: "auto", or of each stage, in order, how many layers it has, or their names.
        cost: what "auto" makes small of the worst stage: "time", "memory", or "both".
        limit_bytes: that a stage may take for parameters, gradients, optimizer and activations; None for any number.
        chunks: stages on each worker, where the schedule has several.
        deferred_batch_norm: update running statistics once a batch, not by each micro-batch.
        deferred: each worker makes the parameters of its own stages alone, bit for bit as the constructor does; see
            `FullySharded`.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.Pipeline(stages=2, micro_batches=4))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    stages: int | None = None
    micro_batches: int | str = "auto"
    schedule: str = "gpipe"
    recompute: str = "never"
    partition: str | Sequence[int | Sequence[str]] = "auto"
    cost: str = "time"
    limit_bytes: int | None = None
    chunks: int = _CHUNKS
    deferred_batch_norm: bool = True
    deferred: bool = False

    name = "pipeline"
    equals_one_device = True
    whole_model = False
    reads_parts = True
    divided = True

    def __post_init__(self) -> None:
        check_count("stages", self.stages)
        check_count("chunks", self.chunks)
        check_count("limit_bytes", self.limit_bytes)
        if not isinstance(self.deferred_batch_norm, bool):
            raise UsageError(f"deferred_batch_norm must be True or False, got {self.deferred_batch_norm!r}")
        defer(self, self.deferred)
        if self.micro_batches != "auto" and not (type(self.micro_batches) is int and self.micro_batches > 0):
            raise UsageError(f"micro_batches is 'auto', or a whole number of at least 1, got {self.micro_batches!r}")
        named = ("schedule", self.schedule, SCHEDULES), ("way to recompute", self.recompute, RECOMPUTE)
        for what, value, known in (*named, ("cost of a stage", self.cost, COSTS)):
            if value not in known:
                raise UnknownName(what, str(value), known)
        if self.chunks > _CHUNKS and SCHEDULES[self.schedule](2, 2, self.chunks).stages() == 2:
            raise UsageError(
                f"chunks={self.chunks} is for schedules that have several stages on each worker, and {self.schedule} "
                "has one; leave it out, or use schedule='interleaved' or 'breadth_first'"
            )
        if self.partition != "auto" and not is_partition(self.partition):
            raise UsageError(
                "partition is 'auto', or of each stage how many layers it has, [4, 4], or a list of their names, "
                f"[['stem', 'blocks.0'], ['head']], got {self.partition!r}"
            )

    def refusals(self) -> tuple[Refusal, ...]:
        return STAGES if self.micro_batches == 1 else (*STAGES, WHOLE_BATCH_NORM)

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        refuse_derived_state(self.name, probe.module, carries_frozen=True)
        roles = worker_roles(self.name, self.stages, probe.cluster, spread=True)
        global_batch_size = probe.global_batch_size
        if isinstance(self.micro_batches, int) and self.micro_batches > global_batch_size:
            raise UsageError(
                f"micro_batches={self.micro_batches} of a batch of {global_batch_size} examples would be empty; use "
                f"micro_batches={global_batch_size} or fewer, or 'auto'"
            )
        request = ProfileRequest(-(-global_batch_size // self._count(len(roles))), roles[0].threads)
        return replace(model, layers=probe.measure(request))

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles = worker_roles(self.name, self.stages, cluster, spread=True)
        ranks = len(roles)
        if ranks > 1:
            refuse_coupled(self.name, model)
            if model.optimizer.gradients:
                raise UsageError(
                    "the job's optimizer needs a gradient of every parameter, and a stage has those of its own alone; "
                    "leave out parameters whose grad is None in its step and hooks, or use mirrored"
                )
        # Each builds the whole model before it keeps its stages, unless it is made in parts.
        copies = model.copies if model.in_parts else max(ranks, model.copies)
        require_memory(self.name, copies * model.trainable_bytes, cluster, roles, model)
        schedule = self.schedule_of(ranks)
        if not type(schedule).__module__.startswith("headrace."):
            # Tests have checked headrace's own.
            check_schedule(self.schedule, schedule)
        terms = self._terms(schedule, roles, cluster)
        if isinstance(self.partition, str):
            partition = split(model, schedule.stages(), terms)
        else:
            partition = read(model.layers, self.partition, schedule.stages())
        rank_of = {name: schedule.rank_of(stage) for stage, names in enumerate(partition) for name in names}
        # Of a parameter that several stages use, the first rank that does is the owner.
        holder: dict[str, int] = {}
        for layer in model.layers:
            for name in layer.parameters:
                holder[name] = min(holder.get(name, ranks), rank_of[layer.name])
        stages = costs(model, partition, terms)
        _require_room(self.schedule, schedule, stages, roles, cluster)
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=tuple(replace(role, data_rank=0, stage=role.rank) for role in roles),
            shares=(1,),
            gradient_bytes=model.trainable_bytes,
            segments=tuple(Segment(spec.name, 0, spec.elements, holder.get(spec.name, 0)) for spec in model.trainable),
            partition=partition,
            stages=stages,
        )

    def behave(self, workers: int) -> Behaviour:
        count = self._count(workers)
        stages = Stages(
            workers, self.schedule, count, self.chunks,
            self._recomputed(count), self.partition, self.cost, self.limit_bytes,
        )  # fmt: skip
        return Behaviour(division=stages, not_rehearsed=refuse_parts(self.equals_one_device))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        compute = self.compute(plan, context)
        # Over all parameters: groups and settings are those of the whole model, and what is not here has no gradient.
        updater = context.updater_of(Segment(name, 0, each.numel(), rank) for name, each in compute.trained.items())
        return Replica(compute, PipelineExchange(plan, rank, compute, context.clipper(), updater))

    def compute(
        self,
        plan: Plan,
        context: WorkerContext,
        total: Total | None = None,
        everyone: ProcessGroup | None = None,
    ) -> StagedModel:
        """Builds what one rank runs, and releases the other ranks' parts of its module.

        The group of `context` is the replica; `everyone` are all workers, and `total` sums numbers over those whose
        losses are weighed together. Both are None where there is one replica.
        """
        group, device = context.group, context.device
        if self.recompute != "never":
            context.require_own_generators()
        # This also makes threads wait: one that builds its model while another traces would build something else.
        broadcast(context.module, context.device_group() or group)
        require_same_parts(context.module, group)
        with TRACING, lending(context.module):
            sample = map_tensors(lambda tensor: tensor.to(device), context.sample())
            # The cuts were checked before the start.
            traced = trace(context.module, sample, context.objective.inputs, check=False)
        # Also other replicas: what a thread changes in its module while another traces would get into that graph.
        (everyone or group).barrier()
        stages = cut(traced, plan.partition)
        schedule = self.schedule_of(group.world)
        placement, count = schedule.placement(), schedule.micro_batches
        part = StageModule(context.module, stages, placement, group.rank)
        part.release()
        # What was traced is in cycles of references: the whole model, and results of its forward.
        gc.collect()
        make_own(context.module, context.device, context.weights, part.parameters())
        channels = _channels(schedule, stages, context)
        context.closing.callback(channels.close)
        statistics = RunningStatistics(context.module, self.deferred_batch_norm and count > 1)
        half, actions = HALF.get(context.options.precision), schedule.actions(group.rank)
        runner = Runner(part.stages, channels, actions, self.recompute, statistics, part.trained_stages(), half)
        total = total or total_of(context)
        return StagedModel(traced, part, runner, channels, context.objective, count, total, context.scale)

    def _count(self, ranks: int) -> int:
        return self.micro_batches if isinstance(self.micro_batches, int) else MICRO_BATCHES_A_STAGE * ranks

    def _recomputed(self, count: int) -> float:
        """Returns the part of so many micro-batches whose forward is done again."""
        return {"never": 0.0, "except_last": (count - 1) / count, "always": 1.0}[self.recompute]

    def schedule_of(self, ranks: int) -> PipelineSchedule:
        """Returns the order of passes on so many ranks."""
        return SCHEDULES[self.schedule](ranks, self._count(ranks), self.chunks)

    def _terms(self, schedule: PipelineSchedule, roles: Sequence[Role], cluster: Cluster) -> Terms:
        count = schedule.micro_batches
        hosts = [roles[rank].host for rank in schedule.placement()]
        return Terms(
            self.cost,
            held=held_by_stage(schedule),
            limit_bytes=self.limit_bytes,
            again=self._recomputed(count),
            # The first stage has no cut before it.
            link_bytes_per_s=(math.inf, *cluster.bandwidths(list(pairwise(hosts)))),
        )


def _require_room(
    name: str, schedule: PipelineSchedule, stages: Sequence[StageCost], roles: Sequence[Role], cluster: Cluster
) -> None:
    """Refuses a schedule whose ranks hold more on a host than it has; what devices have is not known here."""
    for host in cluster.hosts:
        here = [
            stage
            for stage, rank in enumerate(schedule.placement())
            if roles[rank].host == host.name and roles[rank].device == HOST
        ]
        needed = sum(stages[stage].bytes for stage in here)
        if needed > host.memory_bytes:
            most = max(here, key=lambda stage: stages[stage].bytes)
            raise InfeasiblePlan(
                f"the stages on {host.name} need {needed:,} bytes with schedule={name!r}, and it has "
                f"{host.memory_bytes:,} left: stage {most} needs {stages[most].bytes:,} and holds "
                f"{held_by_stage(schedule)[most]} of {schedule.micro_batches} micro-batches at a time; use "
                "schedule='1f1b', recompute='always', or a smaller global_batch_size"
            )


def _channels(schedule: PipelineSchedule, stages: Sequence[Stage], context: WorkerContext) -> Channels:
    """Returns the channels of a rank: between devices where these are connected, else through the hosts' memory."""
    devices, found = context.device_group(), edges(stages, schedule)
    if context.group.channels:
        made: Channels = context.group.channels(found, schedule, context.module)
        return made
    if devices is None or devices.peers is None:
        return MailChannels(found, context.group, context.device, buffers_of(stages))
    # Not on CPUs.
    from headrace.pipeline.device_channels import DeviceChannels

    return DeviceChannels(found, context.group, context.device, devices.peers, schedule, stages)
