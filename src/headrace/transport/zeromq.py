"""What both ends of a ZeroMQ connection share: keys, limits, and how its end is noticed.

Every process that has the run's secret derives the same two Curve25519 key pairs, the servers' and the workers':

    run's secret ──BLAKE2b──► servers' key pair        a server accepts clients with the workers' keys,
                 └─BLAKE2b──► workers' key pair        a worker connects to the servers' keys alone
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket as sockets
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from itertools import count
from time import monotonic

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from headrace.errors import UsageError
from headrace.transport.frames import PART_BYTES

_SHORTEST_SECRET = 16
_HIGH_WATER = 16
"""Frames that wait on either side of a connection, at most."""

_HEARTBEAT_MS, _TIMEOUT_MS = 5_000, 20_000
"""A host that is silent for so long is taken for lost."""

_HANDSHAKE_MS = 30_000
_NEVER_MS = 24 * 3_600_000
_CUT_S = 1.0

_ABSENT = "no process listens there, or no packet comes there"
_STRANGER = "it has another secret than this run's, or is no process of headrace"
ENDS = {
    zmq.EVENT_CLOSED: _ABSENT,
    zmq.EVENT_CONNECT_RETRIED: _ABSENT,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this process's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _STRANGER,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _STRANGER,
    zmq.EVENT_DISCONNECTED: "the connection was closed",
}
"""The events by which a connection ends, or is not established, and what they say of it."""

_OPENED = (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED)
_watches = count()


class Keys:
    """The key pairs of a run, from its secret: at least 16 random bytes, as of `secrets.token_bytes(32)`.

    Raises UsageError if the secret is too short.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SHORTEST_SECRET:
            raise UsageError(
                f"the run's secret has {len(secret)} bytes, which can be guessed; "
                "make one of 32 with secrets.token_bytes(32) and give it to every process of the run"
            )
        self._private = [
            z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
            for role in (b"headrace server", b"headrace worker")
        ]
        self._public = [zmq.curve_public(private) for private in self._private]

    def protect_server(self, server: zmq.Socket[bytes]) -> None:
        """Makes a socket encrypt, and ask its `ConnectionGuard` whether to accept a client; see `admits`."""
        server.curve_server = True
        server.curve_secretkey, server.curve_publickey = self._private[0], self._public[0]
        # With a domain, ZeroMQ refuses every client if there is no guard.
        server.zap_domain = b"headrace"

    def protect_client(self, worker: zmq.Socket[bytes]) -> None:
        """Makes a socket encrypt, and connect only to a server of this run."""
        worker.curve_secretkey, worker.curve_publickey = self._private[1], self._public[1]
        worker.curve_serverkey = self._public[0]

    def admits(self, key: bytes) -> bool:
        """Returns whether 32 bytes are the workers' public key."""
        return secrets.compare_digest(key, z85.decode(self._public[1]))


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Returns a socket with all limits set."""
    made: zmq.Socket[bytes] = context.socket(kind)
    made.linger = 0
    made.sndhwm = made.rcvhwm = _HIGH_WATER
    # One part and what its encryption adds: an unknown client can make this process keep so much.
    made.maxmsgsize = PART_BYTES + (1 << 10)
    made.handshake_ivl = made.connect_timeout = _HANDSHAKE_MS
    made.heartbeat_ivl, made.heartbeat_timeout = _HEARTBEAT_MS, _TIMEOUT_MS
    # A lost connection has lost frames, so it must not reconnect by itself. Without a reconnection ZeroMQ would drop
    # frames that have arrived and are not read yet.
    made.reconnect_ivl = _NEVER_MS
    return made


class ConnectionEvents:
    """The events of a socket's connections.

    Attributes:
        socket: can be polled; readable when there are events.
    """

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        self._open: set[int] = set()
        self.socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        # Without a limit, because a socket whose monitor is full can neither send nor receive.
        self.socket.rcvhwm = 0
        address = f"inproc://watch-{next(_watches)}"
        watched.monitor(address, events | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    @property
    def connected(self) -> bool:
        """Whether a connection was open when the events were read last."""
        return bool(self._open)

    def read(self) -> Iterator[tuple[zmq.Event, int]]:
        """Yields what has happened to connections, and to which: event, descriptor."""
        while waits(self.socket):
            happened = parse_monitor_message(self.socket.recv_multipart())
            event, descriptor = zmq.Event(happened["event"]), int(happened["value"])
            if event in _OPENED:
                self._open.add(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
            yield event, descriptor

    def close(self, linger_ms: int = 0) -> None:
        """Closes the watched socket; what it has not sent yet may leave for so long while the context is terminated."""
        # One that only receives has no message to send, and does not notice an end while too much waits in it.
        if not linger_ms and self._watched.type != zmq.PULL:
            self._cut()
        self._watched.disable_monitor()
        self._watched.close(linger_ms)
        self.socket.close(0)

    def _cut(self) -> None:
        """Ends all connections, and blocks until ZeroMQ has noticed it.

        ZeroMQ aborts the process where a connection breaks while its socket is being closed, if it has sent only some
        parts of a message (libzmq, issue 3442).
        """
        give_up = monotonic() + _CUT_S
        shut: set[int] = set()
        while True:
            # A descriptor is used again only after the end of its connection was reported: hold a copy, then read.
            for descriptor in self._open - shut:
                with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as held:
                    self._read_all()
                    if descriptor in self._open:
                        held.shutdown(sockets.SHUT_RDWR)
                shut.add(descriptor)
            self._read_all()
            left = give_up - monotonic()
            # The end of a connection from which too much waits to be received is not reported, and does no harm.
            if not self._open or left <= 0:
                return
            self.socket.poll(int(1000 * left) + 1)

    def _read_all(self) -> None:
        for _ in self.read():
            pass


def make_client(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> tuple[zmq.Socket[bytes], ConnectionEvents]:
    """Returns a socket that connects only to a server of this run, and the `ENDS` of its connection."""
    made = make_socket(context, zmq.DEALER)
    keys.protect_client(made)
    return made, ConnectionEvents(made, sum(event.value for event in ENDS))


def any_port(host: str) -> str:
    """Returns where to listen at an address of this machine, at a port that is free."""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


def waits(socket: zmq.Socket[bytes]) -> bool:
    """Returns whether there is something to receive."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def listen(socket: zmq.Socket[bytes], address: str) -> str:
    """Makes a socket listen; returns the address with the port number; raises UsageError if it cannot listen there."""
    socket.ipv6 = "[" in address
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise UsageError(
            f"cannot listen on {address}: {error.strerror}; give tcp:// and an address of this machine, "
            "with a port that is free, or 0 for any"
        ) from error
    return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Starts to connect a socket; raises UsageError if this is not an address."""
    socket.ipv6 = "[" in address
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise UsageError(
            f"{address!r} is no address of a server ({error.strerror}), as tcp://10.0.0.1:5555 is"
        ) from error


def is_loopback(address: str) -> bool:
    """Returns whether an address, "tcp://127.0.0.1:0", can be reached only from its own machine."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        # The name of a host or of an interface, which may be reachable.
        return False
