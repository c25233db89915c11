"""Synchronous data parallelism: every worker holds a mirror of every variable.

    compute                       synchronize                                   update
    the same on each worker,      all-reduce the gradients: through shared      optimizer on each mirror
    each on its share             memory on a CPU host, NCCL among GPUs,
                                  gloo between hosts

On a CPU host, gradients go from autograd straight into shared memory. Rank r adds up the r-th part of all
workers' gradients into one result that everybody's optimizer reads in place:

    worker 0   │ grads ──► G0 ─┐            ┌─► R[part 0] ─┐
               │               ├─ barrier ──┤              ├─ barrier ──► optimizer.step on R, each its mirror
    worker 1   │ grads ──► G1 ─┘            └─► R[part 1] ─┘
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.policies.roles import require_memory, worker_roles
from headrace.policies.sharding import everywhere
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.strategy import (
    Strategy,
    WorkerContext,
    broadcast,
    check_count,
    describe_options,
)
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Replica
from headrace.training.gradients import FlatLayout, UsedParameters, assign
from headrace.training.optimizer import build
from headrace.training.reduction import (
    CollectiveReduction,
    OverlappedReduction,
    Reduction,
    SharedMemoryReduction,
)
from headrace.training.update import UpdatingExchange


@dataclass(frozen=True)
class Mirrored(Strategy):
    """Mirrored variables, all-reduced gradients (tf.distribute.MirroredStrategy's and DDP's way).

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        overlap: exchange gradients among devices, or hosts, while backward still runs.
    """

    workers: int | None = None
    overlap: bool = True

    name = "mirrored"
    synchronous = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles = worker_roles(self.name, self.workers, cluster, spread=True)
        # Each worker: its mirror, what autograd makes, what it shares; all together: the result.
        require_memory(self.name, (3 * len(roles) + 1) * model.trainable_bytes, cluster)
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=roles,
            shares=(1,) * len(roles),
            gradient_bytes=model.trainable_bytes,
            segments=everywhere(model.parameters),
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        broadcast(context.module, context.wire or context.group)
        layout = FlatLayout(context.model.trainable)
        presence = UsedParameters(context.group, len(context.model.trainable))
        reduction: Reduction
        if context.wire is None:
            reduction = SharedMemoryReduction(layout, presence, context.group)
        elif self.overlap and not always and not _at_once(context):
            # Where layers talk during backward, a bucket that lacks a gradient on one worker would meet their sums.
            reduction = OverlappedReduction(layout, presence, context.wire, context.module)
        else:
            reduction = CollectiveReduction(layout, presence, context.wire, context.device)
        compute = context.whole_model(reduction.sink, always)
        return Replica(compute, MirroredExchange(plan, context, layout, reduction, presence))


def _at_once(context: WorkerContext) -> bool:
    """Returns whether gradients leave only when backward is over."""
    # Of micro-batches only the sum leaves, and a compiled backward gives all gradients at its end.
    piecewise = context.inside is not None and context.inside.piecewise
    return context.options.accumulate > 1 or context.options.compile or piecewise


class MirroredExchange(UpdatingExchange):
    """Args:
    plan: the run's.
    context: of this worker.
    layout: places of the gradients.
    reduction: sums them.
    presence: says which exist.
    """

    def __init__(
        self, plan: Plan, context: WorkerContext, layout: FlatLayout, reduction: Reduction, presence: UsedParameters
    ) -> None:
        named = dict(context.module.named_parameters())
        self._reduction = reduction
        self._presence = presence
        optimizer = build(context.optimizer, named.items())
        owned = [(segment, named[segment.parameter]) for segment in plan.segments]
        self.updater = context.updater(optimizer, owned)
        self._parameters = [named[parameter.name] for parameter in context.model.trainable]
        self._views = layout.views(reduction.result)
        self._conditioner = context.conditioner(dict(zip(layout.names, self._views, strict=True)))
        # torch's own optimizers only read gradients, those of foreach=True aside (SGD with nesterov writes). Another
        # might write too, and the result is everybody's.
        reads = type(optimizer).__module__.startswith("torch.optim")
        reads = reads and not any(group.get("foreach") for group in optimizer.param_groups)
        shared = context.wire is None and context.group.world > 1
        self._private = [view.clone() for view in self._views] if shared and not reads else []
        self._missing: tuple[int, ...] = ()
        assign(self._parameters, self._private or self._views, ())
        self.parameter_bytes = sum(parameter.bytes for parameter in context.model.parameters)

    def begin(self, round_: int) -> None:
        """Mirrors are always up to date."""

    def synchronize(self, finite: bool = True) -> StepDecision:
        missing = self._presence.settle()
        self._reduction.reduce()
        verdict = self._conditioner.condition(self._reduction.measured, self._reduction.held, finite)
        if missing != self._missing:
            assign(self._parameters, self._private or self._views, missing)
            self._missing = missing
        return verdict

    def update(self, round_: int) -> None:
        if self._private:
            torch._foreach_copy_(self._private, self._views)
        super().update(round_)
