"""Replicas that divide every sequence: the ranks of a ring each have some tokens of their replica's examples.

    compute                               synchronize and update
    each on its tokens; keys and values   the outer's, over all ranks: a gradient is the sum of all ranks' parts,
    go around in the replica's ring       whether these are of other tokens or of other examples

A ring's ranks have equal parameters, so `FullySharded` divides these over the ranks of rings, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from headrace.errors import UsageError
from headrace.policies.behaviour import Behaviour, RingOfTokens
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.checks import refuse_random
from headrace.strategies.context import WorkerContext, among
from headrace.strategies.context_parallel import ContextParallel, divide, in_ring, with_rings
from headrace.strategies.fully_sharded import FullySharded, sharded_plan, sums_of
from headrace.strategies.hybrid_ranks import RankGroups
from headrace.strategies.mirrored import Mirrored, summed_by_all
from headrace.strategies.strategy import Strategy
from headrace.training.exchange import Replica


def check_rings(levels: Sequence[Strategy]) -> None:
    """Refuses what cannot be around a `ContextParallel`, with a UsageError that has the remedy."""
    outer = levels[:-1]
    if (
        not isinstance(levels[-1], ContextParallel)
        or not all(isinstance(each, Mirrored | FullySharded) for each in outer)
        or len({type(each) for each in outer}) < len(outer)
    ):
        named = ", ".join(f"hr.{type(each).__name__}" for each in levels)
        raise UsageError(
            f"the levels of a hybrid are {named}; around hr.ContextParallel(...), which is the innermost, there can be "
            "hr.Mirrored(...), hr.FullySharded(...), or both in this order: its ranks sum gradients in every round"
        )


def ring_plan(
    name: str,
    options: Mapping[str, object],
    levels: Sequence[Strategy],
    counts: tuple[int, int, int, int],
    model: ModelSpec,
    cluster: Cluster,
) -> Plan:
    """Returns the plan of replicas, or of their parts, each of which has a ring; `counts` are as of `RankGroups`."""
    if any(isinstance(each, FullySharded) for each in levels):
        plan = sharded_plan(name, options, prod(counts), model, cluster, counts[0])
    else:
        plan = data_parallel_plan(name, options, prod(counts), model, cluster, copies=(3, 1), spread=True)
    refuse_random(name, model, plan)
    return with_rings(plan, counts[3])


def ring_behaviour(levels: Sequence[Strategy], count: int, ranks: int) -> Behaviour:
    """Returns what `count` workers do of which so many `ranks` have a ring."""
    outer, sharded = levels[0].behave(count), next((each for each in levels if isinstance(each, FullySharded)), None)
    if sharded is not None:
        mirrors = levels[0].workers or 1 if isinstance(levels[0], Mirrored) else 1
        outer = Behaviour(sums_of(sharded, count // mirrors))
    return replace(outer, division=RingOfTokens(ranks))


def ring_replica(levels: Sequence[Strategy], plan: Plan, groups: RankGroups, context: WorkerContext) -> Replica:
    """Returns what a rank runs."""
    everyone = context.group
    ring, mates = everyone.subgroup(groups.slices), everyone.subgroup(groups.mates)
    sharded = next((each for each in levels if isinstance(each, FullySharded)), None)
    if sharded is None:
        (outer, _) = levels
        assert isinstance(outer, Mirrored)
        if context.weights:
            # The others get rank 0's parameters.
            context.weights.read(context.module, context.module.named_buffers() if everyone.rank else None)
        # Gradients leave after backward, in which attention exchanges keys and values.
        sink, exchange = summed_by_all(plan, context, overlap=False, codec=outer.codec)
        divided, own = divide(context, ring, among(context, ring, groups.slices)())
        own = replace(own, group=mates, device_group=among(context, mates, groups.mates))
        return Replica(in_ring(own.whole_model(sink), divided, own, not everyone.rank), exchange)
    divided, own = divide(context, ring, among(context, ring, groups.slices)())
    weighing = replace(own, group=mates, device_group=among(context, mates, groups.mates))
    within, alike = everyone.subgroup(groups.sharded), everyone.subgroup(groups.replicas)
    others = (among(context, alike, groups.replicas)() or alike) if isinstance(levels[0], Mirrored) else None
    replica = sharded.in_replicas(own, within, among(context, within, groups.sharded)(), others, weighing)
    return replace(replica, compute=in_ring(replica.compute, divided, own, not everyone.rank))
