"""A worker of Sandblaster: it computes portions, and steers the solver where its turn has come."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.data_leases import LeasedStep
from headrace.parameter_server.client.exchange import ServedExchange
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.lbfgs.solver import Command, CommandLog, SolverOptions, Stage, VectorServers, steer
from headrace.parameter_server.wire import Kind, Message
from headrace.training.clipping import StepDecision
from headrace.training.synchronization import Lease


class RemoteVectors(VectorServers):
    """The vectors of the servers that a client is connected to."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def logs(self) -> list[CommandLog]:
        return [CommandLog.parse(json.loads(log)) for log in self._client.ask_all(Message(Kind.VECTORS, flag=1))]

    def run(self, stage: Stage, index: int, commands: Sequence[Command], servers: Sequence[int]) -> list[list[float]]:
        asks, described = Message(Kind.VECTORS, numbers=(*stage, index)), json.dumps(commands).encode()
        return [json.loads(numbers) for numbers in self._client.ask_all(asks, described, servers)]


class Steering:
    """Steers the solver where a lease says so, and else brings the parameters to evaluate a portion with.

    `portions` of a batch are the parts of a round.
    """

    def __init__(self, client: Client, options: SolverOptions, portions: int) -> None:
        self._client, self._vectors = client, RemoteVectors(client)
        self._options = options
        self._portions = portions
        self._serial = -1

    def take(self, lease: Lease, report: tuple[float, ...]) -> tuple[float, ...] | None:
        """Returns the report of a lease that is the steering; None for a portion."""
        serial = lease.lease // (self._portions + 1)
        if lease.part < self._portions:
            if serial != self._serial:
                self._serial = serial
                self._client.pull()
            return None
        results = list(zip(report[::2], report[1::2], strict=True))
        return (float(steer(self._vectors, self._options, lease.round, serial, results)),)


class PortionExchange(ServedExchange):
    """Pushes the gradient of each portion; parameters are pulled before the first portion of an evaluation."""

    def begin(self, round_: int) -> None:
        """The parameters came with the lease."""

    def _exchange(self, step: LeasedStep, finite: bool) -> tuple[StepDecision, bool]:
        decision = self._judge(finite)
        known = decision.apply if self.replica_group.checks or not decision.apply else None
        self.client.push(self.buffer.by_shard(), step.lease, step.weight, step.share, known)
        self.buffer.store_nothing()
        # Where a faster worker has pushed it, all servers have it, too.
        return decision, self.client.first_reason == Reason.DUPLICATE
