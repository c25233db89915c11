"""A client as its server sees it, over the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from headrace.transport.connections import Connection
from headrace.transport.frames import Frame, Reassembler


@dataclass
class RemotePeer:
    """A client as its server sees it, with its number in `ReceivedMessage`.

    `waiting` are the messages that wait to be sent, each with the bytes of its message and blob, which `owed` sums up.
    """

    number: int
    routing: bytes
    connection: Connection
    reassembler: Reassembler
    pushed: dict[int, Tensor] = field(default_factory=dict)
    replies: dict[int, Tensor] = field(default_factory=dict)
    waiting: deque[tuple[int, Iterator[Frame]]] = field(default_factory=deque)
    owed: int = 0
    sent: int = 0
    heard: int = 0
    until: float | None = None

    def forget(self) -> None:
        """Drops what cannot be sent any more."""
        self.waiting.clear()
        self.owed = 0
