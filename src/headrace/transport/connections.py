"""Who stands at a server's door: strangers are many and cost little, and whoever brings too much is shown out.

    40 a second
    accepted ──► half open ── CURVE, hello ──► a link
                 at most 64, the oldest goes    may be 64 MiB ahead of what the port has taken
                 16 KiB, 10 s

ZeroMQ itself limits the length of one frame, but neither how many there are of a message that never ends, nor how many
connections there are that never say what they are. The system knows what each has brought, and a thread looks at that,
because the port's own may be in the middle of a step.
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
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.transport.zeromq import Keys, waits, watch

_ATTACH, _DETACH = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux."""

_LOAD_BYTE, _AND, _IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_FLAGS_AT = 13
_SYN, _ACK = 0x02, 0x10
_DROP_SYN = (
    # A socket that listens sees a packet from its TCP header on.
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _SYN | _ACK),
    (_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)


class AcceptLimiter:
    """Belongs to one thread.

    Args:
        descriptor: of a socket that listens.
        a_second: connections that may come.
        at_once: that may come at a time.

    Attributes:
        closed: whether nobody is let in now.
    """

    def __init__(self, descriptor: int, a_second: float, at_once: float) -> None:
        self.closed = False
        self._descriptor = descriptor
        self._a_second = a_second
        self._at_once = at_once
        self._left = at_once
        self._looked = monotonic()

    def came(self) -> None:
        """Is told of a connection that has come."""
        self._left -= 1

    def look(self) -> None:
        """Opens or closes; to be called now and then, and soon after connections have come."""
        now = monotonic()
        self._left = min(self._at_once, self._left + (now - self._looked) * self._a_second)
        self._looked = now
        if self._left < 0 and not self.closed:
            self._set(True)
        elif self._left >= self._at_once / 4 and self.closed:
            self._set(False)

    def _set(self, closed: bool) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._descriptor)
        try:
            if closed:
                program = b"".join(struct.pack("HBBI", *each) for each in _DROP_SYN)
                place = ctypes.create_string_buffer(program)
                listening.setsockopt(
                    socket.SOL_SOCKET, _ATTACH, struct.pack("HL", len(_DROP_SYN), ctypes.addressof(place))
                )
            else:
                listening.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            self.closed = closed
        finally:
            # It stays in the hands of whoever listens.
            listening.detach()


_ZAP = "inproc://zeromq.zap.01"
_WATCHED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED

_A_SECOND, _AT_ONCE = 40.0, 200.0
"""Connections that may come: a large run's workers at once, and afterwards whoever comes in another's place."""

_HALF_OPEN = 64
"""Connections that have not said hello; each costs at most what one frame may have."""

_HELLO_S = 10.0
_HELLO_BYTES = 1 << 14
_AHEAD_BYTES = 1 << 26
"""More than the letters that may wait at the port, and one that is on its way."""

_BEATS_BYTES = 64
"""A second, at most, of what a connection says only to show that it lives."""

_LOOK_EVERY_S = 0.05
_LOOK_S = 1e-4
"""For each line, so that a thousand do not keep a core busy."""

_RECEIVED = struct.Struct("<Q")
_RECEIVED_AT = 128
"""Where tcpi_bytes_received lies in the system's tcp_info."""


@dataclass(eq=False)
class Connection:
    """A connection.

    Attributes:
        descriptor: the socket's, in ZeroMQ's hands.
        since: when it was accepted.
        taken: bytes that the port has taken from it.
        greeted: whether it has said hello.
    """

    descriptor: int
    since: float = field(default_factory=monotonic)
    taken: int = 0
    greeted: bool = False


