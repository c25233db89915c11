"""The ends of connections between workers and servers, each alone: the other end is memory without values.

`take` returns such memory, of so many bytes, which counts as what processes exchange.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from torch import Tensor

from headrace.errors import ServerRefused
from headrace.parameter_server.wire import Kind, Message, ShardLayout, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ClientTransport, ReceivedMessage, ServerTransport, TransportLayout
from headrace.transport.frames import PIECE_BYTES
from headrace.transport.local_client import NOTHING, head_bytes, segment_bytes

WINDOW = 2
"""Pushes of a worker that may be unanswered: those of `RemoteClientTransport`."""

ENDLESS = 1 << 40
"""A sync point that does not come."""


class Answers:
    """What a server answers at once: every push counts, every shard is new, and leases of `span` rounds follow."""

    def __init__(self, span: int) -> None:
        self._span = span
        self._version = itertools.count(1)

    def __call__(self, asked: Message) -> tuple[bytes, memoryview]:
        found, returned = Message(Kind.DONE), NOTHING
        if asked.kind in (Kind.PUSH, Kind.PULL, Kind.PUSH_PULL):
            found = Message(Kind.ANSWER, asked.first, numbers=(next(self._version),) * len(asked.numbers))
        elif asked.kind == Kind.ASK:
            number = next(self._version)
            found = Message(Kind.GRANT, lease=number, numbers=(0, 0, ENDLESS, self._span, number, 0))
        elif asked.kind == Kind.BEGIN:
            returned = memoryview(b"begun")
        return encode(found._replace(number=asked.number)), returned


class _Client(ClientTransport):
    """A worker's end, whose server has answered all at once by `answer`."""

    def __init__(self, layout: TransportLayout, answer: Answers) -> None:
        self.moved_bytes = 0
        self._layout, self._answer = layout, answer
        self._version = itertools.count(1)
        self._answers: deque[tuple[bytes, memoryview]] = deque()

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        self._answers.append(self._answer(decode(message)))

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        """There is no connection."""


class AnsweredClient(_Client):
    """A worker's end, as `LocalClientTransport` holds it."""

    def __init__(self, layout: TransportLayout, take: Callable[[int], Tensor], answer: Answers) -> None:
        super().__init__(layout, answer)
        self._own = [take(nbytes) for nbytes in segment_bytes(layout) if nbytes]
        head = head_bytes(layout.parameters)
        self._sources = layout.parameters.views(take(head + layout.parameters.nbytes)[head:])

    def push_slot(self, slot: int) -> Tensor:
        return self._layout.pushes.of(self._own[0], slot)

    def joined_push_slots(self, slots: range) -> Tensor | None:
        return self._layout.pushes.joined(self._own[0], slots)

    def fetch(self, slot: int, into: Tensor) -> int:
        into.copy_(self._sources[slot])
        return next(self._version)

    def reply_slot(self, slot: int) -> Tensor:
        return self._layout.pulled.of(self._own[-1], slot)


class SentClient(_Client):
    """A worker's end, as `RemoteClientTransport` holds it: what comes lies there until it is used."""

    window = WINDOW

    def __init__(self, layout: TransportLayout, take: Callable[[int], Tensor], answer: Answers) -> None:
        super().__init__(layout, answer)
        self._take, self._region = take, take(layout.pushes.nbytes)
        self._pulled: dict[int, Tensor] = {}

    def push_slot(self, slot: int) -> Tensor:
        return self._layout.pushes.of(self._region, slot)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        super().send(message, slots, blob)
        asked = decode(message)
        if asked.kind in (Kind.PULL, Kind.PUSH_PULL):
            for slot in range(asked.first, asked.first + len(asked.numbers)):
                self._pulled[slot] = self._take(self._layout.pulled.lengths[slot])

    def fetch(self, slot: int, into: Tensor) -> int:
        if self._layout.replies is None and slot in self._pulled:
            into.copy_(self._pulled.pop(slot))
        return next(self._version)

    def reply_slot(self, slot: int) -> Tensor:
        return self._pulled[slot]


class HollowEnd(ServerTransport):
    """A server's end of `peers` workers, which hand it messages by `inbox`; its parameters lie in `region`."""

    address = ""
    moved_bytes = 0
    ahead: ClassVar[int]

    def __init__(self, layout: ShardLayout, region: Tensor, head: int = 0) -> None:
        self.region, self._layout = region, layout
        self._places = layout.slots.views(region[head:])
        self.inbox: list[ReceivedMessage] = []

    def parameters(self, slot: int) -> Tensor:
        return self._places[slot]

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def set_version(self, slot: int, version: int) -> None:
        """No worker reads it."""

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        received, self.inbox = self.inbox, []
        return received

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        if decode(message).kind == Kind.ERROR:
            assert not isinstance(blob, SharedSegment)
            raise ServerRefused(bytes(blob).decode())

    def drop(self, peer: int) -> None:
        """There is no connection."""

    def close(self) -> None:
        """There is no connection."""


class PushedServer(HollowEnd):
    """As `LocalServerTransport` holds it, with the slots of all workers."""

    trusts_clients = True
    ahead = 1

    def __init__(self, layout: ShardLayout, take: Callable[[int], Tensor], peers: int) -> None:
        head = head_bytes(layout.slots)
        super().__init__(layout, take(head + layout.slots.nbytes), head)
        self._pushed = [layout.push_slots.views(take(layout.push_slots.nbytes)) for _ in range(peers)]
        replies = layout.reply_slots
        self._replies = [replies.views(take(replies.nbytes)) for _ in range(peers)] if replies else []

    def pushed(self, peer: int, slot: int) -> Tensor:
        return self._pushed[peer][slot]

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """No worker waits for it."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        return self._replies[peer][slot]


class SentServer(HollowEnd):
    """As `RemoteServerTransport` holds it."""

    trusts_clients = False
    ahead = WINDOW

    def __init__(self, layout: ShardLayout, take: Callable[[int], Tensor], peers: int) -> None:
        super().__init__(layout, take(layout.slots.nbytes))
        self._take = take
        self._pushed: list[dict[int, Tensor]] = [{} for _ in range(peers)]
        self._replies: dict[tuple[int, int], Tensor] = {}
        self._leaving: dict[int, Tensor] = {}

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        received = super().receive(timeout_s)
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
        super().send(peer, message, slots, blob, limited)
        for slot in slots:
            reply = self._replies.pop((peer, slot), None)
            # What is longer than a frame is copied, one shard after the other, and waits until all of it has left.
            if reply is None and self._places[slot].nbytes > PIECE_BYTES:
                self._leaving[peer] = self._take(self._places[slot].nbytes)
