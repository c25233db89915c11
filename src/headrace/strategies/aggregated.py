"""Synchronous data parallelism by a rule for gradients: compressed sums, votes, robust means, or one of the user's own.

    compute                       synchronize                                     update
    the same on each worker,      the rule: what each worker sends of its         optimizer on each worker's
    each on its share             gradient, and what it makes of what all sent    copy of the parameters

    PowerSGD     P = M Q  ──► sum of P ──► orthogonal ──► Q = M^T P ──► sum of Q ──► P Q^T; the rest of M goes on
    TopK         the largest elements of each worker, summed; the others are added to its next gradient
    SignSGD      one bit an element, and the majority
    TrimmedMean  without each element's largest and smallest values
    a codec      each worker's bytes, decoded and summed

All workers have the same parameters in every round, so that there is one model. The state of a rule, as a residual, is
saved and resumed with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.aggregation.exchange import AggregatingExchange
from headrace.aggregation.gradients import GradientAggregation, WorkerGroup
from headrace.aggregation.table import aggregation_of, require_workers
from headrace.policies.behaviour import Behaviour, GradientSum
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count
from headrace.strategies.context import WorkerContext, summing_of
from headrace.strategies.refusals import Refusal
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class Aggregated(Strategy):
    """Makes one gradient of all workers' by a rule, on one host or several.

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        by: the rule: "power_sgd", "top_k", "sign_sgd", "trimmed_mean", with options as in
            "top_k(share=0.1)"; the name of a codec, "bf16" or "int8"; or a `GradientAggregation`.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.Aggregated(workers=2, by="power_sgd(rank=1)"))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    by: str | GradientAggregation = "power_sgd"

    name = "aggregated"
    equals_one_device = False
    begins_alike = True
    collectives = True
    mixes_devices = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        aggregation_of(self.by)

    def refusals(self) -> tuple[Refusal, ...]:
        return (
            Refusal(
                "precision",
                "fp16",
                "precision={value!r} multiplies gradients by a scale that changes, and a rule may keep of them what "
                "it has not sent",
                "use precision='bf16', which needs no scale",
            ),
        )

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        rule = aggregation_of(self.by)
        # Each worker: parameters, gradients, what it sends and what comes of it, and the rule's state.
        copies = 4 + len(rule.own_state) + len(rule.common_state)
        plan = data_parallel_plan(
            self.name, describe_options(self), self.workers, model, cluster, copies=(copies, 0), spread=True
        )
        require_workers(rule, plan.workers)
        return plan

    def behave(self, workers: int) -> Behaviour:
        rule = aggregation_of(self.by)
        sent = rule.traffic(workers)
        why = "" if sent is not None else (
            f"aggregated cannot be simulated by {type(rule).__name__}: what it sends depends on the shapes of the "
            "parameters, and its traffic() gives no number; train with it, and read the bytes in the report"
        )  # fmt: skip
        not_rehearsed = "a rehearsal has one gradient at a time, and the rule needs all of them; use real workers"
        return Behaviour(GradientSum(sent or 1.0), not_simulated=why, not_rehearsed=not_rehearsed)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        always = context.synchronise_batch_norm()
        broadcast(context.module, context.device_group() or context.group)
        collective, place = summing_of(context)
        named = dict(context.module.named_parameters())
        exchange = AggregatingExchange(
            aggregation_of(self.by),
            context.updater_of(plan.segments),
            {each.name: named[each.name] for each in context.model.trainable},
            context.options,
            WorkerGroup(collective or context.group, context.group, place),
            context.group,
            context.batches.seed,
            context.model.parameter_bytes,
        )
        return Replica(context.whole_model(always=always), exchange)
