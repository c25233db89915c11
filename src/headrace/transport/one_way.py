"""A connection in one direction between two processes on different hosts: ZeroMQ over TCP, encrypted or not.

The receiving end makes a pair of keys for the connection, and the run's processes alone learn the public one: a
stranger fails in the handshake. Without encryption the key is a random number, which the sending end says first. When
the connection is established, no further one is accepted.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import monotonic
from typing import TypeVar

import zmq

from headrace.transport.connections import AcceptLimiter
from headrace.transport.frames import PART_BYTES
from headrace.transport.zeromq import ENDS, ConnectionEvents, any_port, connect, listen, make_socket

T = TypeVar("T")

Check = Callable[[Callable[[], bool], str], None]

SLICE_MS = 50
_MEET_S = 30.0
_PINGS = 8
"""Signs of life in the time after which a silent connection ends."""

_MOST_PROBES = 100
"""Of TCP, which allows 127."""

_HELLO = b""
_TOKEN = b"token "
"""How a key begins that does not encrypt, and that only the one who sends may know."""

_ADDED_BYTES = 1 << 10
"""More than the encryption of a part adds."""


@dataclass(frozen=True)
class Limits:
    """What an end of a connection accepts.

    Attributes:
        slots: messages that may wait at it, 0 for any number.
        silent_ms: without a sign of life for so long the connection ends; 0 where only the engine watches whether the
            other process lives: one that a debugger stops is not gone.
        part_bytes: length of a part of a message.
        kernel_silent_s: where the other end's kernel has not answered for so long, in whole seconds and at least 2, the
            connection ends, also if its process is stopped and its messages are not read; 0 for the system's hours.
    """

    slots: int
    silent_ms: int = 0
    part_bytes: int = PART_BYTES
    kernel_silent_s: float = 0.0


class _End(ABC):
    """One end; `sort` is `zmq.PUSH` or `zmq.PULL`.

    `check` is called about every 50 ms of waiting, with what tells whether the other end has come after all, and how
    the connection has ended, "" while it stands; it raises where no process will come, and always after an end.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sort: int,
        limits: Limits,
        events: int,
        check: Check,
    ) -> None:
        self.socket = make_socket(context, sort)
        self.socket.sndhwm = self.socket.rcvhwm = limits.slots
        ping_ms = limits.silent_ms // _PINGS
        # The time for an answer begins with the question, of which the first comes that much after the last answer.
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = ping_ms, limits.silent_ms - ping_ms
        self.socket.maxmsgsize = limits.part_bytes + _ADDED_BYTES
        if limits.kernel_silent_s:
            # TCP's own, because signs of life of ZeroMQ are not read while as many messages wait as may.
            every_s = max(1, ceil(limits.kernel_silent_s / _MOST_PROBES))
            probes = max(1, round(limits.kernel_silent_s / every_s) - 1)
            self.socket.tcp_keepalive, self.socket.tcp_keepalive_cnt = 1, probes
            self.socket.tcp_keepalive_idle = self.socket.tcp_keepalive_intvl = every_s
        self.events = ConnectionEvents(self.socket, events)
        self._check = check
        self._poll = zmq.Poller()
        self._poll.register(self.socket, zmq.POLLIN if sort == zmq.PULL else zmq.POLLOUT)
        self._poll.register(self.events.socket, zmq.POLLIN)

    def until(self, act: Callable[[], T], ended: Callable[[], str]) -> T:
        """Returns what `act` does, as soon as the socket lets it."""
        began = monotonic()
        while True:
            # Asked first, because what came before the end is read after it.
            end = ended()
            try:
                return act()
            except zmq.Again:
                pass
            if end or not self._poll.poll(SLICE_MS):
                self.check(end and f"{end}, after {monotonic() - began:.1f} s without progress")

    @abstractmethod
    def ended(self) -> str:
        """Returns how the connection has ended; "" while it stands."""

    def check(self, end: str = "") -> None:
        """Looks whether the other end will come; raises where the connection has ended."""
        self._check(lambda: False, end)

    def close(self, linger_ms: int = 0) -> None:
        """Ends the connection; what has not left yet may do so for `linger_ms`, while the context is terminated."""
        self.events.close(linger_ms)


