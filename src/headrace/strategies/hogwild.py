"""Hogwild: all workers train one copy of the parameters in shared memory, without locks.

    compute                        synchronize     update
    forward and backward at        nothing         the job's optimizer, in place, whatever
    what is there now                              the others write meanwhile

Niu et al., "Hogwild!: a lock-free approach to parallelizing stochastic gradient descent", 2011, algorithm 1. It is made
for gradients of few elements, where two workers rarely write the same one; with dense gradients some steps overwrite
each other in part. Each worker's optimizer has a state of its own. Two runs differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.averaging.asynchronous.one_copy import OneCopy
from headrace.averaging.local_steps import LocalStepsExchange
from headrace.policies.behaviour import Behaviour
from headrace.policies.roles import data_parallel_plan, require_cpu
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.ad_psgd import check_meetings, without_order
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count, refuse_modes
from headrace.strategies.context import WorkerContext
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.refusals import Refusal, local_steps, moving_average
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Lock-free steps of all workers on one copy of the parameters, on the processors of one host.

    Attributes:
        workers: how many; None for what there is.
        meet_every: rounds after which all workers wait for each other; a run is saved there.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.Hogwild(workers=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    meet_every: int = 16

    name = "hogwild"
    equals_one_device = False
    lock_step = False
    begins_alike = True
    one_host = True
    alone: ClassVar[Mapping[str, object]] = {"workers": 1}

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_meetings(self.meet_every)

    def refusals(self) -> tuple[Refusal, ...]:
        return (*local_steps(self.name, f"every {self.meet_every} rounds (meet_every)"), moving_average(self.name))

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        refuse_modes(self.name, model)
        # Each worker: what it was built with, and gradients; all together: the one copy.
        plan = data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(2, 1))
        require_cpu(self.name, cluster)
        return plan

    def behave(self, workers: int) -> Behaviour:
        return without_order(self.name)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        broadcast(context.module, context.group)
        local = LocalExchange(plan.segments, context, first=rank)
        copy = OneCopy(self.meet_every, context.module, local.updater, context.group)
        compute = context.whole_model(local_shares=len(plan.shares))
        return Replica(compute, LocalStepsExchange(local, copy), copy)
