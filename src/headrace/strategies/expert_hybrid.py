"""Replicas whose workers divide the experts of a mixture: those that hold the same experts are each other's mirrors.

compute                                  synchronize
each on its share; tokens travel among   experts: the sum over the workers that hold the same ones;
the workers of its replica               the rest, and the router's loss: over all workers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.errors import UsageError
from headrace.strategies.context import WorkerContext, among
from headrace.strategies.context_parallel import ContextParallel
from headrace.strategies.expert_parallel import ExpertParallel
from headrace.strategies.fully_sharded import FullySharded
from headrace.strategies.hybrid_ranks import RankGroups
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.pipeline import Pipeline
from headrace.strategies.strategy import Strategy
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.training.exchange import Replica

_WHY: Mapping[type[Strategy], str] = {
    FullySharded: "gathers every parameter of a block on all its workers, and experts stay where they are",
    Pipeline: "records what its stages call, and tokens decide which experts are called",
    TensorParallel: "gives all its devices the same tokens, and a worker of expert_parallel has tokens of its own",
    ContextParallel: "divides sequences over workers that all have the whole model",
}


def check_experts(levels: Sequence[Strategy]) -> None:
    """Refuses what an `ExpertParallel` cannot be combined with, with a UsageError that has the remedy."""
    other = next((each for each in levels if not isinstance(each, Mirrored | ExpertParallel)), None)
    if other is not None:
        why = _WHY.get(type(other), "lets replicas step alone, and the router's loss is that of all workers' tokens")
        raise UsageError(
            f"hr.{type(other).__name__}(...) {why}; around hr.ExpertParallel(...) there can be hr.Mirrored(...) alone: "
            "hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2))"
        )
    if [type(each) for each in levels] != [Mirrored, ExpertParallel]:
        named = ", ".join(f"hr.{type(each).__name__}" for each in levels)
        raise UsageError(f"the levels of a hybrid are {named}; use hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2))")
    (outer, _) = levels
    assert isinstance(outer, Mirrored)
    if outer.codec != "plain":
        raise UsageError(
            f"codec={outer.codec!r} is for gradients of whole models, and workers of hr.ExpertParallel(...) have some "
            "experts; use codec='plain'"
        )


def expert_replica(inner: ExpertParallel, groups: RankGroups, context: WorkerContext) -> Replica:
    """Returns what a rank runs."""
    within, alike = context.group.subgroup(groups.slices), context.group.subgroup(groups.replicas)
    mates = among(context, alike, groups.replicas)() or alike
    return inner.among(context, within, among(context, within, groups.slices)(), mates)