class PushEnd(_End):
    """The end that sends, to the end that listens at `address` and has the public key `key`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        limits: Limits,
        check: Check,
        address: str,
        key: bytes,
    ) -> None:
        self._address = address
        self._established = False
        self._end = ""
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(event.value for event in ENDS)
        super().__init__(context, zmq.PUSH, replace(limits, slots=limits.slots + 1), events, check)
        if not key.startswith(_TOKEN):
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = key
        try:
            connect(self.socket, address)
            # In the additional slot.
            self.socket.send(key if key.startswith(_TOKEN) else _HELLO)
        except BaseException:
            # While a socket is open, its context does not end.
            self.close()
            raise

    def meet(self) -> None:
        """Waits until the connection is established."""
        give_up = monotonic() + _MEET_S
        while not self._established:
            if not self.events.socket.poll(SLICE_MS):
                self.check()
            end = self.ended()
            if not self._established and monotonic() > give_up:
                end = f"no answer for {_MEET_S:.0f} s"
            if end:
                self.check(f"{self._address} cannot be reached: {end}")

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Sends a message, as soon as there is room for it. ZeroMQ copies it."""
        self.until(lambda: self.socket.send_multipart(parts, zmq.NOBLOCK), self.ended)

    def ended(self) -> str:
        for event, _ in self.events.read():
            self._established |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._end = self._end or ENDS.get(event, "")
        return self._end


class PullEnd(_End):
    """The end that receives; it listens at an address of `host`, where the one who knows `key` may connect."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], limits: Limits, check: Check, host: str, encrypt: bool = True
    ) -> None:
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        super().__init__(context, zmq.PULL, limits, events, check)
        self._gate: AcceptLimiter | None = None
        self._peer = -1
        self._gone: set[int] = set()
        if encrypt:
            self.key, secret = zmq.curve_keypair()
            self.socket.curve_server, self.socket.curve_secretkey, self.socket.curve_publickey = True, secret, self.key
        else:
            self.key = _TOKEN + secrets.token_hex(32).encode()
        self._hello = _HELLO if encrypt else self.key
        try:
            self.address = listen(self.socket, any_port(host))
        except BaseException:
            self.close()
            raise

    def meet(self) -> None:
        """Waits for the other end's greeting, and accepts no other connection."""
        give_up = monotonic() + _MEET_S

        def late() -> str:
            waited = monotonic() > give_up
            return f"it has not connected to {self.address} within {_MEET_S:.0f} s" if waited else ""

        while True:
            frame = self.until(lambda: self.socket.recv(zmq.NOBLOCK, copy=False), late)
            # Without encryption a stranger's may come first.
            if secrets.compare_digest(frame.bytes, self._hello):
                break
        self._peer = int(frame.get(zmq.SRCFD))
        self.ended()
        if self._gate:
            # Not unbound, which would end the connection, too.
            self._gate.count()
            self._gate.update()

    def receive(self) -> list[zmq.Frame]:
        """Returns the next message, as soon as it is there."""
        return self.until(self.next, self.ended)

    def next(self) -> list[zmq.Frame]:
        """Returns the next message; raises `zmq.Again` if it is not there yet."""
        while True:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if int(frames[0].get(zmq.SRCFD)) == self._peer:
                return frames

    def ended(self) -> str:
        for event, descriptor in self.events.read():
            if event == zmq.EVENT_LISTENING:
                self._gate = AcceptLimiter(descriptor, a_second=0, at_once=0)
            elif event == zmq.EVENT_ACCEPTED:
                # It may have been that of a stranger's connection, which has ended.
                self._gone.discard(descriptor)
            else:
                self._gone.add(descriptor)
        return "the connection was closed" if self._peer in self._gone else ""