class ConnectionGuard:
    """One socket's connections; what it offers belongs to the socket's thread, and a thread of its own looks out.

    Args:
        socket: not listening yet.
        keys: of the run: decide who gets in.

    Attributes:
        bell: a descriptor that is readable when lines have ended.
    """

    def __init__(self, socket: zmq.Socket[bytes], keys: Keys) -> None:
        self._keys = keys
        self._zap: zmq.Socket[bytes] = socket.context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._watched = socket
        self._monitor = watch(socket, _WATCHED)
        keys.guard(socket)
        self._gate: AcceptLimiter | None = None
        self._lines: dict[int, Connection] = {}
        self._half_open: dict[Connection, None] = {}
        self._ended: list[Connection] = []
        self._lock = threading.Lock()
        self._over = False
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._call = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._look_out, name="headrace-door", daemon=True)
        self._thread.start()

    def line(self, descriptor: int) -> Connection | None:
        """Returns the connection that has a descriptor now."""
        with self._lock:
            self._hear()
            return self._lines.get(descriptor)

    def greet(self, line: Connection) -> None:
        """Is told that a connection has said hello."""
        with self._lock:
            line.greeted = True
            self._half_open.pop(line, None)

    def ended(self) -> list[Connection]:
        """Returns the connections that have ended since the last time."""
        if not self._ended:
            return []
        with self._lock, suppress(BlockingIOError):
            ended, self._ended = self._ended, []
            os.eventfd_read(self.bell)
        return ended

    def cut_off(self, line: Connection) -> None:
        """Breaks a connection; ZeroMQ itself has no word for it."""
        with self._lock:
            self._cut_off(line)

    def show_out(self) -> None:
        """Breaks with those that have had time to say hello; to be called when all that came has been read."""
        if not self._half_open:
            return
        with self._lock:
            late = [line for line in self._half_open if monotonic() - line.since > _HELLO_S]
            for line in late:
                self._cut_off(line)

    def close(self) -> None:
        """Ends the thread; before the socket is closed."""
        self._over = True
        os.eventfd_write(self._call, 1)
        self._thread.join()
        self._watched.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
        os.close(self._call)
        os.close(self.bell)

    def _look_out(self) -> None:
        poll = select.epoll()
        for descriptor in (self._zap.FD, self._monitor.FD, self._call):
            poll.register(descriptor, select.EPOLLIN)
        looked = monotonic()
        with poll:
            while not self._over:
                pause = max(_LOOK_EVERY_S, _LOOK_S * len(self._lines))
                # Before the first wait, too: ZeroMQ wakes nobody who has not found out that there is nothing.
                with self._lock:
                    self._admit()
                    self._hear()
                    while len(self._half_open) > _HALF_OPEN:
                        self._cut_off(next(iter(self._half_open)))
                    if self._gate is not None:
                        self._gate.look()
                    if monotonic() - looked >= pause:
                        self._measure()
                        looked = monotonic()
                busy = self._lines or (self._gate is not None and self._gate.closed)
                poll.poll(max(0.0, looked + pause - monotonic()) if busy else None)

    def _admit(self) -> None:
        """Answers whether those who knock hold the secret."""
        while waits(self._zap):
            request = self._zap.recv_multipart()
            known = len(request) == 7 and request[5] == b"CURVE" and self._keys.admits(request[6])
            status = [b"200", b"OK", b"worker"] if known else [b"400", b"unknown key", b""]
            self._zap.send_multipart([b"1.0", request[1], *status, b""])

    def _hear(self) -> None:
        """Takes note of connections that have come and gone."""
        while waits(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_LISTENING:
                self._gate = AcceptLimiter(descriptor, _A_SECOND, _AT_ONCE)
                continue
            if event["event"] == zmq.EVENT_ACCEPTED:
                assert self._gate is not None, "whoever is not there yet accepts nobody"
                self._gate.came()
                line = self._lines[descriptor] = Connection(descriptor)
                self._half_open[line] = None
                continue
            gone = self._lines.pop(descriptor, None)
            if gone is not None:
                self._half_open.pop(gone, None)
                self._ended.append(gone)
                os.eventfd_write(self.bell, 1)

    def _cut_off(self, line: Connection) -> None:
        # It counts no more, whenever its end is told.
        self._half_open.pop(line, None)
        with suppress(OSError), socket.socket(fileno=os.dup(line.descriptor)) as connection:
            # A descriptor gets a new meaning only after the end of the old one was told: look after it is held.
            self._hear()
            if self._lines.get(line.descriptor) is line:
                connection.shutdown(socket.SHUT_RDWR)

    def _measure(self) -> None:
        """Breaks with those that bring more than anybody has asked for."""
        now = monotonic()
        for line, brought in [(line, _brought(line.descriptor)) for line in self._lines.values()]:
            allowed = _AHEAD_BYTES + int(_BEATS_BYTES * (now - line.since)) if line.greeted else _HELLO_BYTES
            if brought - line.taken > allowed:
                # Where the descriptor has got a new meaning meanwhile, this finds out.
                self._cut_off(line)


def wire_bytes(length: int) -> int:
    """Returns what a frame of this length has with its encryption (CurveZMQ, ZMTP 3.1)."""
    encrypted = length + 33
    return encrypted + (2 if encrypted <= 255 else 9)


def _brought(descriptor: int) -> int:
    """Returns the bytes that a connection has brought and that were read from it."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return 0
    try:
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
        unread = array.array("i", [0])
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        return int(_RECEIVED.unpack_from(known, _RECEIVED_AT)[0]) - unread[0]
    except (OSError, struct.error):
        # It has gone, and its end is about to be told.
        return 0
    finally:
        connection.detach()
