"""Expert parallelism: every worker holds some experts of each layer, and all the rest of the model.

    compute                                synchronize                           update
    each on its share; tokens go to the    sum of the gradients of what all      optimizer on each worker's
    workers that hold their experts, and   hold; those of experts are complete,  experts, and on its mirror
    come back, in every such layer         as all tokens were there              of the rest

    worker 0   tokens ─► router ─┐           ┌─► experts 0 1 ─┐           ┌─► sum
                                 ├─ rows to ─┤                ├─ back to ─┤
    worker 1   tokens ─► router ─┘           └─► experts 2 3 ─┘           └─► sum

So did GShard (Lepikhin et al., 2020, section 3.3), with as many tokens for each expert; here as many travel as the
router has chosen, and none is left out (Gale et al., "MegaBlocks", 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from torch import nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.errors import UsageError
from headrace.expert_parallel.finding import AUTO, experts_of, find_experts, require_enough
from headrace.expert_parallel.placement import by_experts, by_experts_and_rows
from headrace.fully_sharded.units import refuse_kept
from headrace.hooks import hooked_parameters
from headrace.policies.behaviour import Behaviour, GradientSum
from headrace.policies.roles import data_parallel_plan, require_memory
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import EVERY_WORKER, Plan
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count, defer, refuse_derived_state, refuse_parts
from headrace.strategies.context import ModelProbe, WorkerContext, total_of
from headrace.strategies.deferred import make_own, require_same_parts
from headrace.strategies.fully_sharded import (
    require_own_backward,
    require_sliceable,
    updater_of_parts,
    whole_parameters,
)
from headrace.strategies.refusals import Refusal, one_program
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.deferred.parts import keep_parts, parts_of
from headrace.training.exchange import Replica
from headrace.training.gradients import UsedParameters


@dataclass(frozen=True)
class ExpertParallel(Strategy):
    """The experts of a mixture divided among the workers: parameters, gradients and optimizer state.

    Each worker routes the tokens of its own share of a batch. Experts are found in a `ModuleList` whose name has
    "expert" in it, and in modules of stacked experts as transformers has them (Mixtral, Qwen-MoE): `num_experts`,
    parameters with so many rows, and a forward that takes tokens, the numbers of their experts, and weights. The
    router's loss of transformers (`output_router_logits=True`) is that of all workers' tokens.

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        experts: "auto", or names or patterns of the modules that hold experts (["blocks.*.mixture"]).
        deferred: each worker makes its experts and the rest, one parameter after the other, bit for bit as the
            constructor does; see `FullySharded`.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> hr.ExpertParallel(workers=4).equals_one_device
        True
    """

    workers: int | None = None
    experts: str | Sequence[str] = AUTO
    deferred: bool = False

    name = "expert_parallel"
    equals_one_device = True
    reads_parts = True
    whole_model = False
    collectives = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        defer(self, self.deferred)
        texts = not isinstance(self.experts, str) and all(isinstance(each, str) and each for each in self.experts)
        if self.experts != AUTO and not (texts and self.experts):
            raise UsageError(
                f"experts is 'auto', or a list of modules' names or patterns such as ['blocks.*.mixture'], got "
                f"{self.experts!r}"
            )

    def refusals(self) -> tuple[Refusal, ...]:
        return (
            one_program("tokens travel in the middle of it"),
            Refusal(
                "batch_norm",
                "sync",
                "batch_norm='sync' exchanges statistics of examples, of which a worker may have none",
                "use LayerNorm, or mirrored",
            ),
        )

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        from headrace.expert_parallel.verification import verify

        refuse_derived_state(self.name, probe.module)
        found = find_experts(probe.module, self.experts)
        if hooked := hooked_parameters(dict(probe.module.named_parameters())):
            raise UsageError(
                f"{', '.join(map(repr, hooked)):.200}: hooks of a parameter (register_hook, "
                "register_post_accumulate_grad_hook) would see the gradient of some tokens under expert_parallel; use "
                "mirrored, or Options(clip_norm=..., clip_value=...)"
            )
        refuse_kept(probe.module)
        if probe.tries:
            verify(probe.module, self.experts, probe.sample(), probe.inputs, probe.accumulate)
        return replace(model, experts=experts_of(found))

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return expert_plan(self.name, describe_options(self), self.workers, model, cluster)

    def behave(self, workers: int) -> Behaviour:
        return Behaviour(GradientSum(), experts=workers, not_rehearsed=refuse_parts(self.equals_one_device))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        return self.among(context, context.group, context.device_group())

    def among(
        self,
        context: WorkerContext,
        within: ProcessGroup,
        carrier: Collective | None,
        mates: Collective | None = None,
    ) -> Replica:
        """Returns what a rank runs where ranks `within` divide the experts, and `mates` hold the same ones of others.

        `carrier` moves what the ranks `within` exchange; None for the memory that they share.
        """
        from headrace.expert_parallel.divided import DividedExperts
        from headrace.expert_parallel.rows import RowLink
        from headrace.fully_sharded.replica import ShardedExchange, ShardedModel

        require_own_backward(context)
        context.require_own_generators()
        module, group = context.module, context.group
        every = RowLink(group, context.device_group() or group)
        found, weights = find_experts(module, self.experts), context.weights
        require_same_parts(module, group)
        specs = experts_of(found)
        shared = [name for name, _ in module.named_parameters() if name not in specs]
        make_own(module, context.device, weights, shared, read=False)
        if weights and (context.model.optimizer.values or not group.rank):
            # What every worker holds, the others get of rank 0; an optimizer may be made from all values.
            apart = {} if context.model.optimizer.values else specs
            weights.only(weights.tensors.keys() - apart.keys()).read(module)
        broadcast(module, every.carrier)
        whole = whole_parameters(context)
        link = RowLink(within, carrier or within)
        divided = DividedExperts(
            module, found, link, every, context.options.accumulate > 1, fill=partial(_make_experts, context)
        )
        if weights:
            weights.read_parts(divided.parts())
        held = by_experts(context.model.parameters, specs, within.world)
        segments = [each for each in held if each.owner in (within.rank, EVERY_WORKER)]
        updater = updater_of_parts(segments, divided.pieces, whole, context)
        used = UsedParameters(group, len(divided.pieces))
        objective, options = context.objective, context.options
        compute = ShardedModel(
            divided, objective, options, used, context.sample, total_of(context), False, context.scale
        )
        if group.rank == 0:
            compute.notes = (divided.describe(),)
        # What several ranks hold, one measures.
        measured = frozenset(divided.pieces) if not mates or not mates.rank else frozenset[str]()
        measured -= divided.whole if group.rank else frozenset()
        return Replica(compute, ShardedExchange(divided, updater, context.clipper(), used, measured, mates))


def _make_experts(context: WorkerContext, held: Mapping[str, slice]) -> None:
    """Makes the experts of a rank, of which stacked ones are rows."""
    keep_rows(context.module, held)
    make_own(context.module, context.device, context.weights, held, read=False)


def keep_rows(module: nn.Module, held: Mapping[str, slice]) -> None:
    """Has experts of a model that is made in parts be made as a rank has them: of stacked ones such rows."""
    if parts := parts_of(module):
        keep_parts(module, parts.sliced({name: itemgetter(rows) for name, rows in held.items()}))


def expert_plan(
    name: str,
    options: Mapping[str, object],
    workers: int | None,
    model: ModelSpec,
    cluster: Cluster,
    replicas: int = 1,
    parts: int = 1,
) -> Plan:
    """Plans workers that divide the experts among them, in one replica or in several that are alike.

    Of so many `parts` of a replica each has a part of every parameter.
    """
    require_sliceable(name, model)
    plan = data_parallel_plan(
        name,
        options,
        workers,
        model,
        cluster,
        copies=(0, 0),
        cut=lambda parameters, count: (
            by_experts_and_rows(parameters, model.experts, count // replicas // parts, parts)
            if parts > 1
            else by_experts(parameters, model.experts, count // replicas)
        ),
        spread=True,
    )
    require_enough({name: each.count for name, each in model.experts.items()}, plan.workers // replicas // parts)
    divided = sum(each.bytes for each in model.trainable if each.name in model.experts)
    held = model.copies * (plan.workers // parts * (model.trainable_bytes - divided) + replicas * divided)
    # Each builds the whole model before it keeps its part.
    built = 0 if model.in_parts else plan.workers * model.parameter_bytes
    require_memory(name, max(held, built), cluster, plan.roles, model)
    return plan
