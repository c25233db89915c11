"""Strategies with servers: their base class, what the engine hands to a server, and what replicas agree by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import InfeasiblePlan
from headrace.parameter_server.client.exchange import ReplicaGroup
from headrace.parameter_server.planning import ServerProcess, assign_shards
from headrace.parameter_server.server.server import Server
from headrace.policies.roles import require_memory, worker_and_server_roles
from headrace.policies.staleness import Admission, Combination, EveryPush, Unbounded
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.context import WorkerContext
from headrace.strategies.refusals import Refusal, served
from headrace.strategies.strategy import Strategy, describe_options


@dataclass(frozen=True)
class ServerContext:
    """What an engine hands to a strategy in one server.

    Attributes:
        optimizer: the job's factory.
        first: the round that the run begins with.
        until: the round before which the workers synchronize first.
        process: the one that serves.
    """

    model: ModelSpec
    optimizer: Callable[..., Any]
    options: Options
    rounds_per_epoch: int
    first: int
    until: int
    process: ServerProcess = field(default_factory=ServerProcess)


class ServedStrategy(Strategy):
    """A strategy whose plans may have servers; its options are fields of the strategies."""

    workers: int | None
    servers: int
    backups: int
    transport: str
    sharding: str | None = None
    placement: str = "greedy"
    begins_alike = True

    def imports(self) -> tuple[str, ...]:
        return "headrace.worker.server", "headrace.worker.loops.leased"

    def refusals(self) -> tuple[Refusal, ...]:
        return served(self.name)

    def plan_with_servers(
        self,
        model: ModelSpec,
        cluster: Cluster,
        copies: int = 3,
        server_copies: int = 1,
        spare_workers: int = 0,
        elastic: bool = True,
    ) -> Plan:
        """Assigns workers, servers and backups to processes, and shards to servers.

        A worker needs the model's size `copies` times: its parameters, what autograd makes, what is being sent; all
        servers together `server_copies` times. A backup needs what its server does, and is filled from a copy. The
        gradients of `spare_workers` are not needed in a round. Raises InfeasiblePlan with the numbers.
        """
        roles = worker_and_server_roles(self.name, self.workers, self.servers, cluster, self.backups)
        count = sum(role.kind == "worker" for role in roles)
        trained, served = model.trainable_bytes, server_copies * (1 + self.backups) + self.backups
        require_memory(self.name, copies * count * trained, cluster, roles, model, served * trained)
        ranks = [role.rank for role in roles if role.kind == "server"]
        transport = "tcp" if len(cluster.hosts) > 1 else self.transport
        segments = assign_shards(model, ranks, self.sharding, self.placement, transport)
        if spare_workers >= count:
            raise InfeasiblePlan(
                f"{spare_workers} of {count} workers cannot be backups; a round needs at least one gradient"
            )
        shares = (1,) * (count - spare_workers)
        options = describe_options(self)
        return Plan(self.name, options, roles, shares, model.trainable_bytes, segments, elastic=elastic)

    def policies(self, workers: int) -> tuple[Admission, Combination]:
        """Returns which of so many workers may proceed, and which pushes make a step: all, each by itself."""
        return Unbounded(), EveryPush()

    @abstractmethod
    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        """Builds what the process of a rank runs that is a server or a backup in the plan."""


def agreement(context: WorkerContext) -> ReplicaGroup:
    """Returns what a worker's replica agrees by, where replicas go on by themselves."""
    group = context.inside.group if context.inside else ThreadCollective(ThreadGroup(1), 0)
    return ReplicaGroup(group, context.options, context.scale, context.device)
