"""A server's transport for workers of other hosts: ZeroMQ over TCP, in frames of about a megabyte, always encrypted.

worker: DEALER ── CURVE ──► ROUTER :server       one connection for each client, whose end is the end of the client;
                                                 ZeroMQ never reconnects or repeats by itself
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from math import inf
from select import EPOLLIN, epoll
from time import monotonic

import torch
import zmq
from torch import Tensor

from headrace.errors import UsageError
from headrace.shared_memory.segment import SharedSegment, memory_file
from headrace.transport import frames
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport, Slots, TransportLayout
from headrace.transport.connections import Connection, wire_bytes
from headrace.transport.frames import Frame, FrameKind, Reassembler, control_frame
from headrace.transport.messages import MessageListener
from headrace.transport.zeromq import Keys, is_loopback, waits

_AGAIN_S = 0.005
_FAREWELL_S = 2.0
"""How long the last messages may take."""

_MOST_CLIENTS = 1024
_TURN_FRAMES = 32


@dataclass
class _Peer:
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


class RemoteServerTransport(ServerTransport):
    """The server's end; it belongs to one thread, and copies what it sends in `send` and `receive`.

    `address` is "tcp://host:port" of this machine, with port 0 for a free one. `secret` is the run's, which clients
    need; on loopback a new one is made if there is none. `region` is where the parameters are, `(nbytes,)` uint8; its
    own memory if None. Raises UsageError if it would listen to other machines without a secret, or cannot listen there.

    `descriptor` is readable when there may be something to receive, and `rest_s` says how long `receive` may rest after
    a call that has found nothing.
    """

    def __init__(
        self,
        parameters: Slots,
        pushes: Slots,
        replies: Slots | None = None,
        address: str = "tcp://127.0.0.1:0",
        secret: bytes | None = None,
        region: Tensor | None = None,
        rows_bytes: int = 0,
    ) -> None:
        if secret is None and not is_loopback(address):
            raise UsageError(
                f"{address} can be reached from other machines, and the run has no secret to tell workers from "
                "strangers; make one with secrets.token_bytes(32) and give it to every process of the run"
            )
        self.secret = secret if secret is not None else secrets.token_bytes(32)
        self.moved_bytes = 0
        self._layout = TransportLayout(parameters, pushes, replies, rows_bytes)
        self._region = torch.zeros(parameters.nbytes, dtype=torch.uint8) if region is None else region
        self._content = self._region.numpy().data
        self._versions = [0] * len(parameters)
        self._numbers = count()
        self._peers: dict[int, _Peer] = {}
        self._routes: dict[bytes, _Peer] = {}
        self._by_connection: dict[Connection, _Peer] = {}
        self._reported: list[_Peer] = []
        self._listener = MessageListener(address, Keys(self.secret))
        self.address, self._socket, self._guard = self._listener.address, self._listener.socket, self._listener.guard
        self._socket.router_mandatory = True
        # Shows other programs, such as `headrace doctor`, that this process is a server.
        self._mark = memory_file("port")
        self._poll = epoll()
        for descriptor in (self._socket.FD, self._guard.ended_fd):
            self._poll.register(descriptor, EPOLLIN)
        self.descriptor, self.rest_s = self._poll.fileno(), inf

    def parameters(self, slot: int) -> Tensor:
        return self._layout.parameters.of(self._region, slot)

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def set_version(self, slot: int, version: int) -> None:
        self._versions[slot] = version

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        for peer in self._reported:
            self._remove(peer)
        self._reported = []
        deadline = monotonic() + timeout_s
        while True:
            ended = self._guard.take_ended()
            received = self._read()
            waiting = self._flush_all()
            # Last, because frames before an end count. The state of an ended client is needed until it is handled.
            self._reported = self._part(ended)
            received += [ReceivedMessage(peer.number, b"") for peer in self._reported]
            # ZeroMQ reports only once that a client has room again, and sending to another may have consumed the
            # report.
            self.rest_s = 0.0 if waits(self._socket) else _AGAIN_S if waiting else inf
            if not received and self.rest_s:
                self._guard.disconnect_silent()
            left = deadline - monotonic()
            if received or left <= 0:
                return received
            if self.rest_s:
                self._poll.poll(min(left, self.rest_s))

    def pushed(self, peer: int, slot: int) -> Tensor:
        try:
            return self._peers[peer].pushed[slot]
        except KeyError:
            raise ValueError(f"a push is announced for slot {slot} and has not been sent") from None

    def release(self, peer: int, slots: Sequence[int]) -> None:
        if peer in self._peers:
            for slot in slots:
                self._peers[peer].pushed.pop(slot, None)

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        replies = self._peers[peer].replies
        if slot not in replies:
            replies[slot] = torch.empty(self._layout.pulled.lengths[slot], dtype=torch.uint8)
        return replies[slot]

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        blob = blob.memory if isinstance(blob, SharedSegment) else blob
        to = self._peers.get(peer)
        if to is None or to.until is not None:
            return
        replies = {} if self._layout.replies is None else {slot: to.replies.pop(slot) for slot in slots}
        lengths = self._layout.pulled.lengths

        def take(slot: int) -> tuple[int, memoryview]:
            if slot in replies:
                return self._versions[slot], replies[slot].numpy().data
            content = self._layout.parameters.of(self._content, slot)
            # Several frames must be of one version.
            return self._versions[slot], content if len(content) <= frames.PIECE_BYTES else memoryview(bytes(content))

        self.moved_bytes += self._layout.pulled.sum(slots)
        parts = frames.to_frames(message, [(slot, lengths[slot]) for slot in slots], take, blob)
        self._write(to, parts, len(message) + len(blob))
        if limited and len(to.waiting) > 1 and to.owed > self._layout.unread_bytes:
            # The client sends requests and does not read the answers.
            to.forget()
            self._guard.disconnect(to.connection)

    def drop(self, peer: int) -> None:
        to = self._peers.get(peer)
        if to is not None and to.until is None:
            self._write(to, iter([control_frame(FrameKind.FAREWELL)]), 0)
            to.until = monotonic() + _FAREWELL_S

    def close(self) -> None:
        deadline = monotonic() + _FAREWELL_S
        while not self._poll.closed and self._flush_all() and monotonic() < deadline:
            self._part(self._guard.take_ended())
            self._poll.poll(_AGAIN_S)
        if not self._poll.closed:
            self._poll.close()
            self._listener.close(int(_FAREWELL_S * 1000))
            os.close(self._mark)

    def _part(self, ended: Sequence[Connection]) -> list[_Peer]:
        """Removes clients whose connections have ended; returns those whose end is not known yet."""
        unknown = []
        for connection in ended:
            peer = self._by_connection.get(connection)
            if peer is None:
                continue
            peer.forget()
            if peer.until is None:
                unknown.append(peer)
            else:
                self._remove(peer)
        return unknown

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.number]
        del self._routes[peer.routing]
        del self._by_connection[peer.connection]

    def _read(self) -> list[ReceivedMessage]:
        """Receives what has arrived, but not for ever, even if it arrives faster than it is read."""
        received: list[ReceivedMessage] = []
        for _ in range(_TURN_FRAMES * (len(self._peers) + 1)):
            try:
                routing = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            # One part too many, if there are more than a frame has.
            parts: list[memoryview] = []
            while self._socket.rcvmore:
                part = self._socket.recv(copy=False)
                if len(parts) <= frames.MOST_PARTS:
                    parts.append(part.buffer)
            peer = self._routes.get(routing.bytes)
            if peer is None:
                self._greet(routing, parts)
            elif peer.until is None:
                received += self._take(peer, parts)
        return received

    def _take(self, peer: _Peer, parts: Sequence[memoryview]) -> list[ReceivedMessage]:
        peer.connection.taken += sum(wire_bytes(len(part)) for part in parts)
        try:
            payload = peer.reassembler.add(parts)
            peer.heard += 1
            frames.expect_number(parts, peer.heard)
            if payload is None:
                return []
            if not payload.message:
                raise ValueError("an empty message")
        except ValueError:
            # A wrong frame ends its sender's connection, and nothing else.
            self.drop(peer.number)
            return [ReceivedMessage(peer.number, b"")]
        peer.pushed.update({slot: content for slot, (_, content) in payload.slots.items()})
        self.moved_bytes += self._layout.pushes.sum([*payload.slots])
        return [ReceivedMessage(peer.number, payload.message, payload.blob)]

    def _greet(self, routing: zmq.Frame, parts: Sequence[memoryview]) -> None:
        """Accepts a new client if its layout matches."""
        connection = self._guard.find(int(routing.get(zmq.SRCFD)))
        if connection is None:
            return
        connection.taken += sum(wire_bytes(len(part)) for part in parts)
        self._guard.greet(connection)
        reassembler = Reassembler(self._layout.pushes.lengths, self._layout.blob_bytes)
        peer = _Peer(next(self._numbers), routing.bytes, connection, reassembler)
        self._peers[peer.number] = self._routes[peer.routing] = self._by_connection[connection] = peer
        try:
            if frames.kind_of(parts) != FrameKind.HELLO:
                raise ValueError("a client begins with its layout")
            frames.expect_number(parts, 0)
            if len(self._peers) > _MOST_CLIENTS:
                raise ValueError(f"the server has {_MOST_CLIENTS:,} links already, which is the most")
            self._layout.match(bytes(parts[1]))
        except ValueError as error:
            self._write(peer, iter([control_frame(FrameKind.FAREWELL, str(error).encode())]), 0)
            peer.until = monotonic() + _FAREWELL_S
        else:
            self._write(peer, iter([control_frame(FrameKind.WELCOME)]), 0)

    def _write(self, peer: _Peer, parts: Iterator[Frame], owed: int) -> None:
        peer.waiting.append((owed, parts))
        peer.owed += owed
        self._flush(peer)

    def _flush_all(self) -> bool:
        """Sends what there is room for, and disconnects dropped clients; returns whether frames are left."""
        now = monotonic()
        for peer in list(self._peers.values()):
            self._flush(peer)
            if peer.until is not None and now > peer.until:
                self._guard.disconnect(peer.connection)
                peer.until = now + _FAREWELL_S
        return any(peer.waiting for peer in self._peers.values())

    def _flush(self, peer: _Peer) -> None:
        """Sends a client what there is room for. Frames are made only then, so that nothing is copied early."""
        while peer.waiting:
            owed, message = peer.waiting[0]
            try:
                self._socket.send(peer.routing, zmq.NOBLOCK | zmq.SNDMORE)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                # Its end is about to be reported.
                peer.forget()
                return
            parts = next(message)
            self._socket.send_multipart(frames.numbered(parts, peer.sent))
            peer.sent += 1
            if frames.kind_of(parts) != FrameKind.PART:
                peer.waiting.popleft()
                peer.owed -= owed
