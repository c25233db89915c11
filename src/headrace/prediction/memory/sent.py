"""The ends of TCP connections between workers and servers, each alone: what comes lies there until it is used.

`take` returns memory without values, of so many bytes, which counts as what processes exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from headrace.errors import ServerRefused
from headrace.parameter_server.wire import Kind, Message, ShardLayout, decode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ClientTransport, ReceivedMessage, ServerTransport, TransportLayout
from headrace.transport.frames import PIECE_BYTES

WINDOW = 2
"""Pushes of a worker that may be unanswered: those of `RemoteClientTransport`."""


class SentClient(ClientTransport):
    """A worker's end, as `RemoteClientTransport` holds it, whose server has answered all at once by `answer`."""

    window = WINDOW

    def __init__(
        self,
        layout: TransportLayout,
        take: Callable[[int], Tensor],
        answer: Callable[[Message], tuple[bytes, memoryview]],
    ) -> None:
        self.moved_bytes = 0
        self._layout, self._take, self._answer = layout, take, answer
        self._region = take(layout.pushes.nbytes)
        self._answers: list[tuple[bytes, memoryview]] = []
        self._pulled: dict[int, Tensor] = {}
        self._version = 0

    def push_slot(self, slot: int) -> Tensor:
        return self._layout.pushes.of(self._region, slot)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        asked = decode(message)
        self._answers.append(self._answer(asked))
        if asked.kind in (Kind.PULL, Kind.PUSH_PULL):
            for slot in range(asked.first, asked.first + len(asked.numbers)):
                self._pulled[slot] = self._take(self._layout.pulled.lengths[slot])

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        return self._answers.pop(0) if self._answers else None

    def fetch(self, slot: int, into: Tensor) -> int:
        if self._layout.replies is None and slot in self._pulled:
            into.copy_(self._pulled.pop(slot))
        self._version += 1
        return self._version

    def reply_slot(self, slot: int) -> Tensor:
        return self._pulled[slot]

    def close(self) -> None:
        """There is no connection."""


class SentServer(ServerTransport):
    """A server's end, as `RemoteServerTransport` holds it, of so many workers as `peers`."""

    trusts_clients = False
    address = ""
    moved_bytes = 0
    ahead = WINDOW

    def __init__(self, layout: ShardLayout, take: Callable[[int], Tensor], peers: int) -> None:
        self.region = take(layout.slots.nbytes)
        self._layout, self._take = layout, take
        self._places = layout.slots.views(self.region)
        self._pushed: list[dict[int, Tensor]] = [{} for _ in range(peers)]
        self._replies: dict[tuple[int, int], Tensor] = {}
        self._leaving: dict[int, Tensor] = {}
        self.inbox: list[ReceivedMessage] = []

    def parameters(self, slot: int) -> Tensor:
        return self._places[slot]

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def set_version(self, slot: int, version: int) -> None:
        """No worker reads it."""

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        received, self.inbox = self.inbox, []
        for mail in received:
            for slot in decode(mail.message).pushed:
                self._pushed[mail.peer][slot] = self._take(self._layout.push_slots.lengths[slot])
        return received

    def pushed(self, peer: int, slot: int) -> Tensor:
        return self._pushed[peer][slot]

    def release(self, peer: int, slots: Sequence[int]) -> None:
        for slot in slots:
            self._pushed[peer].pop(slot, None)

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        if (peer, slot) not in self._replies:
            assert self._layout.reply_slots is not None
            self._replies[peer, slot] = self._take(self._layout.reply_slots.lengths[slot])
        return self._replies[peer, slot]

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        if decode(message).kind == Kind.ERROR:
            assert not isinstance(blob, SharedSegment)
            raise ServerRefused(bytes(blob).decode())
        for slot in slots:
            reply = self._replies.pop((peer, slot), None)
            # What is longer than a frame is copied, one shard after the other, and waits until all of it has left.
            if reply is None and self._places[slot].nbytes > PIECE_BYTES:
                self._leaving[peer] = self._take(self._places[slot].nbytes)

    def drop(self, peer: int) -> None:
        """There is no connection."""

    def close(self) -> None:
        """There is no connection."""
