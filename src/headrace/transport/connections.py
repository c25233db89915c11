"""Connections to a server's ZeroMQ socket: who may connect, how many, and how much each may send.

    40 a second
    accepted ──► half open ── CURVE, hello ──► a client
                 at most 64, the oldest is      may have sent 64 MiB that
                 ended; 16 KiB, 10 s            the server has not taken

ZeroMQ itself limits the length of one frame, but neither the frames of one message nor the connections that never say
what they are. The operating system knows what each connection has sent, and a thread checks that, because the server's
own thread may be in the middle of a step.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import select
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import zmq

from headrace.transport.zeromq import ConnectionEvents, Keys, waits

_ATTACH, _DETACH = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux."""

_LOAD_BYTE, _AND, _IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_FLAGS_AT = 13
_SYN, _ACK = 0x02, 0x10
_DROP_SYN = (
    # A listening socket sees a packet from its TCP header on.
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _SYN | _ACK),
    (_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)

_ZAP = "inproc://zeromq.zap.01"
_WATCHED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_A_SECOND, _AT_ONCE = 40.0, 200.0
"""New connections: a large run's workers at once, and afterwards those that replace lost ones."""

_HALF_OPEN = 64
"""Connections that have not said hello; each costs at most the memory of one frame."""

_HELLO_S = 10.0
_HELLO_BYTES = 1 << 14
_AHEAD_BYTES = 1 << 26
"""More than the frames that may wait at the server, and one that is being sent."""

_HEARTBEAT_BYTES = 64
"""A second, at most."""

_MEASURE_EVERY_S = 0.05
_MEASURE_EACH_S = 1e-4
"""For each connection, so that a thousand do not keep a core busy."""

_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in the system's tcp_info."""


class AcceptLimiter:
    """Limits new connections to a listening socket to `a_second`, and `at_once` at a time. It belongs to one thread.

    The keys and the end of an unknown connection cost a third of a millisecond of processor time, so that many of them
    would take a core from training. While too many come, a filter on the socket (classic BPF; McCanne, Jacobson, "The
    BSD packet filter", 1993) drops the packets that open one: `closed`. Open connections are not affected, and TCP
    tries again after a second.
    """

    def __init__(self, descriptor: int, a_second: float, at_once: float) -> None:
        self.closed = False
        self._descriptor = descriptor
        self._a_second = a_second
        self._at_once = at_once
        self._left = at_once
        self._updated = monotonic()

    def count(self) -> None:
        """Counts a new connection."""
        self._left -= 1

    def update(self) -> None:
        """Opens or closes; called regularly, and soon after new connections."""
        now = monotonic()
        self._left = min(self._at_once, self._left + (now - self._updated) * self._a_second)
        self._updated = now
        if self._left < 0 and not self.closed:
            self._set(True)
        elif self._left >= self._at_once / 4 and self.closed:
            self._set(False)

    def _set(self, closed: bool) -> None:
        with _socket_at(self._descriptor) as listening:
            if closed:
                program = b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN)
                place = ctypes.create_string_buffer(program)
                filter_ = struct.pack("HL", len(_DROP_SYN), ctypes.addressof(place))
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH, filter_)
            else:
                listening.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            self.closed = closed


@dataclass(eq=False)
class Connection:
    """An accepted TCP connection; the descriptor belongs to ZeroMQ, `taken` counts the bytes read from its socket.

    `peer` is the address of the other end, "" if that had gone already.
    """

    descriptor: int
    peer: str = ""
    since: float = field(default_factory=monotonic)
    taken: int = 0
    greeted: bool = False


