"""A worker of Sandblaster: it computes portions, and steers the solver where its turn has come."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.data_leases import ServerDataLeases
from headrace.parameter_server.client.exchange import ReplicaGroup, ServedExchange
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.lbfgs.solver import Command, CommandLog, SolverOptions, Stage, VectorServers, steer
from headrace.parameter_server.lbfgs.store import log_of
from headrace.parameter_server.wire import Kind, Message, ShardLayout
from headrace.spec.model import ModelSpec
from headrace.training.clipping import HEALTHY, StepDecision, all_finite
from headrace.training.synchronization import DataLeases, Lease, SyncPoint


class RemoteVectors(VectorServers):
    """The vectors of the servers that a client is connected to."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def logs(self) -> list[CommandLog]:
        for server in self._client.servers:
            server.tell(Message(Kind.VECTORS, flag=1))
        return [log_of(json.loads(bytes(server.answer()))) for server in self._client.servers]

    def run(self, stage: Stage, index: int, commands: Sequence[Command], servers: Sequence[int]) -> list[list[float]]:
        blob, asked = json.dumps(commands).encode(), [self._client.servers[server] for server in servers]
        for server in asked:
            server.tell(Message(Kind.VECTORS, numbers=(*stage, index)), blob)
        return [json.loads(bytes(server.answer())) for server in asked]


class PortionLeases(DataLeases):
    """Leases portions of a batch; while another lease is the steering, it steers.

    `base` asks for the leases; `portions` of a batch are the parts of a round; `loss` is the mean over the portion.
    """

    def __init__(self, base: ServerDataLeases, options: SolverOptions, portions: int) -> None:
        self.late = False
        self.base = base
        self._vectors = RemoteVectors(base.client)
        self._options = options
        self._portions = portions
        self._serial = -1
        self.loss = 0.0

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return self.base.moved_bytes

    def begin(self) -> None:
        self.base.begin()

    def ask(self, leaves: bool = False) -> None:
        self.base.ask(leaves)

    def next(self) -> Lease | SyncPoint:
        while True:
            answer = self.base.next()
            if isinstance(answer, SyncPoint):
                return answer
            serial, report = answer.lease // (self._portions + 1), self.base.report
            if answer.part < self._portions:
                if serial != self._serial:
                    self._serial = serial
                    self.base.client.pull()
                # A line search evaluates the same examples at points that the model may never be at.
                self.records = not report[0]
                return answer
            results = list(zip(report[::2], report[1::2], strict=True))
            self.base.report = (float(steer(self._vectors, self._options, answer.round, serial, results)),)
            self.base.ask()

    def weigh(self, weight: float, share: float, loss: Tensor | None = None) -> None:
        self.base.weigh(weight, share)
        self.loss = 0.0 if loss is None else loss.item()

    def halt(self) -> None:
        self.base.halt()

    def advance(self, done: int, until: int) -> None:
        self.base.advance(done, until)

    def renew(self) -> None:
        self.base.renew()

    def end(self) -> None:
        self.base.end()

    def close(self) -> None:
        self.base.close()


class PortionExchange(ServedExchange):
    """Pushes the gradient of each portion; parameters are pulled before the first portion of an evaluation."""

    def __init__(
        self,
        portions: PortionLeases,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
    ) -> None:
        super().__init__(portions.base, layouts, model, group, replica_group)
        self._portions = portions

    def begin(self, round_: int) -> None:
        """The parameters came with the lease."""

    def synchronize(self, finite: bool = True) -> StepDecision:
        leases = self.leases
        if leases.lease < 0:
            return HEALTHY
        decision = self.judge(finite)
        known = decision.apply if self.replica_group.checks or not decision.apply else None
        gradients = self.buffer.by_shard()
        if known is None:
            known = all_finite([each for own in gradients for each in own if each is not None])
        self.client.push(gradients, leases.lease, leases.weight, leases.share, known)
        # Late where a faster worker has pushed it; then all servers have it, too.
        self._portions.late = self.client.first_reason == Reason.DUPLICATE
        leases.report = (self._portions.loss, leases.weight)
        return decision
