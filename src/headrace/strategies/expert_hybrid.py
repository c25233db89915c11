"""Replicas whose workers divide the experts of a mixture: those that hold the same experts are each other's mirrors.

compute                                  synchronize
each on its share; tokens travel among   experts: the sum over the workers that hold the same ones;
the workers of its replica               the rest, and the router's loss: over all workers

With `FullySharded` between, what a worker holds is sharded over those that hold the same experts: their replicas differ
in the tokens alone, so that each trains a part of every parameter there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.errors import UsageError
from headrace.expert_parallel.rows import RowLink
from headrace.policies.behaviour import Behaviour
from headrace.spec.model import ModelSpec
from headrace.strategies.context import ModelProbe, WorkerContext, among
from headrace.strategies.context_parallel import ContextParallel
from headrace.strategies.expert_parallel import ExpertParallel
from headrace.strategies.expert_sharded import sharded_replica, units_around
from headrace.strategies.fully_sharded import FullySharded, sums_of
from headrace.strategies.hybrid_ranks import RankGroups
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.strategy import Strategy
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.training.exchange import Replica

_WHY: Mapping[type[Strategy], str] = {
    Pipeline: "records what its stages call, and tokens decide which experts are called",
    TensorParallel: "gives all its devices the same tokens, and a worker of expert_parallel has tokens of its own",
    ContextParallel: "divides sequences over workers that all have the whole model",
}


def check_experts(levels: Sequence[Strategy]) -> None:
    """Refuses what an `ExpertParallel` cannot be combined with, with a UsageError that has the remedy."""
    other = next((each for each in levels if not isinstance(each, Mirrored | FullySharded | ExpertParallel)), None)
    use = "hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2), hr.ExpertParallel(2))"
    if other is not None:
        why = _WHY.get(type(other), "lets replicas step alone, and the router's loss is that of all workers' tokens")
        raise UsageError(
            f"hr.{type(other).__name__}(...) {why}; around hr.ExpertParallel(...) there can be hr.Mirrored(...), "
            f"hr.FullySharded(...), or both in this order: {use}"
        )
    outer, kinds = levels[:-1], [type(each) for each in levels]
    order = [kind for kind in (Mirrored, FullySharded, ExpertParallel) if kind in kinds]
    if kinds != order:
        named = ", ".join(f"hr.{each.__name__}" for each in kinds)
        raise UsageError(f"the levels of a hybrid are {named}; use {use}, or without one of the first two")
    for each in outer:
        if isinstance(each, Mirrored) and each.codec != "plain":
            raise UsageError(
                f"codec={each.codec!r} is for gradients of whole models, and workers of hr.ExpertParallel(...) have "
                "some experts; use codec='plain'"
            )
        if isinstance(each, FullySharded) and each.offload:
            raise UsageError(
                "offload=True keeps parts in host memory, and gradients of what all workers of hr.ExpertParallel(...) "
                "hold are summed on their devices; leave it out"
            )


def inspect_experts(levels: Sequence[Strategy], model: ModelSpec, probe: ModelProbe) -> ModelSpec:
    """Tries whether a model's experts can be divided, and the rest of it be sharded; returns what is known of it."""
    inner = levels[-1]
    assert isinstance(inner, ExpertParallel)
    for each in levels:
        if isinstance(each, FullySharded):
            units_around(each, inner, probe.module)
        if not isinstance(each, Mirrored):
            model = each.inspect_model(model, probe)
    return model


def expert_behaviour(levels: Sequence[Strategy], count: int, experts: int) -> Behaviour:
    """Returns what `count` workers do of which so many divide the experts."""
    behaviour = levels[-1].behave(experts)
    sharded = next((each for each in levels if isinstance(each, FullySharded)), None)
    if sharded is None:
        return behaviour
    mirrors = levels[0].workers or 1 if isinstance(levels[0], Mirrored) else 1
    return replace(behaviour, exchange=sums_of(sharded, max(1, count // experts // mirrors)))


def expert_replica(levels: Sequence[Strategy], groups: RankGroups, context: WorkerContext) -> Replica:
    """Returns what a rank runs."""
    inner, group = levels[-1], context.group
    assert isinstance(inner, ExpertParallel)
    sharded = next((each for each in levels if isinstance(each, FullySharded)), None)
    within, alike = group.subgroup(groups.slices), group.subgroup(groups.replicas)
    carrier, mates = among(context, within, groups.slices)(), among(context, alike, groups.replicas)() or alike
    if sharded is None:
        return inner.among(context, within, carrier, mates)
    link = RowLink(within, carrier or within)
    return sharded_replica(sharded, inner, groups, context, link, mates if len(levels) > 2 else None)
