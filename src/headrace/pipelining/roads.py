"""The ways between stages: straight from the one that makes a value to each that needs it, and back for gradients.

stage 0 ──► stage 1 ──► stage 2          of a model with a skip connection from the first stage to the last
    └───────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.comm.collective import SharedCollective
from headrace.comm.mailbox import Check, Receiver, Sender, head_bytes
from headrace.pipelining.message import pack, unpack

__all__ = ["Road", "Roads", "Way"]


@dataclass(frozen=True)
class Way:
    """From one stage to another.

    Attributes:
        source, target: which; `target` is before `source` where gradients go back.
        kind: "values", "gradients", or "tied" for gradients of parameters that both have.
        slots: how many messages may be on their way.
    """

    source: int
    target: int
    kind: str
    slots: int = 1


class Road:
    """One way, as a rank sees it.

    Args:
        device: where this rank's stages are.
        sender, receiver: this rank's ends; both None where the rank has both stages.
    """

    def __init__(self, device: torch.device, sender: Sender | None = None, receiver: Receiver | None = None) -> None:
        self._device = device
        self._sender = sender
        self._receiver = receiver
        self._own: deque[tuple[dict[str, Any], list[bool]]] = deque()

    def send(self, values: Mapping[str, Any], tracked: Callable[[Tensor], bool]) -> None:
        """Sends values by name; see `pack`."""
        if self._sender:
            self._sender.send(*pack(values, tracked))
            return
        marks = [isinstance(value, Tensor) and tracked(value) for value in values.values()]
        near = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._own.append((near, marks))

    def receive(self, track: Callable[[Tensor, bool], Tensor]) -> dict[str, Any]:
        """Returns the values that were sent first, as soon as they are there.

        Args:
            track: takes a tensor, and whether a gradient is to be sent back for it, and returns what stands for it.
        """
        if self._receiver:
            # A copy, so that the next message can be written meanwhile.
            def keep(tensor: Tensor, tracked: bool) -> Tensor:
                return track(tensor.to(self._device, copy=True), tracked)

            return self._receiver.receive(lambda note, data: unpack(note, data, keep))
        values, marks = self._own.popleft()
        return {
            name: track(value, mark) if isinstance(value, Tensor) else value
            for (name, value), mark in zip(values.items(), marks, strict=True)
        }

    @property
    def moved_bytes(self) -> int:
        """Bytes that were written to it and read from it by this rank so far."""
        return sum(end.moved_bytes for end in (self._sender, self._receiver) if end)

    def close(self) -> None:
        """Lets go of its memory."""
        for end in (self._sender, self._receiver):
            if end:
                end.close()


class Roads:
    """All ways that begin or end at one rank. Every rank makes them at the same time.

    Args:
        ways: of the whole pipeline, the same on every rank.
        ranks: how many there are; stage s is on rank s modulo ranks.
        host: the ranks.
        device: of this rank.
    """

    def __init__(self, ways: Iterable[Way], ranks: int, host: SharedCollective, device: torch.device) -> None:
        ways = tuple(ways)
        self.device = device
        begins = [0] * ranks
        heads: dict[Way, tuple[int, int]] = {}
        for way in ways:
            if way.source % ranks != way.target % ranks:
                source = way.source % ranks
                heads[way] = (begins[source], begins[source] + head_bytes(way.slots))
                begins[source] = heads[way][1]
        regions = host.share(begins[host.rank])
        self._roads: dict[tuple[int, int, str], Road] = {}
        for way in ways:
            source, target = way.source % ranks, way.target % ranks
            if host.rank not in (source, target):
                continue
            key = way.source, way.target, way.kind
            if source == target:
                self._roads[key] = Road(device)
                continue
            head = regions[source][slice(*heads[way])]
            sends = host.rank == source
            check = _until_left(host, (target if sends else source) % ranks)
            self._roads[key] = Road(
                device, Sender(head, check) if sends else None, None if sends else Receiver(head, check)
            )

    def road(self, source: int, target: int, kind: str) -> Road:
        """Returns a way that begins or ends here."""
        return self._roads[source, target, kind]

    @property
    def moved_bytes(self) -> int:
        """Bytes that this rank has written and read so far."""
        return sum(road.moved_bytes for road in self._roads.values())

    def close(self) -> None:
        """Lets go of all memory."""
        for road in self._roads.values():
            road.close()


def _until_left(host: SharedCollective, peer: int) -> Check:
    """Returns what raises where a rank is lost, or the loop of the one that is waited for has ended."""

    def check(came: Callable[[], bool]) -> None:
        host.check()
        host.ends.check(peer, host.rank, came)

    return check
