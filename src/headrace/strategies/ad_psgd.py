"""AD-PSGD: every worker keeps a model of its own, and averages it with one other's at a time, which goes on meanwhile.

    compute                        synchronize, on its own                      update
    forward and backward at a      x of this worker and of one that is drawn    the job's optimizer, from
    copy of the worker's x         become their mean, under the locks of both   that mean

Lian et al., "Asynchronous decentralized parallel stochastic gradient descent", 2018, algorithm 1. A gradient may be
older than the x that its step is applied to: others average with it meanwhile. No worker waits for another's compute
but for the meetings, so that which x a gradient is of depends on the machine, and two runs differ.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.averaging.asynchronous.pairs import PairMixing
from headrace.averaging.local_steps import LocalStepsExchange
from headrace.errors import UsageError
from headrace.policies.behaviour import Behaviour
from headrace.policies.roles import data_parallel_plan
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count, refuse_modes
from headrace.strategies.context import WorkerContext
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.refusals import Refusal, local_steps, moving_average
from headrace.strategies.strategy import Strategy, describe_options
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class ADPSGD(Strategy):
    """Averages with one other worker at a time, asynchronously, on one host.

    Attributes:
        workers: how many; None for what there is.
        meet_every: rounds after which all workers wait for each other; a run is saved there.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.ADPSGD(workers=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    meet_every: int = 16

    name = "ad_psgd"
    equals_one_device = False
    lock_step = False
    begins_alike = True
    one_host = True
    alone: ClassVar[Mapping[str, object]] = {"workers": 1}

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_meetings(self.meet_every)

    def refusals(self) -> tuple[Refusal, ...]:
        return (
            *local_steps(self.name, f"in pairs, and meet every {self.meet_every} rounds"),
            moving_average(self.name),
        )

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        refuse_modes(self.name, model)
        # Each worker: its parameters and gradients, x, and a copy during evaluations.
        return data_parallel_plan(self.name, describe_options(self), self.workers, model, cluster, copies=(4, 0))

    def behave(self, workers: int) -> Behaviour:
        return without_order(self.name)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        broadcast(context.module, context.group)
        local = LocalExchange(plan.segments, context, first=rank)
        seed, world = context.batches.seed, context.group.world

        def partner(rank: int, round_: int) -> int:
            others = [other for other in range(world) if other != rank]
            return random.Random(f"{seed}/{rank}/{round_}").choice(others or [rank])

        module, updater = context.module, local.updater
        mixing = PairMixing(self.meet_every, module, updater, context.group, context.closing, partner)
        exchange = LocalStepsExchange(local, mixing)
        exchange.keeps_writes = False
        return Replica(context.whole_model(local_shares=len(plan.shares)), exchange, mixing)


def check_meetings(meet_every: object) -> None:
    """Raises UsageError unless workers meet every so many rounds."""
    if not isinstance(meet_every, int) or isinstance(meet_every, bool) or meet_every < 1:
        raise UsageError(f"meet_every must be a whole number of rounds of at least 1, got {meet_every!r}")


def without_order(name: str) -> Behaviour:
    """Returns the behaviour of workers without an order, which says why they are neither simulated nor rehearsed."""
    return Behaviour(
        not_simulated=f"{name} cannot be simulated: who changes what while another computes depends on moments that "
        "no model here has; train with real workers, or simulate downpour or gossip",
        not_rehearsed="what its workers read depends on who writes when, within a step; train with real workers",
    )
