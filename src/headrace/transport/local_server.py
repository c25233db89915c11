"""Servers and workers of one host: messages through a Unix socket, payload in shared memory.

    worker                                               server
    push slots    (its own memory, the server reads)     parameters (its own memory, workers read)
       gradient ──────────────────────────────────────────► optimizer ─► parameters
                  "there" ─────────────────────────────► 64 bytes
                  64 bytes ◄───────────────────────────── "there"
       private copy ◄─────────────────────────────────────── parameters

No payload is sent: the optimizer reads gradients where the worker has written them, and workers copy parameters from
where the optimizer has written them. Backward itself writes those of large linear layers, see `DirectGradients`. A word
before every shard's parameters has their version and whether they are being written; a copy during which it changed is
repeated.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic

from torch import Tensor

from headrace.shared_memory import futex
from headrace.shared_memory.futex import Spin, look
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport, Slots, TransportLayout
from headrace.transport.local_client import NOTHING, SPIN_S, head_bytes, receive, segment_bytes, send, take, user_of

_MOST_CLIENTS = 1024
_HALF_OPEN = 64
"""Connections that have not said hello; of more, the oldest is ended."""

_HELLO_S = 10.0


@dataclass
class _Peer:
    """A client; a message that is not sent yet has a blob, or the descriptor of one."""

    number: int
    socket: socket.socket
    segments: list[SharedSegment] = field(default_factory=list)
    pushed: list[Tensor] = field(default_factory=list)
    replies: list[Tensor] = field(default_factory=list)
    unsent: deque[tuple[bytes, bytes | bytearray | memoryview | int]] = field(default_factory=deque)
    unread: int = 0

    def forget_unsent(self) -> None:
        while self.unsent:
            _, blob = self.unsent.popleft()
            if isinstance(blob, int):
                os.close(blob)


class LocalServerTransport(ServerTransport):
    """The server's end; its address is a name in Linux's abstract name space.

    `region` has the parameters, and `descriptor` is readable when there may be something to receive.
    """

    trusts_clients = True

    def __init__(self, parameters: Slots, pushes: Slots, replies: Slots | None = None, rows_bytes: int = 0) -> None:
        self.moved_bytes = 0
        self._layout = TransportLayout(parameters, pushes, replies, rows_bytes)
        head = head_bytes(parameters)
        self._shared = SharedSegment.create(head + parameters.nbytes, "parameters", lasting=True)
        self.region = self._shared.tensor(start=head)
        self._words = self._shared.memory[: 8 * len(parameters)].cast("q")
        self._changing = _Writing(self._words)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        # In the abstract name space no file is left behind by a killed process. Users are checked below.
        name = f"headrace-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.address = f"local:{name}"
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self.descriptor = self._poll.fileno()
        self._spin = Spin(SPIN_S)
        self._numbers = count()
        self._gone: list[int] = []
        self._peers: dict[int, _Peer] = {}
        self._by_descriptor: dict[int, _Peer] = {}
        self._half_open: dict[int, float] = {}

    def parameters(self, slot: int) -> Tensor:
        return self._layout.parameters.of(self.region, slot)

    def writing(self, slots: Sequence[int]) -> _Writing:
        self._changing.slots = slots
        return self._changing

    def set_version(self, slot: int, version: int) -> None:
        self._words[slot] = version << 1 | self._words[slot] & 1

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        # The pushes of an ended connection were needed until now.
        while self._gone:
            self.drop(self._gone.pop())
        received: list[ReceivedMessage] = []
        for descriptor, events in look(self._poll.poll, self._spin, timeout_s):
            peer = self._by_descriptor.get(descriptor)
            if peer is not None and events & select.EPOLLOUT:
                self._poll.modify(descriptor, select.EPOLLIN)
                self._flush(peer)
            if events == select.EPOLLOUT:
                continue
            if peer is None:
                self._accept()
            elif peer.number in self._half_open:
                self._greet(peer)
            else:
                received.append(self._receive_from(peer))
        self._drop_silent()
        return received

    def pushed(self, peer: int, slot: int) -> Tensor:
        try:
            return self._peers[peer].pushed[slot]
        except IndexError:
            raise ValueError("a push from a link without a place for it") from None

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """The slots are the client's own memory."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        return self._peers[peer].replies[slot]

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        to = self._peers.get(peer)
        if to is None:
            return
        self.moved_bytes += self._layout.pulled.sum(slots)
        # Duplicated, because the owner of a segment may close it before it is sent.
        to.unsent.append((message, os.dup(blob.descriptor) if isinstance(blob, SharedSegment) else blob))
        to.unread += _length(*to.unsent[-1])
        if len(to.unsent) == 1:
            self._flush(to)
        elif limited and to.unread > self._layout.unread_bytes:
            # The client sends requests and does not read the answers.
            self._break(to)

    def drop(self, peer: int) -> None:
        dropped = self._peers.pop(peer, None)
        if dropped is None:
            return
        self._poll.unregister(dropped.socket)
        self._half_open.pop(peer, None)
        del self._by_descriptor[dropped.socket.fileno()]
        dropped.socket.close()
        dropped.forget_unsent()
        for segment in dropped.segments:
            segment.close()

    def close(self) -> None:
        for peer in list(self._peers):
            self.drop(peer)
        self._poll.close()
        self._listener.close()
        self._shared.close()

    def _flush(self, peer: _Peer) -> None:
        """Sends what the socket has room for; the rest when the client has read."""
        try:
            while peer.unsent:
                message, blob = peer.unsent[0]
                send(peer.socket, message, blob)
                peer.unsent.popleft()
                peer.unread -= _length(message, blob)
                if isinstance(blob, int):
                    os.close(blob)
        except BlockingIOError:
            self._poll.modify(peer.socket, select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            self._break(peer)

    def _break(self, peer: _Peer) -> None:
        """Ends a connection; the next `receive` reports it."""
        peer.forget_unsent()
        with suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if user_of(connection) != os.getuid() or len(self._peers) >= _MOST_CLIENTS + _HALF_OPEN:
                    connection.close()
                    continue
                connection.setblocking(False)
                peer = _Peer(next(self._numbers), connection)
                self._peers[peer.number] = self._by_descriptor[connection.fileno()] = peer
                self._half_open[peer.number] = monotonic()
                self._poll.register(connection, select.EPOLLIN)

    def _drop_silent(self) -> None:
        """Ends connections that have not said hello in time, now that all that has arrived was read."""
        while self._half_open:
            peer, since = next(iter(self._half_open.items()))
            if len(self._half_open) <= _HALF_OPEN and monotonic() - since < _HELLO_S:
                return
            self.drop(peer)

    def _greet(self, peer: _Peer) -> None:
        """Takes the segments of a new client, and sends the parameters' memory."""
        del self._half_open[peer.number]
        try:
            message, descriptors = take(peer.socket, 2)
        except (OSError, ValueError):
            self.drop(peer.number)
            return
        try:
            layout = self._layout.match(message)
            if len(self._peers) - len(self._half_open) > _MOST_CLIENTS:
                raise ValueError(f"the server has {_MOST_CLIENTS:,} links already, which is the most")
            lengths = segment_bytes(layout)
            if len(lengths) != len(descriptors):
                raise ValueError(f"{len(descriptors)} pieces of memory came, not {len(lengths)}")
            for length in lengths:
                peer.segments.append(SharedSegment.received(descriptors.pop(0), length))
        except (ValueError, OSError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            with suppress(OSError):
                peer.socket.send(b"\1" + str(error).encode())
            self.drop(peer.number)
            return
        if layout.pushes:
            peer.pushed = layout.pushes.views(peer.segments[0].tensor())
        if layout.replies:
            peer.replies = layout.replies.views(peer.segments[-1].tensor())
        readable = os.open(f"/proc/self/fd/{self._shared.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(peer.socket, [b"\0"], [readable])
        except OSError:
            self.drop(peer.number)
        finally:
            os.close(readable)

    def _receive_from(self, peer: _Peer) -> ReceivedMessage:
        try:
            message, blob = receive(peer.socket, self._layout.blob_bytes)
        except (OSError, ValueError):
            message, blob = b"", NOTHING
        if not message:
            self._gone.append(peer.number)
        return ReceivedMessage(peer.number, message, blob, peer.segments[0] if peer.pushed else None)


def _length(message: bytes, blob: bytes | bytearray | memoryview | int) -> int:
    """Returns how much of a message and its blob a client can leave unread."""
    return len(message) + (0 if isinstance(blob, int) else len(blob))


class _Writing:
    """The context of `writing`, for `slots`; never entered twice at once."""

    def __init__(self, words: memoryview) -> None:
        self.slots: Sequence[int] = ()
        self._words = words

    def __enter__(self) -> None:
        for slot in self.slots:
            self._words[slot] |= 1
        futex.fence()

    def __exit__(self, *_: object) -> None:
        futex.fence()
        for slot in self.slots:
            self._words[slot] &= -2
