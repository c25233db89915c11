"""What the ranks of one replica agree on, who speak to servers as one worker: gradients, leases.

    rank 0   ─ compute ─┐        ┌─ push to servers of its own ─┐          ┌─ ask for a lease ─► all do that
    rank 1   ─ compute ─┴ judge ─┴─ push to servers of its own ─┴ all have ┘

Where a worker has all of the model, it agrees with itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.collectives.base import ProcessGroup
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.gradients import GradientBuffer
from headrace.parameter_server.wire.messages import Kind, Message
from headrace.spec.options import Options
from headrace.training.clipping import GradientClipper, LossScale, StepDecision

_WORDS = 6
"""Numbers of a lease or a fence that all need, but for who meets: of a replica nobody is ever lost alone."""


class ReplicaGroup:
    """Args:
    group: the ranks of the replica.
    options: the job's.
    scale: of the loss, None for none.
    device: where the gradients come from.

    Attributes:
        group: see there.
        leads: whether this rank speaks for the replica with whoever gives out data.
    """

    def __init__(self, group: ProcessGroup, options: Options, scale: LossScale | None, device: torch.device) -> None:
        self.group = group
        self.leads = group.rank == 0
        self._options = options
        # Only to look: clipping is that of one device.
        looking = replace(options, clip_norm=None, clip_value=None)
        self._conditioner = GradientClipper(looking, group, scale, immediate=device.type == "cpu")

    @property
    def looked(self) -> bool:
        """Whether gradients that `judge` lets pass are known to be finite."""
        return self._conditioner.looks

    def judge(self, held: GradientBuffer, finite: bool, replica: int) -> StepDecision:
        """Looks at the replica's gradient, and clips it; all ranks call it.

        Args:
            held: this rank's part of it.
            finite: whether its loss is.
            replica: which one this is; with its ranks come those of the next.
        """
        world = self.group.world
        present = held.present
        verdict = self._conditioner.condition(present, present, finite)
        if verdict.apply:
            held.clip(self._options.clip_value, self._options.clip_norm, self.group.sum if world > 1 else None)
        return replace(verdict, bad_losses=tuple(replica * world + place for place in verdict.bad_losses))

    def any(self, flag: bool) -> bool:
        """Returns whether it is so on any rank, when all have come to say."""
        return flag if self.group.world == 1 else self.group.sum([float(flag)])[0] > 0

    def all(self, flag: bool) -> bool:
        """Returns whether it is so on every rank, when all have come to say."""
        return not self.any(not flag)


class LeaderClient:
    """A client of which all ranks of a replica have one, and the first of them speaks about data for all.

    Args:
        client: of this rank.
        group: the ranks of the replica.
    """

    def __init__(self, client: Client, group: ProcessGroup) -> None:
        self._client = client
        self._group = group

    @property
    def rested(self) -> bool:
        """As of `Client`."""
        return self._client.rested

    @property
    def moved_bytes(self) -> int:
        """As of `Client`."""
        return self._client.moved_bytes

    def ask(self, server: int, message: Message, blob: bytes = b"") -> bytes:
        """As of `Client`."""
        return self._client.ask(server, message, blob)

    def pull(self) -> None:
        """As of `Client`."""
        self._client.pull()

    def tell(self, message: Message) -> None:
        """Tells whoever gives out the data something, once."""
        if self._group.rank == 0:
            self._client.tell(message)

    def lease(self, rests: bool = False) -> Message:
        """Waits for the next word about data, and returns it on every rank."""
        if self._group.world == 1:
            return self._client.lease(rests)
        said = [0.0] * (2 + _WORDS)
        if self._group.rank == 0:
            message = self._client.lease(rests)
            said = [float(message.kind), float(message.lease), *map(float, message.numbers[:_WORDS])]
        kind, lease, *numbers = map(int, self._group.sum(said))
        return Message(Kind(kind), lease=lease, numbers=tuple(numbers))

    def close(self) -> None:
        """As of `Client`."""
        self._client.close()
