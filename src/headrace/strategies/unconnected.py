"""The ceiling: workers that train side by side and never talk. To measure with, not to train with.

    compute                       synchronize     update
    the same on each worker       nothing         optimizer on each copy

Processes of one host slow each other down even so, sharing caches and memory bandwidth. What N of them reach
together is the most that N synchronised ones could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.policies.behaviour import Behaviour
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.checks import check_count
from headrace.strategies.context import WorkerContext, with_tables
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.refusals import Refusal, local_steps
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class Unconnected(Strategy):
    """Every worker trains a model of its own on its share.

    Attributes:
        workers: how many; None for what there is.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> hr.fit(job, hr.Unconnected(workers=2)).status
        'ok'
    """

    workers: int | None = None

    name = "unconnected"
    equals_one_device = False
    lock_step = False
    one_model = False
    one_host = True
    sparse_tables = True
    turns = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)

    def behave(self, workers: int) -> Behaviour:
        return Behaviour(not_rehearsed="its workers never exchange anything: each is a run of its own")

    def refuses_channels_last(self) -> str:
        return ""

    def refusals(self) -> tuple[Refusal, ...]:
        return local_steps(self.name, "never")

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(2, 0))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        compute = context.whole_model(local_shares=len(plan.shares))
        # Running statistics of other models have no place in this one.
        alone = compute.mates = ThreadCollective(ThreadGroup(1), 0)
        replica = Replica(compute, LocalExchange(plan.segments, context, rank))
        return with_tables(replica, replace(context, group=alone))
