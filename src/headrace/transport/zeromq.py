"""What both ends of a ZeroMQ connection share: keys, limits, and how its end is noticed.

Every process that has the run's secret derives the same two Curve25519 key pairs, the servers' and the workers':

    run's secret ──BLAKE2b──► servers' key pair        a server accepts clients with the workers' keys,
                 └─BLAKE2b──► workers' key pair        a worker connects to the servers' keys alone
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import count

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


def watch(watched: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Returns a socket that receives events of another socket's connections."""
    monitor: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
    # Without a limit, because a socket whose monitor is full can neither send nor receive.
    monitor.rcvhwm = 0
    address = f"inproc://watch-{next(_watches)}"
    watched.monitor(address, events)
    monitor.connect(address)
    return monitor


def news(monitor: zmq.Socket[bytes]) -> Iterator[tuple[zmq.Event, int]]:
    """Yields what has happened to connections, and to which: event, descriptor."""
    while waits(monitor):
        happened = parse_monitor_message(monitor.recv_multipart())
        yield zmq.Event(happened["event"]), happened["value"]


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
