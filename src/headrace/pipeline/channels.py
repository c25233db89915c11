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

from headrace.channels.mailbox import Inbox, Outbox
from headrace.channels.mailboxes import Mailboxes, Route
from headrace.collectives.base import ProcessGroup
from headrace.pipeline.message import pack, unpack


@dataclass(frozen=True)
class Edge:
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


class Channel:
    """One way, as a rank sees it.

    Args:
        device: where this rank's stages are.
        sender, receiver: this rank's ends; both None where the rank has both stages.
    """

    def __init__(self, device: torch.device, sender: Outbox | None = None, receiver: Inbox | None = None) -> None:
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


class Channels:
    """All ways that begin or end at one rank. Every rank makes them at the same time.

    Args:
        ways: of the whole pipeline, the same on every rank.
        ranks: how many there are; stage s is on rank s modulo ranks.
        host: the ranks.
        device: of this rank.
    """

    def __init__(self, ways: Iterable[Edge], ranks: int, group: ProcessGroup, device: torch.device) -> None:
        self.device = device
        ways = tuple(ways)
        routes = [Route(way.source % ranks, way.target % ranks, way.slots) for way in ways]
        self._mailboxes = Mailboxes(routes, group)
        outboxes, inboxes = self._mailboxes.outboxes, self._mailboxes.inboxes
        self._roads = {
            (way.source, way.target, way.kind): Channel(device, outboxes.get(index), inboxes.get(index))
            for index, (way, route) in enumerate(zip(ways, routes, strict=True))
            if group.rank in (route.source, route.target)
        }

    def road(self, source: int, target: int, kind: str) -> Channel:
        """Returns a way that begins or ends here."""
        return self._roads[source, target, kind]

    @property
    def moved_bytes(self) -> int:
        """Bytes that this rank has written and read so far."""
        return sum(road.moved_bytes for road in self._roads.values())

    def close(self) -> None:
        """Lets go of memory and connections."""
        self._mailboxes.close()
