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
from headrace.transport.messages import MessageListener, tell_stranger
from headrace.transport.zeromq import ENDS, ConnectionEvents, Keys, any_port, connect, make_client

_WAITING = 1_000
"""Messages that may wait for a connection, at most."""

_LINGER_MS = 1_000
Mail = tuple[Member, str, Any]
"""Who has sent it, of which kind it is, and its content, of JSON's types."""


class MemberMail:
    """One process's messages; it listens at a port of `host`. For `tell` see `MessageListener`.

    Attributes:
        address: where it listens.
        gone: the members to which a connection has ended.
    """

    def __init__(self, me: Member, secret: bytes, host: str, tell: Callable[[str], None] = tell_stranger) -> None:
        self.gone: set[Member] = set()
        self._me = me
        self._keys = Keys(secret)
        self._listener = MessageListener(any_port(host), self._keys, tell)
        self.address = self._listener.address
        self._outboxes: dict[Member, zmq.Socket[bytes]] = {}
        self._events: dict[Member, ConnectionEvents] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._wakes, self._closed = threading.Lock(), False
        self._addresses: dict[Member, str] = {me: self.address}

    def learn(self, addresses: Mapping[Member, str]) -> None:
        """Connects to members that were not known."""
        for member, address in addresses.items():
            if member in self._addresses:
                continue
            outbox, self._events[member] = make_client(self._listener.context, self._keys)
            outbox.sndhwm = _WAITING
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
        for watched in (*self._listener.watched, self._wake_fd):
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
        # One whose connection has ended meanwhile was authenticated, too, and may have said why it ended.
        for connection, _, parts in self._listener.messages():
            try:
                sender, kind, content, known = json.loads(parts[0])
                self.learn({(int(rank), int(incarnation)): str(address) for rank, incarnation, address in known})
                yield from_plain(Member, sender), str(kind), content  # type: ignore[arg-type]
            except (ValueError, IndexError, TypeError, KeyError, struct.error):
                self._listener.refuse(connection)
        for member, events in self._events.items():
            if any(event in ENDS for event, _ in events.read()):
                self.gone.add(member)
        self._listener.ended()

    def close(self) -> None:
        """Ends all connections, after what is on its way has left."""
        for member, events in self._events.items():
            events.close(0 if member in self.gone else _LINGER_MS)
        self._listener.close()
        with self._wakes:
            self._closed = True
            os.close(self._wake_fd)
