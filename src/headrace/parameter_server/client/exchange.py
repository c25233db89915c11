"""What every strategy with servers exchanges alike: its state, its averages, what a worker thinks of its gradient."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.gradients import GradientBuffer, ReplicaGroup
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.parameter_server.wire.messages import Kind, Message
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Exchange
from headrace.training.optimizer_state import StatePiece
from headrace.training.update import PARAMETER


class ServedExchange(Exchange):
    """An exchange with servers, which own the optimizer.

    Args:
        client: of this worker.
        forms: the servers' shards.
        held: this worker's gradients.
        group: the workers, or those of them that hold the same part of the model.
        agreement: of this worker's replica.
        leads: whether this worker brings what there is to begin with.

    Attributes:
        client, held, agreement: see there.
        parameter_bytes: of this worker's copy.
    """

    parameter_bytes: int

    def __init__(
        self,
        client: Client,
        layouts: Sequence[ShardLayout],
        buffer: GradientBuffer,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        leads: bool,
    ) -> None:
        self.client = client
        self._leads = leads
        self.buffer = buffer
        self.replica_group = replica_group
        self._layouts = layouts
        self._group = group

    def judge(self, finite: bool) -> StepDecision:
        """Looks at this worker's gradient, and clips it."""
        return self.replica_group.judge(self.buffer, finite, self._group.rank)

    def update(self, round_: int) -> None:
        """The servers have, when they answered the push."""

    def skip(self, round_: int) -> None:
        """The servers have left it out."""

    def swap_weights(self, averaged: bool) -> None:
        self._group.barrier()
        if self._group.rank == 0:
            for server in range(len(self._layouts)):
                self.client.ask(server, Message(Kind.AVERAGE, flag=averaged))
        self._group.barrier()
        self.client.pull()

    def state(self) -> tuple[StatePiece, ...]:
        pieces: list[StatePiece] = []
        for server in self._own():
            for shard in range(len(self._layouts[server])):
                blob = self.client.ask(server, Message(Kind.STATE, shard, 1))
                # In one order on all ranks: those of a replica may join theirs.
                pieces += [StatePiece.parse(name, value) for name, value in sorted(load(blob).items())]
        return tuple(pieces)

    def settings(self) -> dict[str, Any]:
        # Of a replica, one rank may hold nothing that is trained; the first one has.
        settings: dict[str, Any] = json.loads(self.client.ask(0, Message(Kind.STATE))) if self._layouts else {}
        return settings

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        by_parameter: dict[str, list[StatePiece]] = {}
        for state in pieces:
            by_parameter.setdefault(state.parameter, []).append(state)
        for server in range(len(self._layouts) if self._leads else 0):
            said = "" if settings is None else json.dumps(settings)
            # First, because it forgets what state there was.
            self.client.ask(server, Message(Kind.LOAD), said.encode())
            for shard, piece in enumerate(self._layouts[server].pieces):
                own = by_parameter.get(piece.parameter, ())
                blob = save({each.name: each.value.contiguous() for each in own})
                self.client.ask(server, Message(Kind.LOAD, shard, 1), blob)

    def give(self, places: Sequence[Sequence[Tensor]], beside: bool = False) -> None:
        """Gives the servers what this worker has, if that is what there is to begin with.

        Args:
            places: of it, by server and shard.
            beside: only what is beside the parameters.
        """
        for server, (layout, own) in enumerate(zip(self._layouts, places, strict=True) if self._leads else ()):
            for shard, (piece, value) in enumerate(zip(layout.pieces, own, strict=True)):
                if piece.exact or not beside:
                    state = StatePiece(piece.parameter, PARAMETER, piece.start, value)
                    self.client.ask(server, Message(Kind.LOAD, shard, 1), save({state.name: value.cpu()}))

    def memory(self) -> tuple[int, int]:
        return self.parameter_bytes, 0

    def _own(self) -> range:
        """The servers whose state this worker brings into a checkpoint."""
        return range(self._group.rank, len(self._layouts), self._group.world)
