"""Measures one link over TCP: a responder on its far end echoes for latency and clock, and counts bytes for bandwidth.

    client                                          responder
    token, "echo", 0        ────────────────────►
    8 bytes                 ────────────────────►
                            ◄────────────────────   its clock                     as often as the client wants
    token, "sink", warm-up  ────────────────────►
    bytes without end       ────────────────────►   counts them after the warm-up
                            ◄────────────────────   bytes, seconds                then the client closes

A client without the token gets nothing. Nothing that is received is interpreted.
"""

from __future__ import annotations

import hmac
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

TOKEN_BYTES = 32
CONNECT_S = 3.0
"""After which a host that does not answer counts as not reachable."""

_HEADER = struct.Struct(f"!{TOKEN_BYTES}s4sd")
_ECHO = struct.Struct("!d")
_COUNTED = struct.Struct("!Qd")
_PINGS = 200
_PINGS_S = 0.3
_COUNT_S = 0.35
_WARM_UP_S = 0.15
_SILENT_S = 10.0
_CHUNK = 1 << 18
_BURST_BYTES = 1 << 18
"""What a token bucket on the way may let through at once."""
_HEADERS_BYTES = {socket.AF_INET: 14 + 20 + 32, socket.AF_INET6: 14 + 40 + 32}
"""Of Ethernet, IP, and TCP with timestamps, in each packet."""


@dataclass(frozen=True)
class Echo:
    """Half of the median time of a small message there and back, and how much the responder's clock is ahead."""

    latency_s: float
    ahead_s: float


class Responder:
    """Answers clients that know the token, at one address and a free port of it, until it is closed."""

    def __init__(self, address: str, token: bytes, clock: Callable[[], float] = time.time) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._token = token
        self._clock = clock
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, name="headrace-responder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends its connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):  # its client was first
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            connection.settimeout(_SILENT_S)
            self._open.append(connection)
            threading.Thread(target=self._answer, args=(connection,), name="headrace-responder", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # A client may end at any time, or be no client of ours.
        with connection, suppress(OSError, EOFError):
            token, kind, warm_up_s = _HEADER.unpack(_exactly(connection, _HEADER.size))
            if not hmac.compare_digest(token, self._token):
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if kind == b"sink":
                _count(connection, warm_up_s)
                return
            while True:
                _exactly(connection, _ECHO.size)
                connection.sendall(_ECHO.pack(self._clock()))


def connect(address: str, port: int, token: bytes, kind: bytes = b"echo", warm_up_s: float = 0.0) -> socket.socket:
    """Returns a connection to a responder for "echo" or "sink"; raises OSError where it is not reached."""
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    connection.settimeout(_SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HEADER.pack(token, kind, warm_up_s))
    return connection


def echo(connection: socket.socket, clock: Callable[[], float] = time.time) -> Echo:
    """Returns the latency of a connection for "echo", and the other clock's offset by the fastest reply (as NTP's)."""
    trips: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(trips) < _PINGS and (len(trips) < 3 or time.perf_counter() - begin < _PINGS_S):
        sent, sent_at = time.perf_counter(), clock()
        connection.sendall(_ECHO.pack(0.0))
        (theirs,) = _ECHO.unpack(_exactly(connection, _ECHO.size))
        took = time.perf_counter() - sent
        trips.append((took, theirs - sent_at - took / 2))
    return Echo(statistics.median(took for took, _ in trips) / 2, min(trips)[1])


def bandwidth(address: str, port: int, token: bytes, latency_s: float) -> float:
    """Returns the bytes/s that one connection sends to a responder, with the headers of its packets.

    The first bytes are not counted: TCP begins slowly, and a token bucket lets a burst through.
    """
    data = bytes(_CHUNK)
    nbytes: int
    seconds: float
    with connect(address, port, token, b"sink", _WARM_UP_S + 20 * latency_s) as connection:
        connection.setblocking(False)
        while True:
            readable, writable, _ = select.select([connection], [connection], [], _SILENT_S)
            if readable:
                connection.settimeout(_SILENT_S)
                nbytes, seconds = _COUNTED.unpack(_exactly(connection, _COUNTED.size))
                break
            if not writable:
                raise TimeoutError(f"nothing was taken for {_SILENT_S:.0f} s")
            with suppress(BlockingIOError):
                connection.send(data)
        segment: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        # What is still in buffers is thrown away, and is not in the way of the next measurement.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return nbytes / seconds * (1 + _HEADERS_BYTES[connection.family] / segment)


def _count(connection: socket.socket, warm_up_s: float) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    begin, received, start, first = time.perf_counter(), 0, 0.0, 0
    while True:
        received += _some(connection, buffer)
        now = time.perf_counter()
        if not start:
            if now - begin >= warm_up_s and received >= _BURST_BYTES:
                start, first = now, received
        elif now - start >= _COUNT_S:
            break
    connection.sendall(_COUNTED.pack(received - first, now - start))
    while True:
        _some(connection, buffer)


def _some(connection: socket.socket, buffer: memoryview) -> int:
    got = connection.recv_into(buffer)
    if not got:
        raise EOFError
    return got


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    view = memoryview(buffer)
    while view:
        view = view[_some(connection, view) :]
    return bytes(buffer)
