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
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass, replace

from headrace.collectives.base import ProcessGroup
from headrace.errors import InfeasiblePlan, UsageError
from headrace.parameter_server.server.server import Server
from headrace.pipeline.staged import StagedReplica
from headrace.policies.behaviour import Behaviour
from headrace.policies.roles import require_memory, worker_and_server_roles, worker_roles
from headrace.policies.segments import evenly, everywhere
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.plan import EVERY_WORKER, Plan, ProcessCounts, Role, Segment
from headrace.strategies.checks import refuse_derived_state, refuse_parts
from headrace.strategies.context import ModelProbe, WorkerContext, among, total_of
from headrace.strategies.fully_sharded import FullySharded, require_sliceable, sharded_plan
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.parameter_averaging import ParameterAveraging
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.refusals import Refusal
from headrace.strategies.served import ServedStrategy, ServerContext
from headrace.strategies.served_hybrid import Served, check_outer, in_parts, of_outer, served_plan, served_replica
from headrace.strategies.strategy import Strategy, describe_options
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.tensor_parallel.recording import Trial
from headrace.training.exchange import Replica
from headrace.training.whole_model import ModelParallelGroup

_ENOUGH_BYTES = 2**62


@dataclass(frozen=True)
class Hybrid(ServedStrategy):
    """An outer strategy whose workers are replicas of an inner one.

    Ranks go replica by replica: with 2 devices inside, ranks 0 and 1 hold the first one.

    Attributes:
        outer: what the replicas do with each other: `Mirrored`, `ParameterAveraging` by all-reduce,
            `ParameterServer` or `Downpour`, each of whose servers has shards of one stage or slice, or, where they are
            pipelines, `FullySharded`, which divides each stage among them; its `workers` are replicas.
        inner: what a replica is: `TensorParallel` or `Pipeline`; or `FullySharded`, under an outer `Mirrored` (torch's
            HSDP), whose ranks each compute on a share of their own.

    Raises:
        UsageError: these two cannot be combined.

    Examples:
        >>> two_by_two = hr.Hybrid(outer=hr.Mirrored(workers=2), inner=hr.Pipeline(stages=2))
        >>> hr.fit(job, two_by_two).plan.workers
        4
    """

    outer: Strategy
    inner: Strategy

    name = "hybrid"
    whole_model = False
    divided = True

    def __post_init__(self) -> None:
        if not isinstance(self.inner, TensorParallel | Pipeline | FullySharded):
            raise UsageError(
                "the inner strategy of a hybrid must be hr.TensorParallel(...), hr.Pipeline(...) or "
                f"hr.FullySharded(...), which hold one model on several devices, got {self.inner!r}"
            )
        if not isinstance(self.outer, Mirrored | ParameterAveraging | Served | FullySharded):
            raise UsageError(
                "the outer strategy of a hybrid must be hr.Mirrored(...), hr.ParameterAveraging(...), "
                f"hr.ParameterServer(...), hr.Downpour(...) or hr.FullySharded(...), got {self.outer!r}"
            )
        if isinstance(self.inner, FullySharded):
            _check_sharded(self.outer)
        if isinstance(self.outer, FullySharded):
            if not isinstance(self.inner, Pipeline):
                raise UsageError(
                    "hr.FullySharded(...) as the outer strategy divides the stages of hr.Pipeline(...), got the inner "
                    f"strategy {self.inner!r}; use hr.Mirrored(...) around it"
                )
            self.outer.check_stages()
        if isinstance(self.outer, Mirrored | ParameterAveraging) and self.outer.min_workers is not None:
            raise UsageError(
                f"min_workers={self.outer.min_workers} lets workers come and go one by one, and the ranks of a replica "
                "cannot; leave it out"
            )
        if isinstance(self.outer, Served):
            check_outer(self.outer, self.inner)
        if isinstance(self.outer, Mirrored) and self.outer.balance != "equal":
            raise UsageError(
                f"balance={self.outer.balance!r} compares workers that each have the whole model, and "
                f"{self.inner.name} divides it; use balance='equal'"
            )
        if isinstance(self.outer, ParameterAveraging) and self.outer.via != "all_reduce":
            raise UsageError(
                f"via={self.outer.via!r} lets workers come and go one by one, and the ranks of a replica cannot; use "
                "via='all_reduce'"
            )
        if isinstance(self.outer, ParameterAveraging) and not isinstance(self.outer.period, int):
            raise UsageError(
                f"period={self.outer.period!r} adapts to what the ranks of one slice measure, and all slices of a "
                "replica must synchronize after the same rounds; give a number such as period=16"
            )

    @property
    def equals_one_device(self) -> bool:
        return self.outer.equals_one_device and self.inner.equals_one_device

    def processes(self) -> ProcessCounts:
        outer = self.outer.processes()
        return replace(outer, workers=outer.workers * self.inner.processes().workers)

    def sparse_names(self) -> tuple[str, ...]:
        return self.outer.sparse_names()

    def imports(self) -> tuple[str, ...]:
        return *self.outer.imports(), *self.inner.imports()

    def refusals(self) -> tuple[Refusal, ...]:
        why = (
            "batch_norm='sync' normalises over a whole batch, of which replicas that are pipelines have pieces of parts"
        )
        pieces = Refusal("batch_norm", "sync", why, "use batch_norm='local'")
        own = (pieces,) if isinstance(self.inner, Pipeline) else ()
        return (*self.outer.refusals(), *self.inner.refusals(), *own)

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        refuse_derived_state(self.name, probe.module)
        replicas, devices = self._counts(probe.cluster)
        if isinstance(self.inner, FullySharded):
            return self.inner.inspect_model(model, probe)
        if isinstance(self.outer, Served) and isinstance(self.inner, TensorParallel):
            # Servers must know the part that each device will hold.
            cuts = self.inner.cuts(probe.module, devices, Trial(probe.sample(), probe.inputs))
            return replace(model, parameters=tuple(replace(each, cut=cuts.get(each.name)) for each in model.parameters))

        def measure(request: ProfileRequest) -> tuple[LayerSpec, ...]:
            return probe.measure(replace(request, threads=self._roles(probe.cluster, replicas * devices)[0].threads))

        size = max(1, probe.global_batch_size // replicas)
        inner = replace(probe, global_batch_size=size, cluster=_alone(probe.cluster, devices), measure=measure)
        return self.inner.inspect_model(model, inner)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        replicas, devices = self._counts(cluster)
        if isinstance(self.outer, Mirrored):
            self.outer.require_network(self.name, cluster)
        if isinstance(self.inner, FullySharded):
            return sharded_plan(self.name, describe_options(self), replicas * devices, model, cluster, replicas)
        roles = self._roles(cluster, replicas * devices)
        inner = self.inner.plan(model, _alone(cluster, devices))
        if isinstance(self.outer, Served):
            served = served_plan(self.name, self.outer, inner, model, cluster, (replicas, devices))
            return replace(served, options=describe_options(self))
        # Each builds the whole model before it keeps a part; then there are the copies of the outer's.
        needed, segments = max(3 * len(roles), model.copies * replicas), everywhere(model.parameters)
        if isinstance(self.outer, FullySharded):
            require_sliceable(self.name, model)
            # In a round each replica has parameters and gradients, and all together the parts and their state.
            needed, segments = max(len(roles), 2 * replicas + model.copies), _divided(inner, model, replicas)
        require_memory(self.name, needed * model.trainable_bytes, cluster, roles, model)
        return replace(
            inner,
            strategy=self.name,
            options=describe_options(self),
            roles=tuple(replace(role, data_rank=role.rank // devices, stage=role.rank % devices) for role in roles),
            shares=(1,) * replicas,
            segments=segments,
        )

    def behave(self, workers: int) -> Behaviour:
        devices = self._devices() or 1
        outer, inner = self.outer.behave(max(1, workers // devices)), self.inner.behave(devices)
        not_simulated = inner.not_simulated
        if outer.not_simulated:
            not_simulated = (
                f"a hybrid whose outer strategy is {self.outer.name} cannot be simulated; use hr.Mirrored(...), "
                "hr.ParameterAveraging(...) with a number of rounds as its period, hr.ParameterServer(...) or "
                "hr.Downpour(...)"
            )
        return replace(
            outer,
            division=inner.division,
            not_simulated=not_simulated,
            not_rehearsed=refuse_parts(self.equals_one_device),
        )

    def _roles(self, cluster: Cluster, count: int) -> tuple[Role, ...]:
        if isinstance(self.outer, Served):
            return worker_and_server_roles(self.name, count, self.outer.servers, cluster)
        return worker_roles(self.name, count, cluster, spread=True)

    def _counts(self, cluster: Cluster) -> tuple[int, int]:
        """Returns how many replicas there are, and devices in each.

        Raises:
            InfeasiblePlan: neither options nor launcher say, or they contradict each other.
        """
        assert isinstance(self.outer, Mirrored | ParameterAveraging | Served | FullySharded)
        replicas, devices = self.outer.workers, self._devices()
        if replicas is not None and devices is not None:
            return replicas, devices
        known = replicas or devices
        ranks = cluster.ranks and cluster.ranks - (self.outer.servers if isinstance(self.outer, Served) else 0)
        if ranks is None or ranks < 1 or known is None or ranks % known:
            started = f"the launcher started {cluster.ranks}" if cluster.ranks else "no launcher says how many"
            raise InfeasiblePlan(
                f"a hybrid of {replicas or '?'} replicas on {devices or '?'} devices each, and {started}; say both: "
                "hr.Hybrid(hr.Mirrored(workers=2), hr.TensorParallel(devices=2))"
            )
        return replicas or ranks // known, devices or ranks // known

    def _devices(self) -> int | None:
        if isinstance(self.inner, FullySharded):
            return self.inner.workers
        assert isinstance(self.inner, TensorParallel | Pipeline)
        return self.inner.devices if isinstance(self.inner, TensorParallel) else self.inner.stages

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        if isinstance(self.inner, FullySharded):
            return self._sharded(self.inner, plan, rank, context)
        role, everyone = plan.role(rank), context.group
        workers = plan.roles[: plan.workers]
        within = [other.rank for other in workers if other.data_rank == role.data_rank]
        across = [other.rank for other in workers if other.stage == role.stage]
        group, mates = everyone.subgroup(within), everyone.subgroup(across)
        near = replace(context, group=group, device_group=among(context, group, within))
        inside = (
            self.inner.inside(near, everyone, mates)
            if isinstance(self.inner, TensorParallel)
            else self._stages(plan, near, context, mates)
        )
        inside.connects = near.device_group, context.device_group
        own = replace(
            context, model=inside.model, group=mates, device_group=among(context, mates, across), inside=inside
        )
        if isinstance(self.outer, Served):
            # Replicas that are threads share one generator, and while one is traced no other may go on and draw.
            everyone.barrier()
            return replace(served_replica(self.outer, plan, role, own), slices=inside.slices)
        if isinstance(self.outer, FullySharded):
            return self.outer.over_stages(plan, rank, own)
        # To the outer strategy each replica is a worker; memory was asked for before.
        replicas = Cluster((Host(plan.roles[0].host, mates.world, _ENOUGH_BYTES),))
        outer = self.outer.plan(own.model, replicas)
        assert all(segment.owner == EVERY_WORKER for segment in outer.segments)
        return replace(self.outer.replica(outer, role.data_rank, own), slices=inside.slices)

    def _sharded(self, inner: FullySharded, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        assert isinstance(self.outer, Mirrored)
        # One of both numbers is given: else there is no plan.
        devices = inner.workers or plan.workers // (self.outer.workers or 1)
        first, place = rank - rank % devices, rank % devices
        inside, across = range(first, first + devices), range(place, plan.workers, devices)
        within, mates = context.group.subgroup(inside), context.group.subgroup(across)
        carrier = among(context, within, inside)()
        return inner.in_replicas(plan, context, within, carrier, among(context, mates, across)() or mates)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        model = in_parts(context.model, plan.workers // plan.replicas)
        assert isinstance(self.outer, ServedStrategy)
        return self.outer.server(of_outer(plan, self.outer), rank, replace(context, model=model))

    def _stages(self, plan: Plan, near: WorkerContext, every: WorkerContext, mates: ProcessGroup) -> ModelParallelGroup:
        assert isinstance(self.inner, Pipeline)
        # A loss is weighed over all replicas, where these synchronize in every round.
        total = total_of(every if isinstance(self.outer, Mirrored | FullySharded) else near)
        compute = self.inner.compute(plan, near, total, every.group)
        compute.mates = mates
        counts_all = isinstance(self.outer, Mirrored | ParameterAveraging)
        if near.options.clip_norm is not None and compute.tied and counts_all:
            raise UsageError(
                f"clip_norm={near.options.clip_norm:g} needs every gradient once, and several stages of a replica hold "
                f"{compute.tied[0]!r}; use hr.Hybrid(hr.FullySharded(...), hr.Pipeline(...)), hr.Pipeline alone, or "
                "leave clip_norm out"
            )
        return StagedReplica(compute, near.group, every.group, near.model)


def _check_sharded(outer: Strategy) -> None:
    if not isinstance(outer, Mirrored):
        raise UsageError(
            "replicas that hr.FullySharded(...) divides sum their gradients in every round: the outer strategy must be "
            f"hr.Mirrored(...), got {outer!r}"
        )
    if outer.codec != "plain":
        raise UsageError(
            f"codec={outer.codec!r} is for gradients of whole parameters, and the ranks of hr.FullySharded(...) have "
            "parts; use codec='plain'"
        )


def _divided(inner: Plan, model: ModelSpec, replicas: int) -> tuple[Segment, ...]:
    """Divides each stage's parameters among the ranks that hold it, one in each replica."""
    stages = {segment.parameter: segment.owner for segment in inner.segments}
    return tuple(
        replace(each, owner=each.owner * inner.workers + stages[each.parameter])
        for each in evenly(model.parameters, replicas)
    )


def _alone(cluster: Cluster, devices: int) -> Cluster:
    """Returns a cluster of one replica's devices, that on most hosts: whether all fit is asked elsewhere."""
    if len(cluster.hosts) == 1 or cluster.ranks is None or cluster.ranks < devices:
        host = replace(cluster.hosts[0], memory_bytes=_ENOUGH_BYTES, ranks=())
        return replace(cluster, hosts=(host,), ranks=devices if cluster.ranks else None)
    # Of each replica, the places of its hosts and the ranks that each has.
    replicas: list[dict[int, list[int]]] = [{} for _ in range(cluster.ranks // devices)]
    for place, host in enumerate(cluster.hosts):
        for rank in host.ranks:
            if rank < devices * len(replicas):
                replicas[rank // devices].setdefault(place, []).append(rank % devices)
    widest = max(replicas, key=len)
    hosts = (replace(cluster.hosts[place], memory_bytes=_ENOUGH_BYTES, ranks=tuple(widest[place])) for place in widest)
    return replace(cluster, hosts=tuple(hosts), ranks=devices)


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
