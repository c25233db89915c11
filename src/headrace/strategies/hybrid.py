"""Several replicas, each of which several devices hold together.

    compute             synchronize                                        update
    the inner's         the inner's, then the outer's over what each       the outer's
                        inner rank holds itself

    replica 0   rank 0: slice 0 ── inner ── rank 1: slice 1
                      │                           │
                    outer                       outer
                      │                           │
    replica 1   rank 2: slice 0 ── inner ── rank 3: slice 1

Each rank talks of parameters to those alone that hold the same ones: so did the machines of a DistBelief replica
(Dean et al., 2012, section 4.1), and of gradients there is less to exchange by as many ranks as a replica has.

Of up to four levels the last numbers ranks fastest, and exchanges most: it should be inside a host (Narayanan et al.,
"Efficient large-scale language model training on GPU clusters", 2021, section 3.2):

    hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.Pipeline(2), hr.TensorParallel(2))
    rank      8 x replica   + 4 x part          + 2 x stage     + slice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from math import prod

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective
from headrace.errors import InfeasiblePlan, UsageError
from headrace.modules import not_sent
from headrace.parameter_server.server.server import Server
from headrace.pipeline.staged import SlicedStages, StagedReplica
from headrace.policies.behaviour import Behaviour, Stages
from headrace.policies.roles import require_memory, worker_and_server_roles, worker_roles
from headrace.policies.segments import evenly, everywhere, rows
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.plan import EVERY_WORKER, Plan, ProcessCounts, Role
from headrace.strategies.checks import refuse_derived_state, refuse_parts
from headrace.strategies.context import ModelProbe, WorkerContext, among, total_of
from headrace.strategies.context_hybrid import ring_behaviour, ring_plan, ring_replica
from headrace.strategies.context_parallel import ContextParallel
from headrace.strategies.deferred import make_own
from headrace.strategies.expert_hybrid import expert_behaviour, expert_replica, inspect_experts
from headrace.strategies.expert_parallel import ExpertParallel, expert_plan
from headrace.strategies.fully_sharded import FullySharded, require_sliceable, sharded_plan, sums_of
from headrace.strategies.hybrid_levels import by_kind, check_levels, refuse_tied
from headrace.strategies.hybrid_ranks import (
    ENOUGH_BYTES,
    RankGroups,
    alone,
    cluster_of,
    slices_of,
    stages_of,
    with_slices,
)
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.parameter_averaging import ParameterAveraging
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.refusals import Refusal
from headrace.strategies.served import ServedStrategy, ServerContext
from headrace.strategies.served_hybrid import Served, in_parts, of_outer, served_plan, served_replica
from headrace.strategies.sharded_memory import require_accelerators
from headrace.strategies.strategy import Strategy, describe_options
from headrace.strategies.tensor_parallel import TensorParallel, stored_slices
from headrace.tensor_parallel.recording import Trial
from headrace.training.exchange import Replica
from headrace.training.whole_model import ModelParallelGroup


@dataclass(frozen=True, init=False)
class Hybrid(ServedStrategy):
    """An outer strategy whose workers are replicas of an inner one, which may be a hybrid itself.

    Ranks go replica by replica: with 2 devices inside, ranks 0 and 1 hold the first one.

    Attributes:
        outer: what the replicas do with each other: `Mirrored`, `ParameterAveraging` by all-reduce,
            `ParameterServer` or `Downpour`, each of whose servers has shards of one stage or slice, or `FullySharded`,
            which divides the stages or slices among them; its `workers` are replicas.
        inner: what a replica is: `TensorParallel`, `Pipeline`, or a hybrid of these; or `FullySharded`, alone or around
            them, under an outer `Mirrored` (torch's HSDP); or `ContextParallel` or `ExpertParallel`, under these two.
            `Hybrid(a, b, c)` is `Hybrid(a, Hybrid(b, c))`.

    Raises:
        UsageError: these cannot be combined.

    Examples:
        >>> two_by_two = hr.Hybrid(outer=hr.Mirrored(workers=2), inner=hr.Pipeline(stages=2))
        >>> hr.fit(job, two_by_two).plan.workers
        4
        >>> hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.TensorParallel(2)).processes().workers
        8
    """

    outer: Strategy
    inner: Strategy

    name = "hybrid"
    whole_model = False
    reads_parts = True
    divided = True

    def __init__(self, outer: Strategy, inner: Strategy, *inside: Strategy) -> None:
        check_levels([level for each in (outer, inner, *inside) for level in levels_of(each)])
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "inner", Hybrid(inner, *inside) if inside else inner)
        object.__setattr__(self, "in_parts", any(each.in_parts for each in levels_of(self)))

    @property
    def equals_one_device(self) -> bool:
        return all(each.equals_one_device for each in levels_of(self))

    def processes(self) -> ProcessCounts:
        outer = self.outer.processes()
        return replace(outer, workers=outer.workers * self.inner.processes().workers)

    def sparse_names(self) -> tuple[str, ...]:
        return self.outer.sparse_names()

    def imports(self) -> tuple[str, ...]:
        return tuple(name for each in levels_of(self) for name in each.imports())

    def refusals(self) -> tuple[Refusal, ...]:
        why = (
            "batch_norm='sync' normalises over a whole batch, of which replicas that are pipelines have pieces of parts"
        )
        pieces = Refusal("batch_norm", "sync", why, "use batch_norm='local'")
        own = (pieces,) if by_kind(levels_of(self))[2] else ()
        return *(refusal for each in levels_of(self) for refusal in each.refusals()), *own

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        refuse_derived_state(self.name, probe.module, {*map(type, levels_of(self))} <= {Mirrored, FullySharded})
        if isinstance(levels_of(self)[-1], ExpertParallel):
            return inspect_experts(levels_of(self), model, probe)
        if isinstance(levels_of(self)[-1], ContextParallel):
            for each in levels_of(self)[1:]:
                model = each.inspect_model(model, probe)
            return model
        counts, (_, sharded, pipeline, tensor) = self._counts(probe.cluster), by_kind(levels_of(self))
        if sharded and not pipeline:
            return sharded.inspect_model(model, probe)
        replicas, stages, slices = counts[0] * counts[1], counts[2], counts[3]
        if not pipeline:
            if isinstance(self.outer, Served) and tensor:
                # Servers must know the part that each device will hold.
                cuts = tensor.cuts(probe.module, slices, Trial(probe.sample(), probe.inputs))
                parameters = (replace(each, cut=cuts.get(each.name)) for each in model.parameters)
                return replace(model, parameters=tuple(parameters))
            return model

        def measure(request: ProfileRequest) -> tuple[LayerSpec, ...]:
            return probe.measure(replace(request, threads=self._roles(probe.cluster, prod(counts))[0].threads))

        size = max(1, probe.global_batch_size // replicas)
        cluster = alone(probe.cluster, stages_of(replicas, stages, slices))
        inner = replace(probe, global_batch_size=size, cluster=cluster, measure=measure)
        model = pipeline.inspect_model(model, inner)
        if probe.clip_norm is not None and not sharded and not isinstance(self.outer, Served):
            refuse_tied(pipeline, pipeline.plan(model, cluster), model, probe.clip_norm)
        return model

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        counts, (_, sharded, pipeline, tensor) = self._counts(cluster), by_kind(levels_of(self))
        outer, parts, stages, slices = counts
        replicas, devices, options = outer * parts, stages * slices, describe_options(self)
        if isinstance(self.outer, Mirrored):
            self.outer.require_network(self.name, cluster)
        offload = sharded is not None and require_accelerators(sharded.offload, cluster)
        if isinstance(levels_of(self)[-1], ContextParallel):
            return ring_plan(self.name, options, levels_of(self), counts, model, cluster)
        if isinstance(levels_of(self)[-1], ExpertParallel):
            return expert_plan(self.name, options, prod(counts), model, cluster, outer, parts)
        if tensor and sharded:
            # Refuses what cannot be sliced.
            tensor.plan(model, alone(cluster, slices_of(replicas * stages, slices)))
        if sharded and not pipeline:
            plan = sharded_plan(self.name, options, prod(counts), model, cluster, outer, offload)
            return with_slices(plan, rows(model.parameters, parts), slices) if tensor else plan
        roles = self._roles(cluster, prod(counts))
        inner = (pipeline or levels_of(self)[-1]).plan(model, alone(cluster, stages_of(replicas, stages, slices)))
        if isinstance(self.outer, Served):
            served = served_plan(self.name, self.outer, inner, model, cluster, (replicas, devices))
            return replace(served, options=options)
        # Each builds the whole model before it keeps a part; then there are the copies of the outer's.
        built = 0 if model.in_parts else len(roles)
        needed, segments = max(3 * built, model.copies * replicas), everywhere(model.parameters)
        if sharded:
            require_sliceable(self.name, model)
            # In a round each replica has parameters and gradients, and all together the parts and their state.
            needed = max(built, 2 * replicas + model.copies * outer)
            owners = {segment.parameter: segment.owner * slices for segment in inner.segments}
            segments = tuple(
                replace(each, owner=each.owner * devices + owners[each.parameter])
                for each in evenly(model.parameters, parts)
            )
        require_memory(self.name, needed * model.trainable_bytes, cluster, roles, model)
        return replace(
            inner,
            strategy=self.name,
            options=options,
            roles=tuple(replace(role, data_rank=role.rank // devices, stage=role.rank % devices) for role in roles),
            shares=(1,) * replicas,
            segments=segments,
            slices=slices if pipeline else 1,
        )

    def behave(self, workers: int) -> Behaviour:
        for each in levels_of(self):
            if each.behave(1).not_simulated:
                return Behaviour(
                    not_simulated=f"a hybrid with {each.name} cannot be simulated; use one without it",
                    not_rehearsed=refuse_parts(self.equals_one_device),
                )
        no_rehearsal = refuse_parts(self.equals_one_device)
        if isinstance(levels_of(self)[-1], ContextParallel | ExpertParallel):
            known = prod(_count_of(each) or 1 for each in levels_of(self)[:-1])
            inner = _count_of(levels_of(self)[-1]) or max(1, workers // known)
            of_levels = expert_behaviour if isinstance(levels_of(self)[-1], ExpertParallel) else ring_behaviour
            return replace(of_levels(levels_of(self), workers, inner), not_rehearsed=no_rehearsal)
        data, sharded, pipeline, tensor = by_kind(levels_of(self))
        stages, slices = (_count_of(each) or 1 if each else 1 for each in (pipeline, tensor))
        groups = max(1, workers // (stages * slices))
        division = None
        if pipeline:
            division = pipeline.behave(stages).division
            assert isinstance(division, Stages)
            division = replace(division, slices=slices)
        elif tensor:
            division = tensor.behave(slices).division
        behaviour = data.behave(groups) if data else Behaviour()
        if sharded:
            parts = _count_of(sharded) or max(1, groups // (_count_of(data) or 1 if data else 1))
            behaviour = Behaviour(sums_of(sharded, parts, stages=pipeline is not None))
        return replace(behaviour, division=division, not_rehearsed=no_rehearsal)

    def _roles(self, cluster: Cluster, count: int) -> tuple[Role, ...]:
        if isinstance(self.outer, Served):
            return worker_and_server_roles(self.name, count, self.outer.servers, cluster)
        return worker_roles(self.name, count, cluster, spread=True)

    def _counts(self, cluster: Cluster) -> tuple[int, int, int, int]:
        """Returns how many replicas, parts, stages and slices there are: 1 of what the levels do not have.

        Raises:
            InfeasiblePlan: neither options nor launcher say, or they contradict each other.
        """
        counts = [_count_of(each) for each in levels_of(self)]
        if None in counts:
            known = prod(count or 1 for count in counts)
            ranks = cluster.ranks and cluster.ranks - (self.outer.servers if isinstance(self.outer, Served) else 0)
            if ranks is None or ranks < 1 or counts.count(None) > 1 or ranks % known:
                started = f"the launcher started {cluster.ranks}" if cluster.ranks else "no launcher says how many"
                said = f"{counts[0] or '?'} replicas on {' x '.join(str(each or '?') for each in counts[1:])}"
                raise InfeasiblePlan(
                    f"a hybrid of {said} devices each, and {started}; say {'both' if len(counts) == 2 else 'all'}: "
                    "hr.Hybrid(hr.Mirrored(workers=2), hr.TensorParallel(devices=2))"
                )
            counts = [count or ranks // known for count in counts]
        left = iter(counts)
        outer, parts, stages, slices = (1 if level is None else next(left) or 1 for level in by_kind(levels_of(self)))
        return outer, parts, stages, next(left, None) or slices

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        everyone, (outer, sharded, pipeline, tensor) = context.group, by_kind(levels_of(self))
        groups = RankGroups(self._counts(cluster_of(plan)), rank)
        if isinstance(levels_of(self)[-1], ContextParallel):
            return ring_replica(levels_of(self), plan, groups, context)
        if isinstance(levels_of(self)[-1], ExpertParallel):
            return expert_replica(levels_of(self), groups, context)
        mates = everyone.subgroup(groups.mates)
        # Ranks that get all parameters from the first of their mates read none.
        follows = bool(pipeline if sharded else outer and outer.begins_alike)
        if context.weights and follows and everyone.fixed and mates.rank:
            context = replace(context, weights=context.weights.only(dict(not_sent(context.module, plan))))
        inside = self._inside(plan, groups, context, mates) if pipeline or tensor else None
        connected = among(context, mates, groups.mates)
        own = context
        if inside:
            inside.connects = among(context, inside.group, groups.devices), context.device_group
            values = stored_slices(context, inside)
            own = replace(
                context, model=inside.model, group=mates, device_group=connected, inside=inside, weights=values
            )
            if not sharded and not pipeline:
                make_own(context.module, context.device, values)
        if sharded:
            within, alike = everyone.subgroup(groups.parts), everyone.subgroup(groups.replicas)
            others: Collective | None = (among(context, alike, groups.replicas)() or alike) if outer else None
            carrier = among(context, within, groups.parts)()
            if not pipeline:
                return replace(
                    sharded.in_replicas(own, within, carrier, others), slices=inside.slices if inside else None
                )
            assert inside is not None
            # What several ranks hold is measured by the first of them.
            first = rank - groups.slice
            measured = frozenset(each.parameter for each in plan.segments if each.owner == first)
            measured -= inside.repeated if groups.slice else frozenset()
            return replace(sharded.over_stages(rank, own, within, carrier, others, measured), slices=inside.slices)
        assert inside is not None
        if not outer:
            exchange = LocalExchange(everywhere(own.model.parameters), own)
            return Replica(own.whole_model(), exchange, slices=inside.slices)
        role = plan.role(rank)
        if isinstance(self.outer, Served):
            # Replicas that are threads share one generator, and while one is traced no other may go on and draw.
            everyone.barrier()
            return replace(served_replica(self.outer, plan, role, own), slices=inside.slices)
        # To the outer strategy each replica is a worker; memory was asked for before.
        replicas = Cluster((Host(plan.roles[0].host, mates.world, ENOUGH_BYTES),))
        planned = self.outer.plan(own.model, replicas)
        assert all(segment.owner == EVERY_WORKER for segment in planned.segments)
        return replace(self.outer.replica(planned, role.data_rank, own), slices=inside.slices)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        model = in_parts(context.model, plan.workers // plan.replicas)
        assert isinstance(self.outer, ServedStrategy)
        return self.outer.server(of_outer(plan, self.outer), rank, replace(context, model=model))

    def _inside(
        self, plan: Plan, groups: RankGroups, context: WorkerContext, mates: ProcessGroup
    ) -> ModelParallelGroup:
        """Divides the module in place, into slices and then into stages; returns how the ranks of a replica compute."""
        everyone, (_, _, pipeline, tensor) = context.group, by_kind(levels_of(self))

        def near(members: Sequence[int]) -> WorkerContext:
            group = everyone.subgroup(members)
            return replace(context, group=group, device_group=among(context, group, members))

        if tensor and pipeline and isinstance(everyone, ThreadCollective):
            raise UsageError(
                "one thread of a process at a time can record the forward that stages are cut from, and slices of a "
                "layer compute together: a Pipeline around TensorParallel is not for ThreadEngine; leave out engine=, "
                "and workers are processes"
            )
        sliced = tensor.inside(near(groups.slices), everyone, mates) if tensor else None
        context = replace(context, weights=stored_slices(context, sliced))
        if not pipeline:
            assert sliced is not None
            return sliced
        # Contexts of a replica's stages, and of all that have this rank's slice.
        contexts = near(groups.stages), near(groups.column) if sliced else context
        staged = self._stages(pipeline, plan, contexts, everyone, mates, sliced)
        return SlicedStages(staged, sliced, everyone.subgroup(groups.devices)) if sliced else staged

    def _stages(
        self,
        pipeline: Pipeline,
        plan: Plan,
        contexts: tuple[WorkerContext, WorkerContext],
        everyone: ProcessGroup,
        mates: ProcessGroup,
        sliced: ModelParallelGroup | None,
    ) -> StagedReplica:
        near, column = contexts
        # A loss is weighed over all replicas, where these synchronize in every round.
        total = total_of(column if isinstance(self.outer, Mirrored | FullySharded) else near)
        compute = pipeline.compute(plan, near, total, everyone)
        compute.mates = mates
        return StagedReplica(compute, near.group, everyone, sliced.model if sliced else near.model)


def levels_of(strategy: Strategy) -> tuple[Strategy, ...]:
    """Returns the strategies of a hybrid, from the outermost to the innermost; of another one itself."""
    return (strategy.outer, *levels_of(strategy.inner)) if isinstance(strategy, Hybrid) else (strategy,)


def _count_of(strategy: Strategy) -> int | None:
    """Returns how many ranks a level has; None where its options do not say."""
    if isinstance(strategy, Hybrid):
        counts = [_count_of(each) for each in levels_of(strategy)]
        return None if None in counts else prod(count or 1 for count in counts)
    if isinstance(strategy, TensorParallel):
        return strategy.devices
    if isinstance(strategy, Pipeline):
        return strategy.stages
    assert isinstance(
        strategy, Mirrored | ParameterAveraging | Served | FullySharded | ContextParallel | ExpertParallel
    )
    return strategy.workers


def rule_of(strategy: Strategy) -> Strategy:
    """Returns the strategy by which replicas are updated: that of a hybrid is its outer one."""
    return strategy.outer if isinstance(strategy, Hybrid) else strategy


def one_worker(strategy: Strategy) -> Strategy | None:
    """Returns a strategy with one worker or replica, if its updates are then those of one device; None for most."""
    rule = rule_of(strategy)
    if rule.alone is None:
        return None
    assert is_dataclass(rule)
    one = replace(rule, **rule.alone)
    return replace(strategy, outer=one) if isinstance(strategy, Hybrid) else one
