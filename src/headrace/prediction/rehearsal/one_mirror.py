"""Workers of `Mirrored` in one process. After each round their mirrors are equal, so there is one, which all read.

    worker 0   compute ─ sum = g0                          ┌─ clip ─ update ─┐
    worker 1             compute ─ sum += g1               │                 ├─ compute
    worker 2                       compute ─ sum += g2 ────┘                 ┘

64 mirrors of their own would make 64 equal updates a round, and hold 64 gradients. The sum is in rank order, as that of
`Mirrored` on one host, so the results are its own, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.collectives.base import ProcessGroup
from headrace.errors import JobError
from headrace.hooks import carry_hooks
from headrace.modules import is_dense
from headrace.policies.behaviour import GradientSum
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Plan
from headrace.strategies.broadcast import broadcast_tensors
from headrace.strategies.context import WorkerContext
from headrace.strategies.strategy import Strategy
from headrace.training.clipping import GradientClipper, StepDecision
from headrace.training.exchange import Replica
from headrace.training.gradients import FlatLayout, UsedParameters
from headrace.training.optimizer import StatePiece
from headrace.training.reducing import Reduced, ReducingExchange
from headrace.training.reduction import shared_traffic
from headrace.training.update import Updater
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import make_module


@dataclass(frozen=True)
class OneMirror(Strategy):
    """The strategy of a rehearsal of `mirrored`."""

    mirrored: Strategy

    name = "mirrored"
    equals_one_device = True

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return self.mirrored.plan(model, cluster)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        group, module, trainable = context.group, context.module, context.model.trainable
        broadcast_tensors(module.buffers(), group)
        gradients = RankOrderSum(trainable, group)
        updater = context.updater_of(() if rank else plan.segments)
        named = dict(module.named_parameters())
        owned = {} if rank else {named[name]: view for name, view in gradients.views.items()}
        exchange = OneMirrorExchange(updater, context.clipper(gradients.views), gradients, owned, named, group)
        return Replica(context.whole_model(gradients, always), exchange)


class RankOrderSum:
    """Takes the gradients of a backward pass, and adds them to the other workers', after those of the ranks before.

    Attributes:
        views: the sum, by the parameters' names.
        part: this rank's part of it, by type.
        used: tells which parameters have a gradient.
        nbytes: of the gradients.
    """

    def __init__(self, trainable: Sequence[ParameterSpec], group: ProcessGroup) -> None:
        layout = FlatLayout(trainable)
        self.nbytes = layout.nbytes
        region = group.share(0 if group.rank else layout.nbytes)[0]
        self.views = dict(zip(layout.names, layout.views(region), strict=True))
        self.part = [span.part(group.rank, group.world).of(region) for span in layout.spans]
        self.used = UsedParameters(group, len(trainable))
        # The rank whose turn it is.
        self._turn = group.share(0 if group.rank else 8)[0].view(torch.int64)
        self._group = group

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self.used.publish(gradients)
        self._await_turn()
        for total, gradient in zip(self.views.values(), gradients, strict=True):
            if self._group.rank:
                total.add_(0.0 if gradient is None else gradient)
            elif gradient is None:
                total.zero_()
            else:
                total.copy_(gradient)
        self._end_turn()

    def store_nothing(self) -> None:
        self.used.publish_nothing()
        self._await_turn()
        for total in self.views.values():
            total.add_(0.0) if self._group.rank else total.zero_()
        self._end_turn()

    def _await_turn(self) -> None:
        while int(self._turn) != self._group.rank:
            # Lets the others run.
            self._group.check()

    def _end_turn(self) -> None:
        self._turn.fill_((self._group.rank + 1) % self._group.world)


class OneMirrorExchange(ReducingExchange):
    """Updates the one mirror on rank 0, for which the others wait.

    `owned` are the trainable parameters of rank 0 with the sum of their gradients; of another rank it is empty. `named`
    are all parameters that this worker reads.
    """

    def __init__(
        self,
        updater: Updater,
        clipper: GradientClipper,
        gradients: RankOrderSum,
        owned: Mapping[nn.Parameter, Tensor],
        named: Mapping[str, nn.Parameter],
        group: ProcessGroup,
    ) -> None:
        self._sum, self._group = gradients, group
        self._read = {} if owned else dict(named)
        nbytes = sum(parameter.nbytes for parameter in owned)
        super().__init__(updater, clipper, gradients.used, list(owned), list(owned.values()), nbytes)

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        for name, parameter in self._read.items():
            if internals.version(parameter):
                raise JobError(
                    f"the model changes its parameter {name!r} in forward: each worker would change its own, and "
                    "a rehearsal has one for all; leave that to the optimizer, or train with real workers"
                )
        return super().synchronize(finite)

    def reduce(self) -> Reduced:
        self._group.moved_bytes += shared_traffic(self._sum.nbytes, self._group.world)
        return self._sum.part, self._sum.part

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
    exchange = run.strategy.behave(run.plan.workers).exchange
    if not isinstance(exchange, GradientSum) or exchange.central or run.plan.min_workers:
        return run
    module = make_module(run.job)
    if not all(type(each) is nn.Parameter and is_dense(each) for each in module.parameters()):
        return run
    job = replace(run.job, model=partial(_reading, module))
    return replace(run, job=job, strategy=OneMirror(run.strategy))


def _reading(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that has the same memory for its parameters."""
    memo: dict[int, Any] = {id(each): nn.Parameter(each.data, each.requires_grad) for each in module.parameters()}
    copied = copy.deepcopy(module, memo)
    carry_hooks(list(module.parameters()), copied, memo)
    return copied
