"""A client's session with one server, which continues over a new connection when one breaks.

A request is kept until it is answered. If the connection ends, or if a message was lost on it, another is opened, and
all requests without an answer are sent again, in order and with their numbers:

    client   ask 7 ──► ask 8 ──►  ╳         join ──► ask 7 ──► ask 8 ──►
    server                ◄── 7 is done              ◄── 7 is done   ◄── 8 is done

The server does nothing twice: it knows a push by its lease, and anything else by its number.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

import torch
from torch import Tensor

from headrace.errors import PeerLost, Replaced, ServerRefused
from headrace.parameter_server.wire import Kind, Message, ShardLayout, decode, encode
from headrace.transport.base import ClientTransport

_SLICE_S = 0.05

_KNOWN_S = 2.0
"""After this time the launcher knows which process has ended."""


@dataclass(frozen=True)
class ServerConnection:
    """What a client needs to reach one server.

    Attributes:
        places: this worker's copy of their parameters, one for each shard, contiguous.
        reopen: opens another connection, to this server or its replacement; raises ConnectionError or TimeoutError
            while there is none. None if the end of the connection is an error.
        patience_s: how long to retry, and how long a server may be silent before its connection counts as broken.
        probe_s: how long to wait for an answer before asking whether a message was lost.
        has_moved: whether another process is in the server's place than the one that is connected.
        require_link: is told, a few times a second, for how long nothing has come; raises where nothing can come.
    """

    transport: ClientTransport
    layout: ShardLayout
    places: Sequence[Tensor]
    rank: int = 0
    host: str = "its host"
    reopen: Callable[[], ClientTransport] | None = None
    patience_s: float = 10.0
    probe_s: float = 1.0
    has_moved: Callable[[], bool] = bool
    require_link: Callable[[float], object] = bool


class Session:
    """Sends requests to one server and receives the answers.

    `observes` is a client that never pushes. `push_views` are the push slots of the shards, which change with every
    reconnection, in `receive` and `ask`. `put_off_at` is when the server has last said that all answers wait for its
    backup. Every method raises PeerLost if the server has ended or does not answer,
    Replaced if another process has replaced this worker, and ServerRefused if the server refuses it.
    """

    def __init__(
        self, connection: ServerConnection, worker: int, incarnation: int, check: Callable[[], None], observes: bool
    ) -> None:
        self._connection = connection
        # A random number of its own: a worker may have several clients, and a process one after the other.
        number = secrets.randbits(63)
        self._joining = encode(Message(Kind.JOIN, flag=observes, numbers=(worker, incarnation, number)))
        self._check = check
        self._pushes = range(0 if observes else len(connection.layout))
        self._number = 0
        self._unanswered: dict[int, tuple[bytes, Sequence[int], bytes]] = {}
        self._silent_since: float | None = None
        self.put_off_at = 0.0
        self._probed_at = 0.0
        self._probe: tuple[int, tuple[int, ...]] = (0, ())
        self._moved_bytes = 0
        self._usable = False
        self._use(connection.transport)
        try:
            self._join(connection.transport, connection.patience_s)
        except (ConnectionError, TimeoutError) as error:
            self.reconnect(error)
        except BaseException:
            self._abandon()
            raise

    @property
    def moved_bytes(self) -> int:
        """Payload of all connections."""
        return self._moved_bytes + (self.transport.moved_bytes if self._usable else 0)

    def ask(self, message: Message, slots: Sequence[int] = (), blob: bytes = b"") -> int:
        """Sends a message with push slots, which must not change until it is answered; returns the message's number."""
        self._number = number = self._number + 1
        data = encode(message._replace(number=number))
        self._unanswered[number] = (data, slots, blob)
        try:
            self.transport.send(data, slots, blob)
        except (ConnectionError, TimeoutError) as error:
            self.reconnect(error)
        return number

    def push_place(self, shards: range) -> Tensor | None:
        """Returns where the gradient of a parameter's shards is pushed from, flat, until the next `ask`.

        None if it has to be copied or encoded, or a push from there is not answered yet.
        """
        dtype = self.push_views[shards[0]].dtype
        # Of encoded gradients only bytes are known.
        if dtype == torch.uint8 or any(slots for _, slots, _ in self._unanswered.values()):
            return None
        place = self.transport.joined_push_slots(shards)
        return None if place is None else place.view(dtype)

    def waits_for(self, number: int) -> bool:
        """Returns whether a request is not answered yet."""
        return number in self._unanswered

    def receive(self, most_s: float = _SLICE_S) -> tuple[Message, memoryview] | None:
        """Returns the answer to a request, and its blob; None if none arrived soon, at the latest in `most_s`."""
        try:
            received = self.transport.receive(min(most_s, _SLICE_S))
        except (ConnectionError, TimeoutError) as error:
            self.reconnect(error)
            return None
        if received is None:
            self._check()
            self._check_connection()
            return None
        self._silent_since = None
        message = decode(received[0])
        if self._unanswered.pop(message.number, None) is not None:
            return message, received[1]
        self._handle_other(message, received[1])
        return None

    def reconnect(self, cause: OSError) -> None:
        """Opens another connection, because this one is broken."""
        reopen, patience_s = self._connection.reopen, self._connection.patience_s
        self._read_final_messages()
        if reopen is None:
            raise self._lost(cause) from cause
        self._abandon()
        began = monotonic()
        deadline = began + patience_s
        while True:
            try:
                self._resume(reopen())
                return
            except (ConnectionError, TimeoutError) as error:
                cause = error
            self._check()
            self._connection.require_link(monotonic() - (self._silent_since or began))
            if monotonic() > deadline:
                known = f"the link to it has ended, and no other could be opened for {patience_s:g} s ({cause})"
                raise PeerLost(self._connection.rank, self._connection.host, known) from cause
            sleep(_SLICE_S)

    def close(self) -> None:
        """Ends the session; tells the server unless a request is open."""
        if self._usable and not self._unanswered:
            with suppress(ConnectionError, TimeoutError):
                self.transport.send(encode(Message(Kind.LEAVE, flag=1, number=self._number + 1)))
        self._abandon()

    def _abandon(self) -> None:
        if self._usable:
            self._moved_bytes += self.transport.moved_bytes
        self._usable = False
        self.transport.close()

    def _use(self, transport: ClientTransport) -> None:
        layout = self._connection.layout
        self.transport, self._usable = transport, True
        self._slots = [transport.push_slot(shard) for shard in self._pushes]
        self.push_views = [layout.push_view(shard, slot) for shard, slot in zip(self._pushes, self._slots, strict=True)]

    def _join(self, transport: ClientTransport, most_s: float) -> None:
        """Registers this client on a connection; repeats it while there is no answer."""
        deadline = monotonic() + most_s
        while monotonic() < deadline:
            transport.send(self._joining, (), self._connection.layout.describe())
            again = min(deadline, monotonic() + self._connection.probe_s)
            while monotonic() < again:
                received = transport.receive(_SLICE_S)
                if received is None:
                    self._check()
                    continue
                message = decode(received[0])
                if message.kind == Kind.DONE:
                    return
                self._handle_other(message, received[1])
                # It lives, and may wait for its backup.
                deadline = monotonic() + most_s
        raise TimeoutError(f"it has not answered for {most_s:.1f} s")

    def _resume(self, transport: ClientTransport) -> None:
        """Continues on a new connection."""
        try:
            # Only a part of the patience, because the next connection may work.
            self._join(transport, self._connection.patience_s / 4)
            for _, slots, _ in self._unanswered.values():
                for slot in slots:
                    # Copied, not encoded again: the encoding error was already kept for the next gradient.
                    transport.push_slot(slot).copy_(self._slots[slot])
            for data, slots, blob in self._unanswered.values():
                transport.send(data, slots, blob)
        except BaseException:
            transport.close()
            raise
        self._use(transport)
        self._silent_since = None

    def _check_connection(self) -> None:
        """Checks that the connection works, if nothing has arrived for a while."""
        if self._connection.reopen is None:
            return
        now = monotonic()
        if self._silent_since is not None:
            self._connection.require_link(now - self._silent_since)
        if self._connection.has_moved():
            # A host that is cut off does not end its connections.
            self.reconnect(ConnectionError("another process has taken its place"))
        elif self._silent_since is None:
            self._silent_since = self._probed_at = now
        elif now - self._silent_since > self._connection.patience_s:
            self.reconnect(TimeoutError(f"it has been silent for {self._connection.patience_s:g} s"))
        elif now - self._probed_at > self._connection.probe_s:
            self._number += 1
            self._probe, self._probed_at = (self._number, tuple(self._unanswered)), now
            try:
                self.transport.send(encode(Message(Kind.ALIVE, number=self._number)))
            except (ConnectionError, TimeoutError) as error:
                self.reconnect(error)

    def _handle_other(self, message: Message, blob: memoryview) -> None:
        """Handles what answers no request; answers that arrive twice are dropped."""
        if message.kind == Kind.ERROR:
            if message.flag and len(message.numbers) == 2:
                raise Replaced(*message.numbers)
            raise ServerRefused(bytes(blob).decode(errors="replace"))
        if message.kind == Kind.OPEN and not message.number:
            self.put_off_at = monotonic()
        elif message.kind == Kind.OPEN and message.number == self._probe[0]:
            # All answers sent before this one have arrived before it.
            lost = [number for number in self._probe[1] if self.waits_for(number) and number not in message.numbers]
            if lost:
                self.reconnect(ConnectionError(f"{len(lost)} messages were lost on the way"))

    def _read_final_messages(self) -> None:
        """Reads what the server has sent before it ended the connection, which may be an error."""
        with suppress(ConnectionError, TimeoutError):
            while (received := self.transport.receive(0.0)) is not None:
                message = decode(received[0])
                if message.kind == Kind.ERROR:
                    self._handle_other(message, received[1])

    def _lost(self, error: OSError) -> PeerLost:
        """Returns the error of an ended connection, unless `check` raises a better one."""
        deadline = monotonic() + _KNOWN_S
        while monotonic() < deadline:
            self._check()
            sleep(_SLICE_S / 10)
        return PeerLost(self._connection.rank, self._connection.host, f"the link to it has ended ({error})")