class ConnectionGuard:
    """Authenticates and limits the connections of one ZeroMQ socket that does not listen yet.

    Its methods belong to the socket's thread; a thread of its own watches the connections. `ended_fd` is a descriptor
    that is readable when connections have ended.
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: Keys) -> None:
        self._keys = keys
        self._zap: zmq.Socket[bytes] = socket.context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._events = ConnectionEvents(socket, _WATCHED)
        keys.protect_server(socket)
        self._limiter: AcceptLimiter | None = None
        self._connections: dict[int, Connection] = {}
        self._half_open: dict[Connection, None] = {}
        self._ended: list[Connection] = []
        self._lock = threading.Lock()
        self._closing = False
        self.ended_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="headrace-guard", daemon=True)
        self._thread.start()

    def find(self, descriptor: int) -> Connection | None:
        """Returns the connection that has a descriptor now."""
        with self._lock:
            self._read_events()
            return self._connections.get(descriptor)

    def greet(self, connection: Connection) -> None:
        """Notes that a connection has said hello."""
        with self._lock:
            connection.greeted = True
            self._half_open.pop(connection, None)

    def take_ended(self) -> list[Connection]:
        """Returns the connections that have ended since the last call."""
        if not self._ended:
            return []
        with self._lock, suppress(BlockingIOError):
            ended, self._ended = self._ended, []
            os.eventfd_read(self.ended_fd)
        return ended

    def disconnect(self, connection: Connection) -> None:
        """Ends a connection, for which ZeroMQ has no function."""
        with self._lock:
            self._disconnect(connection)

    def disconnect_silent(self) -> None:
        """Ends connections that have not said hello in time; called when all that has arrived was read."""
        if not self._half_open:
            return
        with self._lock:
            for connection in [known for known in self._half_open if monotonic() - known.since > _HELLO_S]:
                self._disconnect(connection)

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket; what it has not sent yet may leave for so long while the context is terminated."""
        self._closing = True
        os.eventfd_write(self._close_fd, 1)
        self._thread.join()
        self._events.close(linger_ms)
        self._zap.close(0)
        os.close(self._close_fd)
        os.close(self.ended_fd)

    def _run(self) -> None:
        poll = select.epoll()
        for descriptor in (self._zap.FD, self._events.socket.FD, self._close_fd):
            poll.register(descriptor, select.EPOLLIN)
        measured = monotonic()
        with poll:
            while not self._closing:
                pause = max(_MEASURE_EVERY_S, _MEASURE_EACH_S * len(self._connections))
                # Before the first wait, too: ZeroMQ signals its descriptor only after a read has found nothing.
                with self._lock:
                    self._authenticate()
                    self._read_events()
                    while len(self._half_open) > _HALF_OPEN:
                        self._disconnect(next(iter(self._half_open)))
                    if self._limiter is not None:
                        self._limiter.update()
                    if monotonic() - measured >= pause:
                        self._measure()
                        measured = monotonic()
                busy = self._connections or (self._limiter is not None and self._limiter.closed)
                poll.poll(max(0.0, measured + pause - monotonic()) if busy else None)

    def _authenticate(self) -> None:
        """Answers ZeroMQ's requests whether a client's key is the workers' key."""
        while waits(self._zap):
            request = self._zap.recv_multipart()
            known = len(request) == 7 and request[5] == b"CURVE" and self._keys.admits(request[6])
            status = [b"200", b"OK", b"worker"] if known else [b"400", b"unknown key", b""]
            self._zap.send_multipart([b"1.0", request[1], *status, b""])

    def _read_events(self) -> None:
        """Notes which connections were accepted, and which have ended."""
        for event, descriptor in self._events.read():
            if event == zmq.EVENT_LISTENING:
                self._limiter = AcceptLimiter(descriptor, _A_SECOND, _AT_ONCE)
                continue
            if event == zmq.EVENT_ACCEPTED:
                assert self._limiter is not None, "a socket accepts only after it listens"
                self._limiter.count()
                connection = self._connections[descriptor] = Connection(descriptor, _peer_address(descriptor))
                self._half_open[connection] = None
                continue
            ended = self._connections.pop(descriptor, None)
            if ended is not None:
                self._half_open.pop(ended, None)
                self._ended.append(ended)
                os.eventfd_write(self.ended_fd, 1)

    def _disconnect(self, connection: Connection) -> None:
        # It does not count any more, whenever ZeroMQ reports its end.
        self._half_open.pop(connection, None)
        with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as held:
            # A descriptor is used again only after the end of its connection was reported, so that holding a copy and
            # reading the events makes sure that it still is this connection's.
            self._read_events()
            if self._connections.get(connection.descriptor) is connection:
                held.shutdown(socket.SHUT_RDWR)

    def _measure(self) -> None:
        """Ends connections that have sent more than they may."""
        now = monotonic()
        for connection, sent in [(known, _sent_bytes(known.descriptor)) for known in self._connections.values()]:
            allowed = _HELLO_BYTES
            if connection.greeted:
                allowed = _AHEAD_BYTES + int(_HEARTBEAT_BYTES * (now - connection.since))
            if sent - connection.taken > allowed:
                # `_disconnect` finds out whether the descriptor has been used again meanwhile.
                self._disconnect(connection)


def wire_bytes(length: int) -> int:
    """Returns the length of a ZeroMQ frame with its encryption (CurveZMQ, ZMTP 3.1)."""
    encrypted = length + 33
    return encrypted + (2 if encrypted <= 255 else 9)


def _sent_bytes(descriptor: int) -> int:
    """Returns the bytes that a client has sent and that were read from the connection."""
    try:
        with _socket_at(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
            unread = array.array("i", [0])
            fcntl.ioctl(descriptor, termios.FIONREAD, unread)
            return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0]) - unread[0]
    except (OSError, struct.error):
        # The connection has ended, which is about to be reported.
        return 0


def _peer_address(descriptor: int) -> str:
    """Returns the address of a connection's other end; "" if the connection has ended."""
    with suppress(OSError), _socket_at(descriptor) as connection:
        return str(connection.getpeername()[0])
    return ""


@contextmanager
def _socket_at(descriptor: int) -> Iterator[socket.socket]:
    """Gives the socket of a descriptor, which stays open, because it is ZeroMQ's."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield opened
    finally:
        opened.detach()
