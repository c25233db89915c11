"""Experts that are divided among workers, and sharded over those that hold the same ones: what a rank runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.expert_parallel.finding import find_experts
from headrace.expert_parallel.placement import by_experts_and_rows
from headrace.expert_parallel.rows import RowLink
from headrace.fully_sharded.units import AUTO, find_units
from headrace.spec.plan import EVERY_WORKER, Segment
from headrace.strategies.broadcast import broadcast
from headrace.strategies.context import WorkerContext, among, total_of
from headrace.strategies.deferred import make_own, require_same_parts
from headrace.strategies.expert_parallel import ExpertParallel, keep_rows
from headrace.strategies.fully_sharded import (
    FullySharded,
    require_own_backward,
    updater_of_parts,
    whole_parameters,
)
from headrace.strategies.hybrid_ranks import RankGroups
from headrace.training.deferred.parts import set_aside
from headrace.training.exchange import Replica
from headrace.training.gradients import UsedParameters

if TYPE_CHECKING:
    from headrace.expert_parallel.division import ExpertDivision


def units_around(sharded: FullySharded, inner: ExpertParallel, module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a model's units, none of which is inside of what calls experts of a list.

    That runs twice in a forward, and an expert runs when tokens of others have come, at another time.

    Raises:
        UsageError: one was asked for.
    """
    units = find_units(module, sharded.units)
    callers = [each.caller for each in find_experts(module, inner.experts) if not each.stacked]
    inside = [name for name in units if any(not each or name.startswith(f"{each}.") for each in callers)]
    if inside and sharded.units != AUTO:
        raise UsageError(
            f"units: {inside[0]!r} is inside of a module that calls experts, which hr.ExpertParallel(...) runs twice; "
            "name that module, or one around it, or leave units out"
        )
    return tuple(unit for unit in units if unit not in inside)


def sharded_replica(
    sharded: FullySharded,
    inner: ExpertParallel,
    groups: RankGroups,
    context: WorkerContext,
    link: RowLink,
    mates: Collective | None,
) -> Replica:
    """Returns what a rank runs that divides experts over `link`; `mates` hold the same part in other replicas."""
    # Here, because importing torch.distributed costs what the other strategies need not pay.
    from headrace.expert_parallel.division import ExpertDivision
    from headrace.expert_parallel.sharded import ShardedExperts
    from headrace.fully_sharded.replica import ShardedExchange, ShardedModel
    from headrace.fully_sharded.sharding import ShardedModule, UnitForm

    require_own_backward(context)
    context.require_own_generators()
    module, group, weights = context.module, context.group, context.weights
    carrier = context.device_group()
    require_same_parts(module, group)
    if weights and context.model.optimizer.values:
        # The optimizer is made from them, before a rank has its part.
        weights.read(module)
    broadcast(module, carrier or group)
    units = units_around(sharded, inner, module)
    whole = whole_parameters(context)
    # While parameters are where the module computes.
    total = total_of(context)
    every = RowLink(group, carrier or group)
    division = ExpertDivision(module, find_experts(module, inner.experts), link, every, context.options.accumulate > 1)
    keep_rows(module, division.held)
    within = group.subgroup(groups.parts)
    form = UnitForm(sharded.reshard_after_forward is not False, torch.bfloat16 if sharded.param_dtype else None)
    with set_aside(module, division.elsewhere()):
        shards = ShardedModule(
            module,
            units,
            within,
            among(context, within, groups.parts)(),
            form,
            context.closing,
            lambda names: make_own(module, context.device, weights, names, read=False),
            division.experts,
        )
    alike, replica = group.subgroup(groups.alike), group.subgroup(groups.sharded)
    model = ShardedExperts(division, shards, within, replica, among(context, alike, groups.alike)() or alike)
    if weights:
        weights.read_parts(model.parts())
        weights.read(module, module.named_buffers())
    every_segment = by_experts_and_rows(context.model.parameters, division.experts, link.world, within.world)

    updater = updater_of_parts(_held(every_segment, division, within.rank, shards.whole), model.pieces, whole, context)
    used = UsedParameters(group, len(model.pieces))
    compute = ShardedModel(model, context.objective, context.options, used, context.sample, total, False, context.scale)
    if group.rank == 0:
        compute.notes = (model.describe(),)
    # What several ranks hold, one measures.
    owners = {group.rank, EVERY_WORKER} if group.rank == 0 else {group.rank}
    measured = frozenset(each.parameter for each in every_segment if each.owner in owners)
    return Replica(compute, ShardedExchange(model, updater, context.clipper(), used, measured, mates))


def _held(segments: Sequence[Segment], division: ExpertDivision, part: int, kept: Collection[str]) -> list[Segment]:
    """Returns the segments that a rank with such a part holds; what is `kept` whole each of its ranks holds."""
    held = []
    for each in segments:
        where, owner = divmod(each.owner, division.link.world)
        its_own = owner == (division.link.rank if each.parameter in division.experts else 0)
        if each.owner == EVERY_WORKER or (its_own and (where == part or each.parameter in kept)):
            held.append(each)
    return held
