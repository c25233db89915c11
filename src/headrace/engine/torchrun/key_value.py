"""A key-value store: a thread of rank 0 serves it to the processes that have the run's secret, encrypted.

request   operation, number, fields    DEALER ── CURVE ──► ROUTER     set: key, value;  get: keys;  add: key, number
reply     operation, number, values                                   of a get as soon as all keys are there

A client may leave a value that is set when its connection ends, however that ends. Members that may be lost meet here,
see `Meetings`. Here are the messages and the side that asks; the other is in `store_server`.

A process that cannot take part ends the store, and says why: the processes that wait for a key then get the reason.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from time import monotonic
from typing import TypedDict

import zmq

from headrace.errors import WorkerFailed
from headrace.transport.frames import PART_BYTES
from headrace.transport.zeromq import ENDS, Keys, connect, make_client, waits

SET, GET, ADD, LEAVE, MEET, LOSE, END, COPY = b"s", b"g", b"a", b"e", b"m", b"l", b"r", b"c"
CAME, LOST = b"+", b""
"""How the entry of a member begins that has come to a meeting, before its value, and that of one that was lost."""

_HEAD = struct.Struct("<cI")
NUMBER = struct.Struct("<q")
_NUMBERS = 1 << 32
_AGAIN_S = 0.05
_SLICE_S = 0.05
_SHOWN_S = 1.0
_GREETING_BYTES = 64

_REFUSED = (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)


class Failure(TypedDict):
    """Why a process cannot take part in a run; `lost` is the rank whose loss is the cause, -1 for none."""

    rank: int
    host: str
    cause: str
    code: int
    lost: int


class NotOfThisRun(ConnectionError):
    """A process listens at the store's address, and it has another secret, or none."""


def failure_of(text: bytes) -> Failure:
    read: Failure = json.loads(text)
    return read


def encode(operation: bytes, number: int, fields: Sequence[bytes]) -> list[bytes]:
    """Returns the frames of a message, none longer than `PART_BYTES`."""
    content = b"".join(fields)
    head = _HEAD.pack(operation, number) + struct.pack(f"<{len(fields)}I", *map(len, fields))
    return [head, *(content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES))]


def decode(frames: Sequence[bytes]) -> tuple[bytes, int, list[bytes]]:
    """Returns operation, number and fields; raises ValueError or struct.error if the frames are no message."""
    operation, number = _HEAD.unpack_from(frames[0])
    lengths = struct.unpack(f"<{(len(frames[0]) - _HEAD.size) // 4}I", frames[0][_HEAD.size :])
    content = b"".join(frames[1:])
    if sum(lengths) != len(content):
        raise ValueError(f"{len(content):,} bytes where {sum(lengths):,} are announced")
    fields, at = [], 0
    for length in lengths:
        fields.append(content[at : at + length])
        at += length
    return operation, number, fields


