"""Strategies with servers: their base class, what the engine hands to a server, and what replicas agree by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.parameter_server.client.exchange import ReplicaGroup
from headrace.parameter_server.planning import ServerProcess
from headrace.parameter_server.server.server import Server
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.context import WorkerContext
from headrace.strategies.strategy import Strategy


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
    """A strategy whose plans may have servers."""

    @abstractmethod
    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        """Builds what the process of a rank runs that is a server or a backup in the plan."""


def agreement(context: WorkerContext) -> ReplicaGroup:
    """Returns what a worker's replica agrees by, where replicas go on by themselves."""
    group = context.inside.group if context.inside else ThreadCollective(ThreadGroup(1), 0)
    return ReplicaGroup(group, context.options, context.scale, context.device)
