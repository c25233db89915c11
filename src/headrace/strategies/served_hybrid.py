"""Model replicas that several devices hold together, and that speak to parameter servers: DistBelief's shape.

    compute             synchronize                                        update
    the inner's         each rank pushes to servers of its own, which      on the shard
                        hold the shards of its part of the model

    replica 0   rank 0: stage 0 ── inner ── rank 1: stage 1
                      │                           │
    servers        rank 4: stage 0             rank 5: stage 1
                      │                           │
    replica 1   rank 2: stage 0 ── inner ── rank 3: stage 1

To its servers a replica is one worker: each of its ranks speaks under its number. Its first rank leases the data, and
tells the others; a lease is done when all ranks have pushed. What several ranks hold is pushed and pulled by one of
them, which gives it to the others.

Dean et al., "Large scale distributed deep networks", 2012, section 4.1: each of the machines that hold one replica
communicates with just those shards of the servers that hold its parameters.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.errors import InfeasiblePlan, UsageError
from headrace.parameter_server.planning import assign_shards
from headrace.policies.roles import require_memory, worker_and_server_roles
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan, Role, Segment
from headrace.strategies.context import WorkerContext
from headrace.strategies.downpour import Downpour
from headrace.strategies.parameter_server import ParameterServer
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica

Served = ParameterServer | Downpour
"""Strategies whose workers speak to servers."""


def check_outer(outer: Served, inner: Strategy) -> None:
    """Refuses what replicas that several ranks hold cannot have. Raises a `UsageError` with the remedy."""
    if not isinstance(inner, Pipeline) and outer.sharding not in (None, "whole"):
        raise UsageError(
            f"sharding={outer.sharding!r} cuts parameters, of which each device has a slice, and checkpoints join "
            "whole slices; leave it out"
        )
    if outer.backups:
        raise UsageError(
            f"backups={outer.backups} lets a run go on without a server, and without a rank of a replica it cannot; "
            "use backups=0, and checkpoints"
        )
    if isinstance(outer, Downpour) and outer.moves:
        raise UsageError(
            "local='optimizer' gives each worker an optimizer of its own, and the ranks of a replica would have one "
            "each; use local='sgd', or hr.ParameterAveraging(...) as the outer strategy"
        )
    if isinstance(outer, ParameterServer) and outer.backup_workers:
        raise UsageError(
            f"backup_workers={outer.backup_workers} drops what comes late, and each stage's servers would drop another "
            "replica's; use backup_workers=0"
        )


def served_plan(
    strategy: str, outer: Served, inner: Plan, model: ModelSpec, cluster: Cluster, counts: tuple[int, int]
) -> Plan:
    """Returns which rank holds which part of which replica, and which server holds which shards.

    `inner` is the plan of one replica, `model` the whole one, `counts` those of replicas and of devices in each. Raises
    an `InfeasiblePlan` if the cluster cannot hold it, or a stage would be without servers, or a server without shards.
    """
    replicas, devices = counts
    held = [_owned(inner, model, stage, devices) for stage in range(devices)]
    # A stage may hold nothing that is trained, or only what it has together with an earlier one.
    stages = [stage for stage in range(devices) if held[stage].trainable]
    what = ("stage" if inner.partition else "slice") + "s" * (len(stages) > 1)
    if stages[0]:
        raise InfeasiblePlan(
            f"stage 0 of {devices} has no parameter to train, and the data is leased by its servers; give "
            "partition=[...] by hand"
        )
    if outer.servers < len(stages) or (not inner.partition and outer.servers > len(stages)):
        more = " or more" if inner.partition else ""
        raise InfeasiblePlan(
            f"a replica has {len(stages)} {what} with parameters, each of which has servers of its own, and there are "
            f"{outer.servers}; use servers={len(stages)}{more}"
        )
    roles = worker_and_server_roles(strategy, replicas * devices, outer.servers, cluster)
    copies = 6 if isinstance(outer, Downpour) and outer.overlap else 4
    # Each rank builds the whole model before it keeps a part.
    trained = model.trainable_bytes
    require_memory(strategy, replicas * (devices + copies) * trained, cluster, roles, model, trained)
    workers = replicas * devices
    roles = tuple(
        replace(role, data_rank=role.rank // devices, stage=role.rank % devices)
        if role.rank < workers
        else replace(role, stage=stages[(role.rank - workers) % len(stages)])
        for role in roles
    )
    segments: list[Segment] = []
    for stage in stages:
        servers = [role.rank for role in roles[workers:] if role.stage == stage]
        sharding = outer.sharding if inner.partition else "whole"
        try:
            segments += assign_shards(held[stage], servers, sharding, outer.placement, outer.transport)
        except InfeasiblePlan as error:
            raise InfeasiblePlan(f"stage {stage} of {devices}: {error}") from None
    return replace(inner, strategy=strategy, roles=roles, shares=(1,) * replicas, segments=tuple(segments))


def in_parts(model: ModelSpec, devices: int) -> ModelSpec:
    """Returns a model in which each parameter is what one device of a replica has of it."""
    return replace(model, parameters=tuple(each.part(devices) for each in model.parameters))


def _owned(inner: Plan, model: ModelSpec, stage: int, devices: int) -> ModelSpec:
    """Returns what one rank of a replica pushes and pulls; of what all hold whole, the first does."""
    if inner.partition:
        owned = {segment.parameter for segment in inner.segments if segment.owner == stage}
    else:
        owned = {each.name for each in model.parameters if stage == 0 or each.cut is not None}
    parts = in_parts(model, devices)
    return replace(parts, parameters=tuple(each for each in parts.parameters if each.name in owned))


def of_outer(plan: Plan, outer: Strategy) -> Plan:
    """Returns the plan as the outer strategy reads it."""
    return replace(plan, options=describe_options(outer))


def served_replica(outer: Strategy, plan: Plan, role: Role, own: WorkerContext) -> Replica:
    """Returns one rank's part of a replica, as a worker of the outer strategy; in `own` its `inside` is set."""
    every = own.servers()
    servers = every.among([server.rank for server in every.roles if server.stage == role.stage], role.data_rank)
    return outer.replica(of_outer(plan, outer), role.rank, replace(own, servers=lambda: servers))
