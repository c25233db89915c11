"""The side of rank 0 of the key-value store: a thread that holds the values, and lets members meet."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import zmq

from headrace.engine.torchrun.key_value import (
    ADD,
    COPY,
    END,
    GET,
    LEAVE,
    LOSE,
    MEET,
    NUMBER,
    SET,
    decode,
    encode,
    failure_of,
)
from headrace.engine.torchrun.meetings import Meetings
from headrace.transport.connections import Connection, ConnectionGuard, wire_bytes
from headrace.transport.zeromq import Keys, listen, make_socket, waits

_TIDY_MS = 1_000
_NAMED = 16
"""Addresses of strangers that are named; more would fill the console."""


class StoreServer:
    """Serves a store at "tcp://host:port", port 0 for any that is free; `address` is where it listens.

    `tell` is called once for each address from which a process has connected that has not authenticated itself; with
    "" for those whose connection ended before its address was read.
    It begins with `values`, of another store. Raises UsageError if it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        tell: Callable[[str], None],
        values: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        self._tell = tell
        self._strangers: set[str] = set()
        self._values = dict(values)
        self._waiting: list[tuple[bytes, int, list[bytes]]] = []
        self._left: dict[Connection, tuple[bytes, bytes]] = {}
        self._meetings: Meetings[tuple[bytes, int]] = Meetings()
        self._ending: list[tuple[bytes, int]] = []
        self._reason: bytes | None = None
        self._shown: list[bytes] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER)
        self._guard = ConnectionGuard(self._socket, Keys(secret))
        self._close_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = False
        try:
            self.address = listen(self._socket, address)
        except BaseException:
            self._free()
            raise
        self._thread = threading.Thread(target=self._serve, name="headrace-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the store; clients that wait raise ConnectionError."""
        self._closing = True
        os.eventfd_write(self._close_fd, 1)
        self._thread.join()
        self._free()

    def _free(self) -> None:
        self._guard.close()
        self._context.term()
        os.close(self._close_fd)

    def _serve(self) -> None:
        poll = zmq.Poller()
        for watched in (self._socket, self._guard.ended_fd, self._close_fd):
            poll.register(watched, zmq.POLLIN)
        while not self._closing:
            poll.poll(_TIDY_MS)
            while waits(self._socket):
                self._take(self._socket.recv_multipart(copy=False))
            for connection in self._guard.take_ended():
                if not connection.greeted:
                    self._name(connection.peer)
                if connection in self._left:
                    key, value = self._left.pop(connection)
                    self._values[key] = value
                    self._answer()
            self._guard.disconnect_silent()

    def _name(self, peer: str) -> None:
        if peer not in self._strangers and len(self._strangers) < _NAMED:
            self._strangers.add(peer)
            self._tell(peer)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        connection = self._guard.find(int(frames[-1].get(zmq.SRCFD)))
        if connection is None:
            return  # it has ended meanwhile
        self._guard.greet(connection)
        connection.taken += sum(wire_bytes(len(frame)) for frame in frames[1:])
        try:
            self._handle(connection, frames[0].bytes, *decode([frame.bytes for frame in frames[1:]]))
        except (ValueError, IndexError, struct.error):
            # Wrong frames end their sender's connection, and nothing else.
            self._guard.disconnect(connection)

    def _handle(
        self, connection: Connection, client: bytes, operation: bytes, number: int, fields: list[bytes]
    ) -> None:
        if operation == MEET:
            key, name, value, *members = fields
            self._end_meetings(self._meetings.arrive((client, number), key, name, value, members))
            return
        told: list[bytes] = []
        if operation == GET:
            self._waiting.append((client, number, fields))
        elif operation == SET:
            key, value = fields
            self._values[key] = value
        elif operation == LEAVE:
            key, value = fields
            self._left[connection] = key, value
        elif operation == LOSE:
            (name,) = fields
            self._end_meetings(self._meetings.lose(name))
        elif operation == ADD:
            key, added = fields
            total = NUMBER.unpack(self._values.get(key, bytes(NUMBER.size)))[0] + NUMBER.unpack(added)[0]
            self._values[key] = NUMBER.pack(total)
            told = [self._values[key]]
        elif operation == COPY:
            told = [each for pair in self._values.items() for each in pair]
        elif operation == END:
            reason, leads = fields
            self._reason = self._reason or reason
            if leads:
                # A rank that seems lost and has told why it failed: that is the cause.
                explains = failure_of(reason)["lost"] == failure_of(self._reason)["rank"]
                self._shown = [self._reason if explains else reason, reason]
            self._ending.append((client, number))
        else:
            raise ValueError(f"no operation: {operation!r}")
        if operation not in (GET, END):
            self._reply(client, operation, number, told)
        self._answer()

    def _end_meetings(self, answers: Iterable[tuple[tuple[bytes, int], list[bytes]]]) -> None:
        for (client, number), told in answers:
            self._reply(client, MEET, number, told)

    def _answer(self) -> None:
        """Answers those who wait for keys that are there, or that will not come."""
        if self._shown:
            for client, number in self._ending:
                self._reply(client, END, number, self._shown)
            self._ending = []
        still = []
        for client, number, keys in self._waiting:
            if all(key in self._values for key in keys):
                self._reply(client, GET, number, [self._values[key] for key in keys])
            elif self._reason is not None:
                self._reply(client, END, number, [self._reason])
            else:
                still.append((client, number, keys))
        self._waiting = still

    def _reply(self, client: bytes, operation: bytes, number: int, values: Sequence[bytes]) -> None:
        # Without `router_mandatory` ZeroMQ drops what is for a client that has gone.
        self._socket.send_multipart([client, *encode(operation, number, values)])
