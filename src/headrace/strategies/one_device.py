"""One device, one process: the baseline, and the file to copy when a new strategy is added.

compute              synchronize     update
forward, backward    nothing         optimizer
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.policies.roles import require_memory, worker_roles
from headrace.policies.sharding import everywhere
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan, Segment
from headrace.strategies.strategy import Strategy, WorkerContext, check_count, describe_options
from headrace.training.clipping import GradientClipper, StepDecision
from headrace.training.exchange import Replica
from headrace.training.optimizer import build
from headrace.training.update import UpdatingExchange


@dataclass(frozen=True)
class OneDevice(Strategy):
    """Trains in one process, or on one accelerator.

    Attributes:
        threads: intra-operation threads; None for all of the machine's.
    """

    threads: int | None = None

    name = "one_device"
    synchronous = True

    def __post_init__(self) -> None:
        check_count("threads", self.threads)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        (role,) = worker_roles(self.name, 1, cluster)
        require_memory(self.name, 2 * model.trainable_bytes, cluster)
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=(replace(role, threads=self.threads or role.threads),),
            shares=(1,),
            gradient_bytes=model.trainable_bytes,
            segments=everywhere(model.parameters),
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        return Replica(context.whole_model(), LocalExchange(plan.segments, context))


class LocalExchange(UpdatingExchange):
    """Exchanges nothing.

    Args:
        segments: of the plan.
        context: of this worker.
    """

    def __init__(self, segments: tuple[Segment, ...], context: WorkerContext) -> None:
        named = dict(context.module.named_parameters())
        optimizer = build(context.optimizer, named.items())
        self._parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        self._options = context.options
        immediate, inside = context.device.type == "cpu", context.inside
        if inside:
            repeated = [named[name] for name in named if name in inside.repeated]
            self._conditioner = GradientClipper(
                context.options,
                inside.group,
                context.scale,
                immediate,
                lambda: [each.grad for each in repeated if each.grad is not None],
                inside.group.world,
            )
            self._options = replace(context.options, clip_norm=None, clip_value=None)
        else:
            # Only to look: clipping one's own gradients is torch's.
            looking = replace(context.options, clip_norm=None, clip_value=None)
            self._conditioner = GradientClipper(looking, ThreadCollective(ThreadGroup(1), 0), context.scale, immediate)
        owned = [(segment, named[segment.parameter]) for segment in segments]
        self.updater = context.updater(optimizer, owned)
        self.parameter_bytes = sum(parameter.bytes for parameter in context.model.parameters)

    def begin(self, round_: int) -> None:
        self.updater.optimizer.zero_grad()

    def synchronize(self, finite: bool = True) -> StepDecision:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        verdict = self._conditioner.condition(gradients, gradients, finite)
        if verdict.apply and self._options.clip_value is not None:
            nn.utils.clip_grad_value_(self._parameters, self._options.clip_value)
        if verdict.apply and self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._options.clip_norm)
        return verdict
