"""One device, one process: the baseline, and the file to copy when a new strategy is added.

compute              synchronize     update
forward, backward    nothing         optimizer
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.policies.behaviour import Behaviour
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan, Segment
from headrace.strategies.checks import check_count
from headrace.strategies.context import WorkerContext, on_device, with_tables
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.clipping import GradientClipper, StepDecision
from headrace.training.exchange import Replica, UpdatingExchange


@dataclass(frozen=True)
class OneDevice(Strategy):
    """Trains in one process, or on one accelerator.

    Attributes:
        threads: intra-operation threads, at least 1; None for all of the machine's.

    Examples:
        >>> run = hr.fit(job, hr.OneDevice(threads=1))
        >>> run.plan.workers, run.summary.steps
        (1, 4)
    """

    threads: int | None = None

    name = "one_device"
    equals_one_device = True
    sparse_tables = True
    turns = True
    one_host = True
    keeps_memory = True

    def __post_init__(self) -> None:
        check_count("threads", self.threads)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        plan = data_parallel_plan(self.name, describe_options(self), 1, model, cluster, copies=(2, 0))
        (role,) = plan.roles
        return replace(plan, roles=(replace(role, threads=self.threads or role.threads),))

    def behave(self, workers: int) -> Behaviour:
        return Behaviour()

    def refuses_channels_last(self) -> str:
        return ""

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        return with_tables(Replica(context.whole_model(), LocalExchange(plan.segments, context)), context)


class LocalExchange(UpdatingExchange):
    """Exchanges nothing: checks and clips this worker's gradients, and updates the parameters of `segments`.

    `first` is the first rank of this worker's replica, where replicas decide alone whether a loss is finite.
    """

    def __init__(self, segments: Iterable[Segment], context: WorkerContext, first: int = 0) -> None:
        self.updater = context.updater_of(segments)
        self.parameter_bytes = context.model.parameter_bytes
        self._parameters = {name: each for name, each in context.module.named_parameters() if each.requires_grad}
        self._options = context.options
        without = replace(context.options, clip_norm=None, clip_value=None)
        immediate = context.device.type == "cpu"
        if context.inside:
            group, self._options = context.inside.group, without
            repeated, connect = partial(self._gradients, context.inside.repeated), context.inside.connects[0]
            counts = context.inside.times, context.inside.stages
            there = on_device(context, context.options, group, context.device, connect, repeated, *counts, first=first)
            self._clipper = GradientClipper(context.options, group, context.scale, immediate, repeated, *counts, there)
        else:
            # It only checks: clipping one's own gradients is torch's.
            alone = ThreadCollective(ThreadGroup(1), 0)
            there = on_device(context, without, alone, context.device, context.device_group, first=first)
            self._clipper = GradientClipper(without, alone, context.scale, immediate, there=there)
        # What decides on the device counts from the first rank of the run.
        self._shift = first if there is None else 0
        self.defers = self._clipper.defers

    def begin(self, round_: int) -> None:
        self.updater.optimizer.zero_grad()

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        gradients = self._gradients(self._parameters)
        decision = self._clipper.clip(gradients, gradients, finite)
        # A worker without examples of a short batch has no gradients, which torch refuses to clip.
        if decision.apply and gradients and self._options.clip_value is not None:
            nn.utils.clip_grad_value_(self._parameters.values(), self._options.clip_value)
        if decision.apply and self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._options.clip_norm)
        return replace(decision, bad_losses=tuple(self._shift + place for place in decision.bad_losses))

    def _gradients(self, names: Container[str]) -> list[Tensor]:
        chosen = (parameter.grad for name, parameter in self._parameters.items() if name in names)
        return [gradient for gradient in chosen if gradient is not None]
