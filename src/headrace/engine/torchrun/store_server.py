"""The side of rank 0 of the key-value store: a thread that holds the values, and lets members meet."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

import zmq

from headrace.engine.torchrun.key_value import (
    ADD,
    CAME,
    COPY,
    END,
    GET,
    LEAVE,
    LOSE,
    LOST,
    MEET,
    NUMBER,
    SET,
    decode,
    encode,
    failure_of,
)
from headrace.transport.connections import Connection
from headrace.transport.messages import MessageListener, tell_stranger
from headrace.transport.zeromq import Keys

_Caller = TypeVar("_Caller")

_TIDY_MS = 1_000


@dataclass
class _Meeting(Generic[_Caller]):
    members: Sequence[bytes]
    came: dict[bytes, bytes] = field(default_factory=dict)
    callers: list[_Caller] = field(default_factory=list)


class Meetings(Generic[_Caller]):
    """Barriers of members that may be lost: all that are not over, and the members that are lost, by name.

    A meeting is over when each of its members has come or was lost. That is decided once, for all of them: an arrival
    counts only if it was there before its member was declared lost.
    """

    def __init__(self) -> None:
        self._open: dict[bytes, _Meeting[_Caller]] = {}
        self._lost: set[bytes] = set()

    def arrive(
        self, caller: _Caller, key: bytes, name: bytes, value: bytes, members: Sequence[bytes]
    ) -> Iterable[tuple[_Caller, list[bytes]]]:
        """Notes that a member has come to a meeting, with a value; returns who is answered now, and how.

        The answer has an entry for each member: see `StoreClient.meet`. A member that is lost gets an empty one.
        Raises ValueError if the member is none of the meeting, or others have come to one with other members.
        """
        if name in self._lost:
            return [(caller, [])]
        meeting = self._open.setdefault(key, _Meeting(members))
        if name not in members or list(members) != list(meeting.members):
            raise ValueError(f"{name!r} comes to a meeting of {members!r}, which is of {meeting.members!r}")
        meeting.came[name] = CAME + value
        meeting.callers.append(caller)
        return self._end([key])

    def lose(self, name: bytes) -> Iterable[tuple[_Caller, list[bytes]]]:
        """Declares a member lost; returns who is answered now, and how."""
        self._lost.add(name)
        return self._end(list(self._open))

    def _end(self, keys: Iterable[bytes]) -> Iterable[tuple[_Caller, list[bytes]]]:
        answers = []
        for key in keys:
            meeting = self._open[key]
            if all(name in meeting.came or name in self._lost for name in meeting.members):
                del self._open[key]
                told = [meeting.came.get(name, LOST) for name in meeting.members]
                answers += [(caller, told) for caller in meeting.callers]
        return answers


class StoreServer:
    """Serves a store at "tcp://host:port", port 0 for any that is free; `address` is where it listens.

    It begins with `values`, of another store; for `tell` see `MessageListener`. Raises UsageError if it cannot listen
    there.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        tell: Callable[[str], None] = tell_stranger,
        values: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        self._values = dict(values)
        self._waiting: list[tuple[bytes, int, list[bytes]]] = []
        self._left: dict[Connection, tuple[bytes, bytes]] = {}
        self._meetings: Meetings[tuple[bytes, int]] = Meetings()
        self._ending: list[tuple[bytes, int]] = []
        self._reason: bytes | None = None
        self._shown: list[bytes] = []
        self._listener = MessageListener(address, Keys(secret), tell)
        self.address = self._listener.address
        self._close_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="headrace-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the store; clients that wait raise ConnectionError."""
        self._closing = True
        os.eventfd_write(self._close_fd, 1)
        self._thread.join()
        self._listener.close()
        os.close(self._close_fd)

    def _serve(self) -> None:
        poll = zmq.Poller()
        for watched in (*self._listener.watched, self._close_fd):
            poll.register(watched, zmq.POLLIN)
        while not self._closing:
            poll.poll(_TIDY_MS)
            for connection, client, parts in self._listener.messages():
                if connection is None:
                    continue  # it has ended meanwhile
                try:
                    self._handle(connection, client, *decode(parts))
                except (ValueError, IndexError, struct.error):
                    self._listener.refuse(connection)
            for connection in self._listener.ended():
                if connection in self._left:
                    key, value = self._left.pop(connection)
                    self._values[key] = value
                    self._answer()

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
        self._listener.answer(client, encode(operation, number, values))
