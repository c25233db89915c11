"""Exchanges with parameter servers, which own the optimizer: what all of them have, and that of `ParameterServer`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.data_leases import ServerDataLeases
from headrace.parameter_server.client.gradients import GradientBuffer, ReplicaGroup
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.parameter_server.wire.messages import Kind, Message
from headrace.spec.model import ModelSpec
from headrace.training.clipping import HEALTHY, StepDecision
from headrace.training.exchange import Exchange
from headrace.training.optimizer_state import StatePiece
from headrace.training.update import PARAMETER


class ServedExchange(Exchange):
    """State, averages and gradient checks of a worker whose servers own the optimizer.

    `group` is the workers, or those that hold the same part of the model; `leads` says whether this worker loads the
    initial parameters and state into the servers.
    """

    def __init__(
        self,
        client: Client,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        leads: bool,
    ) -> None:
        self.client = client
        self.buffer = GradientBuffer(layouts, model)
        self.replica_group = replica_group
        self.parameter_bytes = model.parameter_bytes
        self._leads = leads
        self._layouts = layouts
        self._group = group

    def judge(self, finite: bool) -> StepDecision:
        """Checks this worker's gradient, and clips it."""
        return self.replica_group.judge(self.buffer, finite, self._group.rank)

    def update(self, round_: int) -> None:
        """The servers have updated the parameters before they answered the push."""

    def skip(self, round_: int) -> None:
        """The servers have left the gradient out."""

    def swap_weights(self, averaged: bool) -> None:
        self._group.barrier()
        if self._group.rank == 0:
            for server in range(len(self._layouts)):
                self.client.ask(server, Message(Kind.AVERAGE, flag=averaged))
        self._group.barrier()
        self.client.pull()

    def state(self) -> tuple[StatePiece, ...]:
        pieces: list[StatePiece] = []
        for server in range(self._group.rank, len(self._layouts), self._group.world):
            for shard in range(len(self._layouts[server])):
                blob = self.client.ask(server, Message(Kind.STATE, shard, 1))
                # In one order on all ranks, because the ranks of a replica may join their pieces.
                pieces += [StatePiece.parse(name, value) for name, value in sorted(load(blob).items())]
        return tuple(pieces)

    def settings(self) -> dict[str, Any]:
        # A rank of a replica may have no trainable parameter, and so no server; the first rank has one.
        settings: dict[str, Any] = json.loads(self.client.ask(0, Message(Kind.STATE))) if self._layouts else {}
        return settings

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        by_parameter: dict[str, list[StatePiece]] = {}
        for state in pieces:
            by_parameter.setdefault(state.parameter, []).append(state)
        for server in range(len(self._layouts) if self._leads else 0):
            # First, because it makes the server drop all state that it has.
            self.client.ask(server, Message(Kind.LOAD), b"" if settings is None else json.dumps(settings).encode())
            for shard, spec in enumerate(self._layouts[server].pieces):
                own = by_parameter.get(spec.parameter, ())
                blob = save({each.name: each.value.contiguous() for each in own})
                self.client.ask(server, Message(Kind.LOAD, shard, 1), blob)

    def load_values(self, places: Sequence[Sequence[Tensor]], only_state: bool = False) -> None:
        """Loads this worker's values into the servers, by server and shard, if it leads.

        `only_state` leaves out the parameters, and loads what is stored beside them.
        """
        for server, (layout, own) in enumerate(zip(self._layouts, places, strict=True) if self._leads else ()):
            for shard, (spec, value) in enumerate(zip(layout.pieces, own, strict=True)):
                if spec.exact or not only_state:
                    state = StatePiece(spec.parameter, PARAMETER, spec.start, value)
                    self.client.ask(server, Message(Kind.LOAD, shard, 1), save({state.name: value.cpu()}))

    def memory(self) -> tuple[int, int]:
        return self.parameter_bytes, 0


class ParameterServerExchange(ServedExchange):
    """Pushes each gradient, and pulls the updated parameters in the same round trip."""

    def __init__(
        self,
        client: Client,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        leads: bool,
        leases: ServerDataLeases,
    ) -> None:
        super().__init__(client, layouts, model, group, replica_group, leads)
        self._leases = leases
        self._pulled = False

    def begin(self, round_: int) -> None:
        if not self._pulled:
            self.client.pull()
        self._pulled = False

    def synchronize(self, finite: bool = True) -> StepDecision:
        leases = self._leases
        if leases.lease < 0:
            # This worker had no data before the sync point, and no other worker waits for it.
            return HEALTHY
        decision = self.judge(finite)
        known = decision.apply if self.replica_group.checks or not decision.apply else None
        gradients = self.buffer.by_shard()
        reason = self.client.push(gradients, leases.lease, leases.weight, leases.share, known, pull=True)
        self._pulled = True
        # The lease is done when all ranks of the replica have pushed.
        leases.late = self.replica_group.any(reason == Reason.LATE)
        return decision
