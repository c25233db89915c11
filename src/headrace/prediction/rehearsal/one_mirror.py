"""Workers of `Mirrored` in one process. After each round their mirrors are equal, so there is one, which all read.

    worker 0   compute ─┐                            ┌─ update ─┐
    worker 1   compute ─┤ sum, as Mirrored does it   │          ├─ compute
    worker 2   compute ─┘                            └──────────┘

64 mirrors of their own would make 64 equal updates a round. The sums are those of `Mirrored`, part by part and in rank
order, so the results are its own, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.errors import JobError
from headrace.modules import is_dense
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.context import WorkerContext
from headrace.strategies.mirrored import Mirrored
from headrace.strategies.strategy import Strategy, broadcast_tensors
from headrace.training.clipping import GradientClipper, StepDecision
from headrace.training.exchange import Reduced, ReducingExchange, Replica
from headrace.training.optimizer import StatePiece
from headrace.training.reduction import SharedMemoryReduction
from headrace.training.update import Updater
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import make_module


@dataclass(frozen=True)
class OneMirror(Strategy):
    """The strategy of a rehearsal of `mirrored`."""

    mirrored: Mirrored

    name = "mirrored"
    equals_one_device = True

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return self.mirrored.plan(model, cluster)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        group, module, trainable = context.group, context.module, context.model.trainable
        broadcast_tensors(module.buffers(), group)
        reduction = SharedMemoryReduction(trainable, group)
        updater = context.updater_of(() if rank else plan.segments)
        views = dict(zip(reduction.layout.names, reduction.layout.views(reduction.result), strict=True))
        named = dict(module.named_parameters())
        owned = {} if rank else {named[name]: view for name, view in views.items()}
        exchange = OneMirrorExchange(updater, context.clipper(views), reduction, owned, named, group)
        return Replica(context.whole_model(reduction.sink, always), exchange)


class OneMirrorExchange(ReducingExchange):
    """Reduces the gradients as Mirrored does; rank 0 updates the one mirror, and the others wait for it.

    `owned` are the trainable parameters of rank 0 with the sum of their gradients; of another rank it is empty.
    """

    def __init__(
        self,
        updater: Updater,
        clipper: GradientClipper,
        reduction: SharedMemoryReduction,
        owned: Mapping[nn.Parameter, Tensor],
        named: Mapping[str, nn.Parameter],
        group: ProcessGroup,
    ) -> None:
        self._reduction, self._group = reduction, group
        self._read = {} if owned else dict(named)
        nbytes = sum(parameter.nbytes for parameter in owned)
        super().__init__(updater, clipper, reduction.used, list(owned), list(owned.values()), nbytes)

    def synchronize(self, finite: bool = True) -> StepDecision:
        for name, parameter in self._read.items():
            if parameter._version:
                raise JobError(
                    f"the model changes its parameter {name!r} in forward: each worker would change its own, and "
                    "a rehearsal has one for all; leave that to the optimizer, or train with real workers"
                )
        return super().synchronize(finite)

    def reduce(self) -> Reduced:
        self._reduction.reduce()
        return self._reduction.measured, self._reduction.held

    def publish(self) -> None:
        self._group.barrier()

    def swap_weights(self, averaged: bool) -> None:
        # No worker may still read what is changed.
        self._group.barrier()
        super().swap_weights(averaged)

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._group.barrier()
        super().load(pieces, settings)


def with_one_mirror(run: RunSpec) -> RunSpec:
    """Returns a run of `Mirrored` whose workers share one mirror; another run, and one whose model cannot, as it is."""
    if not isinstance(run.strategy, Mirrored) or run.plan.min_workers:
        return run
    module = make_module(run.job)
    if not all(type(each) is nn.Parameter and is_dense(each) for each in module.parameters()):
        return run
    job = replace(run.job, model=partial(_reading, module))
    return replace(run, job=job, strategy=OneMirror(run.strategy))


def _reading(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that has the same memory for its parameters."""
    shared = {id(each): nn.Parameter(each.data, each.requires_grad) for each in module.parameters()}
    return copy.deepcopy(module, shared)
