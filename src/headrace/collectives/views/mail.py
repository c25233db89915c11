"""Short messages between the members of a run on several hosts, over encrypted connections of their own.

    member 0   ROUTER ◄── DEALER of 1, DEALER of 2        each listens, and connects to every other;
               DEALER ──► ROUTER of 1                     who does not have the run's secret fails in the handshake
               DEALER ──► ROUTER of 2

A message may be lost: what must arrive is sent again. All but `wake` belongs to one thread.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import zmq

from headrace.policies.views import Member
from headrace.spec.plain import from_plain
from headrace.transport.connections import ConnectionGuard, wire_bytes
from headrace.transport.zeromq import ConnectionEvents, Keys, connect, listen, make_socket, waits

_WAITING = 1_000
"""Messages that may wait for a connection, at most."""

_LINGER_MS = 1_000
_NAMED = 16
"""Addresses of strangers that are named; more would fill the console."""

_ENDS = (
    zmq.EVENT_CLOSED,
    zmq.EVENT_CONNECT_RETRIED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_DISCONNECTED,
)

Mail = tuple[Member, str, Any]
"""Who has sent it, of which kind it is, and its content, of JSON's types."""


class MemberMail:
    """One process's messages; it listens at a port of `host`.

    `tell` is called once for each address from which a process has connected that has not authenticated itself; with ""
    for those whose connection ended before its address was read.

    Attributes:
        address: where it listens.
        gone: the members to which a connection has ended.
    """

    def __init__(self, me: Member, secret: bytes, host: str, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._strangers: set[str] = set()
        self.gone: set[Member] = set()
        self._me = me
        self._keys = Keys(secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = make_socket(self._context, zmq.ROUTER)
        self._guard = ConnectionGuard(self._inbox, self._keys)
        self._outboxes: dict[Member, zmq.Socket[bytes]] = {}
        self._events: dict[Member, ConnectionEvents] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._wakes, self._closed = threading.Lock(), False
        try:
            self.address = listen(self._inbox, f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        except BaseException:
            self.close()
            raise
        self._addresses: dict[Member, str] = {me: self.address}

    def learn(self, addresses: Mapping[Member, str]) -> None:
        """Connects to members that were not known."""
        for member, address in addresses.items():
            if member in self._addresses:
                continue
            outbox = make_socket(self._context, zmq.DEALER)
            outbox.sndhwm = _WAITING
            self._keys.protect_client(outbox)
            self._events[member] = ConnectionEvents(outbox, sum(event.value for event in _ENDS))
            self._outboxes[member] = outbox
            self._addresses[member] = address
            connect(outbox, address)

    @property
    def others(self) -> list[Member]:
        """The members that are known here."""
        return list(self._outboxes)

    def send(self, to: Member, kind: str, content: object) -> None:
        """Sends a message, of JSON's types, with the addresses of all that are known here; drops it if it cannot."""
        if to not in self._outboxes or to in self.gone:
            return
        known = [[*member, address] for member, address in self._addresses.items() if member not in self.gone]
        text = json.dumps([self._me, kind, content, known])
        with suppress(zmq.Again):
            self._outboxes[to].send(text.encode(), zmq.NOBLOCK)

    def poll(self, seconds: float) -> None:
        """Blocks until there is something to receive, `wake` is called, or the time is over."""
        poll = zmq.Poller()
        for watched in (self._inbox, self._guard.ended_fd, self._wake_fd):
            poll.register(watched, zmq.POLLIN)
        for member, events in self._events.items():
            if member not in self.gone:
                poll.register(events.socket, zmq.POLLIN)
        poll.poll(int(1000 * seconds) + 1)
        with suppress(BlockingIOError):
            os.set_blocking(self._wake_fd, False)
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """Ends another thread's `poll`; does nothing after `close`."""
        with self._wakes:
            # The thread that polls may have just ended, and another file may have the number.
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def receive(self) -> Iterator[Mail]:
        """Yields the messages that have come."""
        while waits(self._inbox):
            frames = self._inbox.recv_multipart(copy=False)
            connection = self._guard.find(int(frames[-1].get(zmq.SRCFD)))
            # One that has ended meanwhile was authenticated, too, and may have said why it ended.
            if connection is not None:
                self._guard.greet(connection)
                connection.taken += sum(wire_bytes(len(frame)) for frame in frames[1:])
            try:
                sender, kind, content, known = json.loads(frames[1].bytes)
                self.learn({(int(rank), int(incarnation)): str(address) for rank, incarnation, address in known})
                yield from_plain(Member, sender), str(kind), content  # type: ignore[arg-type]
            except (ValueError, IndexError, TypeError, KeyError, struct.error):
                # A wrong message ends its sender's connection, and nothing else.
                if connection is not None:
                    self._guard.disconnect(connection)
        for member, events in self._events.items():
            if any(event in _ENDS for event, _ in events.read()):
                self.gone.add(member)
        for connection in self._guard.take_ended():
            if not connection.greeted and connection.peer not in self._strangers and len(self._strangers) < _NAMED:
                self._strangers.add(connection.peer)
                self._tell(connection.peer)
        self._guard.disconnect_silent()

    def close(self) -> None:
        """Ends all connections, after what is on its way has left."""
        for member, events in self._events.items():
            events.close(0 if member in self.gone else _LINGER_MS)
        self._guard.close()
        self._context.term()
        with self._wakes:
            self._closed = True
            os.close(self._wake_fd)