class StoreClient:
    """A connection to the store; any thread may use it, one at a time.

    `get` and `multi_get` wait until all keys are there, and raise WorkerFailed if they are not and a process has ended
    the store. Every method raises ConnectionError if the store has gone, and TimeoutError if it does not answer within
    `timeout_s`. The constructor waits as long, or `connect_s`, for a process to listen at `address`, and raises
    NotOfThisRun if that has another secret.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float, connect_s: float | None = None) -> None:
        self.address, self._secret, self._timeout_s = address, secret, timeout_s
        self._lock = threading.Lock()
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        listens_s = timeout_s if connect_s is None else connect_s
        give_up, pause = monotonic() + listens_s, threading.Event()
        while not self._connected(monotonic() + timeout_s):
            if monotonic() > give_up:
                self._context.term()
                raise TimeoutError(f"no process listens at {address} after {listens_s:.0f} s")
            pause.wait(_AGAIN_S)

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._ask(SET, [key.encode(), value.encode() if isinstance(value, str) else value])

    def get(self, key: str) -> bytes:
        """Returns the value of a key."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of all keys."""
        return self._ask(GET, [key.encode() for key in keys])

    def add(self, key: str, number: int) -> int:
        """Adds a number to that of a key, which begins as 0, and returns the sum."""
        (total,) = self._ask(ADD, [key.encode(), NUMBER.pack(number)])
        return int(NUMBER.unpack(total)[0])

    def leave(self, key: str, value: bytes) -> None:
        """Lets the value of a key be set when this connection ends."""
        self._ask(LEAVE, [key.encode(), value])

    def meet(
        self, key: str, name: str, value: bytes, members: Sequence[str], check: Callable[[], None]
    ) -> list[bytes | None]:
        """Blocks until each member of a meeting has come or is lost; returns their values, None for a lost one.

        Nothing is returned to a member that is lost itself. `check` is called about every 50 ms, and raises to end it.
        """
        fields = [each.encode() for each in (key, name)] + [value] + [each.encode() for each in members]
        return [told.removeprefix(CAME) if told else None for told in self._ask(MEET, fields, inf, check)]

    def lose(self, name: str) -> None:
        """Declares a member lost, in all meetings to which it has not come yet."""
        self._ask(LOSE, [name.encode()])

    def end(self, reason: Failure, leads: bool, within_s: float) -> tuple[Failure, Failure]:
        """Says why this process cannot take part; returns why none can, and the reason of the one that leads.

        They are the same, except where it has lost a rank that has said before why it failed. Blocks until it has said
        its reason.
        """
        give_up = monotonic() + within_s
        why, leading = self._ask(END, [json.dumps(reason).encode(), b"1" if leads else b""], give_up)
        return failure_of(why), failure_of(leading)

    def clone(self) -> StoreClient:
        """Returns another connection, for another thread."""
        return StoreClient(self.address, self._secret, self._timeout_s)

    def close(self) -> None:
        """Ends the connection."""
        self._events.close()
        self._context.term()

    def _connected(self, give_up: float) -> bool:
        """Connects; returns False if no process listens there yet."""
        self._socket, self._events = make_client(self._context, Keys(self._secret))
        self._poll = zmq.Poller()
        for watched in (self._socket, self._events.socket):
            self._poll.register(watched, zmq.POLLIN)
        try:
            connect(self._socket, self.address)
            # Answered at once.
            self._ask(GET, [], give_up)
        except BaseException as error:
            self._events.close()
            if isinstance(error, ConnectionRefusedError):
                return False
            self._context.term()
            if isinstance(error, ConnectionResetError):
                _show(self.address)
                raise NotOfThisRun(str(error)) from error
            raise
        return True

    def _ask(
        self,
        operation: bytes,
        fields: Sequence[bytes],
        give_up: float | None = None,
        check: Callable[[], object] = bool,
    ) -> list[bytes]:
        with self._lock:
            give_up = monotonic() + self._timeout_s if give_up is None else give_up
            self._number = (self._number + 1) % _NUMBERS
            self._check_end()
            self._socket.send_multipart(encode(operation, self._number, fields))
            while True:
                while waits(self._socket):
                    answered, number, values = decode(self._socket.recv_multipart())
                    # An interrupt may have left the answer to an earlier request.
                    if (answered, number) == (operation, self._number):
                        return values
                    if (answered, number) == (END, self._number):
                        of = failure_of(values[0])
                        raise WorkerFailed(of["rank"], of["host"], of["cause"], exit_code=of["code"])
                self._check_end()
                left = give_up - monotonic()
                if left <= 0:
                    raise TimeoutError(f"the store at {self.address} has not answered for {self._timeout_s:g} s")
                self._poll.poll(int(min(left, _SLICE_S) * 1000) + 1)
                check()

    def _check_end(self) -> None:
        for event, _ in self._events.read():
            if event in _REFUSED:
                raise ConnectionRefusedError(f"no process listens at {self.address}")
            if event in ENDS:
                raise ConnectionResetError(f"the store at {self.address} is lost: {ENDS[event]}")


def copy_of(store: StoreClient) -> dict[bytes, bytes]:
    """Returns all keys of a store, with their values."""
    told = store._ask(COPY, [])
    return dict(zip(told[::2], told[1::2], strict=True))


def _show(address: str) -> None:
    """Stays connected for a second and says nothing, so that the store can read where this process is.

    ZeroMQ ends a connection with a wrong key too soon for that.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _SHOWN_S) as shown:
        shown.settimeout(_SHOWN_S)
        while shown.recv(_GREETING_BYTES):
            continue
