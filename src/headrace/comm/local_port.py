"""Servers and workers of one host: messages through a Unix socket, payloads in shared memory.

    worker                                               server
    push slots    (its own memory, the server reads)     parameters (its own memory, workers read)
       gradient ──────────────────────────────────────────► optimizer ─► parameters
                  "there" ─────────────────────────────► 64 bytes
                  64 bytes ◄───────────────────────────── "there"
       private copy ◄─────────────────────────────────────── parameters

No payload is sent: the optimizer reads gradients where the worker has put them, and workers copy parameters from where
the optimizer has left them. A word before every shard's parameters says their version and whether they are just being
written; a copy during which it changed is made again.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep

from torch import Tensor

from headrace.comm import futex
from headrace.comm.port import LARGEST_MESSAGE, Layout, Link, Mail, Port, Slots
from headrace.comm.segment import Segment

__all__ = ["LocalLink", "LocalPort"]

_CREDENTIALS = struct.Struct("3i")
_HELLO_S = 30.0
_STALL_S = 60.0
_NAP_S = 30e-6
_BLOB_BYTES = 1 << 32
_OWED_BYTES = 1 << 26
"""Messages and blobs that a link may leave unread, besides what the kernel holds."""

_NOTHING = memoryview(b"")


class LocalPort(Port):
    """Args:
    parameters: places of the shards' parameters.
    pushes: places of what a link pushes.
    replies: places of what a link pulls in another form; None if it pulls parameters as they are.
    """

    def __init__(self, parameters: Slots, pushes: Slots, replies: Slots | None = None) -> None:
        self.moved_bytes = 0
        self._layout = Layout(parameters, pushes, replies)
        head = _head(parameters)
        self._shared = Segment.create(head + parameters.nbytes, "parameters")
        self._region = self._shared.tensor(start=head)
        self._words = self._shared.memory[: 8 * len(parameters)].cast("q")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        # In the abstract name space nothing is left behind, whoever is killed. Who may connect is looked at below.
        name = f"headrace-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.address = f"local:{name}"
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._next = 0
        self._gone: list[int] = []
        self._unsent: dict[int, deque[tuple[bytes, bytes]]] = {}
        self._owed: dict[int, int] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._peers: dict[int, int] = {}
        self._pushed: dict[int, Tensor] = {}
        self._replied: dict[int, Tensor] = {}
        self._segments: dict[int, list[Segment]] = {}

    def parameters(self, slot: int) -> Tensor:
        return self._layout.parameters.of(self._region, slot)

    @contextmanager
    def changing(self, slots: Sequence[int]) -> Iterator[None]:
        words = self._words
        for slot in slots:
            words[slot] |= 1
        futex.fence()
        try:
            yield
        finally:
            futex.fence()
            for slot in slots:
                words[slot] &= -2

    def show(self, slot: int, version: int) -> None:
        self._words[slot] = version << 1 | self._words[slot] & 1

    def receive(self, timeout_s: float) -> list[Mail]:
        # What a link has pushed before it went was needed until now.
        while self._gone:
            self.drop(self._gone.pop())
        mail: list[Mail] = []
        for descriptor, events in self._poll.poll(timeout_s):
            peer = self._peers.get(descriptor)
            if peer is not None and events & select.EPOLLOUT:
                self._flush(peer)
            if events == select.EPOLLOUT:
                continue
            if peer is None:
                self._accept()
            elif peer in self._segments:
                mail += self._receive_from(peer)
            else:
                self._greet(peer)
        return mail

    def pushed(self, peer: int, slot: int) -> Tensor:
        return self._layout.pushes.of(self._pushed[peer], slot)

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """It is the link's own memory."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        return self._layout.pulled.of(self._replied[peer], slot)

    def send(self, peer: int, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        if peer not in self._sockets:
            return
        lengths = self._layout.pulled.lengths
        self.moved_bytes += sum(lengths[slot] for slot in slots)
        unsent = self._unsent.setdefault(peer, deque())
        unsent.append((message, blob))
        self._owed[peer] = self._owed.get(peer, 0) + len(message) + len(blob)
        if len(unsent) == 1:
            self._flush(peer)
        elif self._owed[peer] > _OWED_BYTES:
            # It asks and does not read.
            self._break(peer)

    def drop(self, peer: int) -> None:
        connection = self._sockets.pop(peer, None)
        if connection is None:
            return
        self._poll.unregister(connection)
        del self._peers[connection.fileno()]
        connection.close()
        self._unsent.pop(peer, None)
        self._owed.pop(peer, None)
        self._pushed.pop(peer, None)
        self._replied.pop(peer, None)
        for segment in self._segments.pop(peer, ()):
            segment.close()

    def close(self) -> None:
        for peer in list(self._sockets):
            self.drop(peer)
        self._poll.close()
        self._listener.close()
        self._shared.close()

    def _flush(self, peer: int) -> None:
        """Sends what a link has room for; the rest when it has read."""
        connection, unsent = self._sockets[peer], self._unsent[peer]
        try:
            while unsent:
                _send(connection, *unsent[0])
                self._owed[peer] -= sum(map(len, unsent.popleft()))
        except BlockingIOError:
            self._poll.modify(connection, select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            self._break(peer)
        else:
            self._poll.modify(connection, select.EPOLLIN)

    def _break(self, peer: int) -> None:
        """Ends a connection; the next `receive` tells."""
        self._unsent[peer].clear()
        with suppress(OSError):
            self._sockets[peer].shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if _user_of(connection) != os.getuid():
                connection.close()
                return
            connection.setblocking(False)
            self._sockets[self._next] = connection
            self._peers[connection.fileno()] = self._next
            self._poll.register(connection, select.EPOLLIN)
            self._next += 1

    def _greet(self, peer: int) -> None:
        """Takes what a new link shares, gives what it may read."""
        connection = self._sockets[peer]
        try:
            message, descriptors = _receive_descriptors(connection, 2)
        except (OSError, ValueError):
            self.drop(peer)
            return
        try:
            self._layout.compare(message)
            lengths = _shared_by_links(self._layout)
            if len(lengths) != len(descriptors):
                raise ValueError(f"{len(descriptors)} pieces of memory came, not {len(lengths)}")
            segments = self._segments.setdefault(peer, [])
            while descriptors:
                segments.append(Segment.received(descriptors.pop(0), lengths[len(segments)]))
        except (ValueError, OSError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            with suppress(OSError):
                connection.send(b"\1" + str(error).encode())
            self.drop(peer)
            return
        self._pushed[peer] = segments[0].tensor()
        if len(segments) > 1:
            self._replied[peer] = segments[1].tensor()
        readable = os.open(f"/proc/self/fd/{self._shared.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            socket.send_fds(connection, [b"\0"], [readable])
        except OSError:
            self.drop(peer)
        finally:
            os.close(readable)

    def _receive_from(self, peer: int) -> list[Mail]:
        try:
            message, descriptors = _receive_descriptors(self._sockets[peer], 1)
            blob = _read_blob(descriptors)
        except (OSError, ValueError):
            message, blob = b"", _NOTHING
        if not message:
            self._gone.append(peer)
        return [Mail(peer, message, blob)]


class LocalLink(Link):
    """Args:
    address: of the port.
    parameters, pushes, replies: the same places as the port's.

    Raises:
        ConnectionError: nobody listens there, or whoever does is not of the same kind.
    """

    def __init__(self, address: str, parameters: Slots, pushes: Slots, replies: Slots | None = None) -> None:
        self.moved_bytes = 0
        self._layout = Layout(parameters, pushes, replies)
        self._own = [Segment.create(nbytes, "push") for nbytes in _shared_by_links(self._layout)]
        self._regions = [segment.tensor() for segment in self._own]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_HELLO_S)
        try:
            self._socket.connect("\0" + address.removeprefix("local:"))
            if _user_of(self._socket) != os.getuid():
                raise ConnectionError(f"{address} belongs to another user")
            socket.send_fds(self._socket, [self._layout.hello()], [segment.descriptor for segment in self._own])
            answer, descriptors = _receive_descriptors(self._socket, 1)
            if answer != b"\0" or not descriptors:
                raise ConnectionError(answer[1:].decode(errors="replace") or f"{address} has gone")
        except BaseException:
            self._free()
            raise
        head = _head(parameters)
        self._shared = Segment.received(descriptors[0], head + parameters.nbytes, writable=False)
        self._words = self._shared.memory[: 8 * len(parameters)].cast("q")
        self._region = self._shared.tensor(start=head)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._arrived: deque[tuple[bytes, memoryview]] = deque()

    def push_slot(self, slot: int) -> Tensor:
        return self._layout.pushes.of(self._regions[0], slot)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        self.moved_bytes += sum(self._layout.pushes.lengths[slot] for slot in slots)
        deadline = monotonic() + _STALL_S
        while True:
            try:
                _send(self._socket, message, blob)
                return
            except BlockingIOError:
                self._poll.register(self._socket, select.POLLIN | select.POLLOUT)
            # Takes in what comes meanwhile, or two who send would wait for each other.
            for _, events in self._poll.poll(1000):
                if events & select.POLLIN:
                    self._arrived.append(self._receive())
            if monotonic() > deadline:
                raise TimeoutError(f"the server has taken nothing for {_STALL_S:.0f} s")

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        if self._arrived:
            return self._arrived.popleft()
        self._poll.register(self._socket, select.POLLIN)
        return self._receive() if self._poll.poll(timeout_s * 1000) else None

    def fetch(self, slot: int, into: Tensor) -> int:
        words, source = self._words, self._layout.parameters.of(self._region, slot)
        deadline = monotonic() + _HELLO_S
        while True:
            before: int = words[slot]
            if not before & 1:
                futex.fence()
                into.copy_(source)
                futex.fence()
                if words[slot] == before:
                    self.moved_bytes += source.numel()
                    return before >> 1
            elif monotonic() > deadline:
                raise ConnectionAbortedError(f"shard {slot} has been written to for {_HELLO_S:.0f} s")
            else:
                sleep(_NAP_S)

    def reply_slot(self, slot: int) -> Tensor:
        self.moved_bytes += self._layout.pulled.lengths[slot]
        return self._layout.pulled.of(self._regions[1], slot)

    def close(self) -> None:
        self._free()
        self._shared.close()

    def _receive(self) -> tuple[bytes, memoryview]:
        message, descriptors = _receive_descriptors(self._socket, 1)
        if not message:
            raise ConnectionResetError("the server has gone")
        return message, _read_blob(descriptors)

    def _free(self) -> None:
        self._socket.close()
        for segment in self._own:
            segment.close()


def _head(parameters: Slots) -> int:
    """Returns the length of the words before the parameters: one a shard, `version << 1 | being written`."""
    return -(-8 * len(parameters) // 64) * 64


def _shared_by_links(layout: Layout) -> list[int]:
    """Returns the lengths of the pieces of memory that a link gives to the port."""
    return [slots.nbytes for slots in (layout.pushes, layout.replies) if slots is not None]


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _send(connection: socket.socket, message: bytes, blob: bytes) -> None:
    if not blob:
        connection.send(message)
        return
    descriptor = os.memfd_create("headrace-blob", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(blob)
        socket.send_fds(connection, [message], [descriptor])
    finally:
        os.close(descriptor)


def _receive_descriptors(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    message, descriptors, flags, _ = socket.recv_fds(connection, LARGEST_MESSAGE, most, socket.MSG_CMSG_CLOEXEC)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("a message was too long")
    return message, list(descriptors)


def _read_blob(descriptors: list[int]) -> memoryview:
    """Returns what lies in the file that was sent. Read, not mapped, because its owner may still shorten it."""
    if not descriptors:
        return _NOTHING
    with os.fdopen(descriptors[0], "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length > _BLOB_BYTES:
            raise ValueError(f"a blob of {length:,} bytes is too long")
        file.seek(0)
        return memoryview(file.read(length))
