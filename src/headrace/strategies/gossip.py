"""Gossip: every worker keeps a model of its own, and averages it with those of a few neighbours (decentralized SGD).

    compute                       synchronize, every `period` rounds           update
    forward and backward,         x becomes the weighted mean of the           the job's optimizer on each
    each on its share             worker's own x and its neighbours'           worker, from that mean

    ring, 5 workers    0 ── 1 ── 2 ── 3 ── 4 ── (0)      each: 1/3 of itself and of its two neighbours

Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017, algorithm 1 (D-PSGD): the
gradient is that at the parameters before they are mixed, and its step is applied to the mixed ones. The weights are
symmetric and those of a worker sum to 1, so mixing keeps the mean of all workers, which is the trained model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.averaging.local_steps import LocalStepsExchange
from headrace.averaging.mixing import ParameterMixing
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.policies.behaviour import Behaviour, NeighbourMean
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

TOPOLOGIES = ("hypercube", "random", "ring")


@dataclass(frozen=True)
class Gossip(Strategy):
    """Averages each worker's parameters with its neighbours' (D-PSGD).

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        topology: who is whose neighbour: "ring", the two beside a worker; "hypercube", the log2(N) workers whose number
            differs in one bit; "random", one other worker, drawn anew in each round from the job's seed.
        period: rounds between two exchanges.
        mix: "before" the update of a round, as D-PSGD, whose gradient is then of the parameters before; or "after" it
            (adapt then combine; Chen and Sayed, "Diffusion adaptation strategies", 2012, algorithm ATC).

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.Gossip(workers=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    topology: str = "ring"
    period: int = 1
    mix: str = "before"

    name = "gossip"
    equals_one_device = False
    begins_alike = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        if self.period is None:
            raise UsageError("period must be a whole number of rounds of at least 1, got None")
        check_count("period", self.period)
        if self.topology not in TOPOLOGIES:
            raise UnknownName("topology", self.topology, TOPOLOGIES)
        if self.mix not in ("before", "after"):
            raise UnknownName("mix", self.mix, ("before", "after"))

    def refusals(self) -> tuple[Refusal, ...]:
        when = f"every {self.period} rounds (period), and with their neighbours alone"
        return (*local_steps(self.name, when), moving_average(self.name))

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        refuse_modes(self.name, model)
        # Each worker: its parameters and gradients, what the others see, and a copy during evaluations. Over several
        # hosts, too, what it receives from two neighbours.
        each = 4 if len(cluster.hosts) == 1 else 6
        plan = data_parallel_plan(
            self.name, describe_options(self), self.workers, model, cluster, copies=(each, 0), spread=True
        )
        count = plan.workers
        if self.topology == "hypercube" and count & (count - 1):
            less = 1 << (count.bit_length() - 1)
            raise InfeasiblePlan(
                f"gossip on a hypercube needs a power of two of workers, got {count}; use workers={less} or "
                f"workers={2 * less}, or topology='ring'"
            )
        return plan

    def behave(self, workers: int) -> Behaviour:
        return Behaviour(NeighbourMean(self.topology, self.period))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        broadcast(context.module, context.device_group() or context.group)
        local = LocalExchange(plan.segments, context, first=rank)
        mixing = NeighbourMixing(self, context, local)
        compute = context.whole_model(local_shares=len(plan.shares))
        return Replica(compute, LocalStepsExchange(local, mixing), mixing)


class NeighbourMixing(ParameterMixing):
    """Replaces a worker's parameters by the weighted mean of its own and its neighbours'."""

    def __init__(self, gossip: Gossip, context: WorkerContext, local: LocalExchange) -> None:
        self._topology, self.mixes_after = gossip.topology, gossip.mix == "after"
        self._seed = context.batches.seed
        super().__init__(gossip.period, context.module, local.updater, context.group, self._neighbours, context.closing)

    def _neighbours(self, rank: int, round_: int) -> Sequence[int]:
        return neighbours(self._topology, rank, self.group.world, self._seed, round_)

    def mix(self, round_: int) -> None:
        others = self._neighbours(self.group.rank, round_)
        # All have as many neighbours, or none: so the weights are symmetric, and each row of them sums to 1.
        weight = 1 / (1 + len(others))
        for tensor in self.tensors:
            tensor.mul_(weight)
        for other in others:
            for tensor, theirs in zip(self.tensors, self.theirs(other), strict=True):
                tensor.add_(theirs, alpha=weight)


def neighbours(topology: str, rank: int, world: int, seed: int, round_: int) -> list[int]:
    """Returns the workers that a worker averages with in a round, in order: all ranks agree on who they are.

    >>> neighbours("ring", 0, 5, seed=0, round_=0), neighbours("hypercube", 5, 8, seed=0, round_=0)
    ([1, 4], [1, 4, 7])
    """
    if topology == "ring":
        return sorted({(rank - 1) % world, (rank + 1) % world} - {rank})
    if topology == "hypercube":
        return sorted(rank ^ 1 << bit for bit in range(world.bit_length() - 1))
    partner = matching(world, seed, round_).get(rank)
    return [] if partner is None else [partner]


def matching(world: int, seed: int, round_: int) -> Mapping[int, int]:
    """Returns the partner of each worker in a random matching; with an odd number of workers one has none."""
    order = list(range(world))
    random.Random(f"{seed}/{round_}").shuffle(order)
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return dict(pairs) | {second: first for first, second in pairs}
