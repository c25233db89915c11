"""A worker's conversation with one server, which goes on over other links where one breaks.

What is asked is kept until it is answered. If the link ends, or if something was lost on it, another is opened, over
which everything that is not answered is asked again, in its order and under its number:

    client   ask 7 ──► ask 8 ──►  ╳         join ──► ask 7 ──► ask 8 ──►
    server                ◄── 7 is over              ◄── 7 is over   ◄── 8 is over

The server does nothing twice: a push is known by its lease, anything else by its number.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

from torch import Tensor

from headrace.errors import PeerLost, Replaced, ServerRefused
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.parameter_server.wire.messages import Kind, Message, decode, encode
from headrace.transport.base import ClientTransport

_SLICE_S = 0.05

_KNOWN_S = 2.0
"""After this time whoever watches the processes knows which of them has ended."""


@dataclass(frozen=True)
class ServerConnection:
    """A link to one server, and what lies behind it.

    Attributes:
        link: to it.
        form: of its shards.
        places: this worker's own copy of their parameters, one a shard, in any contiguous shape.
        rank, host: the server's, as errors call it.
        reopen: opens another link, to that server or to whichever goes on in its place; raises ConnectionError or
            TimeoutError as long as there is none. None: a link that ends is the end.
        patience_s: how long to try that, and how long a server may say nothing at all before its link counts as broken.
        probe_s: after how long a wait to ask whether anything was lost on the way.
    """

    transport: ClientTransport
    layout: ShardLayout
    places: Sequence[Tensor]
    rank: int = 0
    host: str = "its host"
    reopen: Callable[[], ClientTransport] | None = None
    patience_s: float = 10.0
    probe_s: float = 1.0


class Session:
    """Args:
    connection: to the server.
    worker, incarnation: whose it is.
    check: called about every 50 ms of waiting; raises to end the wait.
    observes: whether it never pushes.

    Attributes:
        link: the present one.
        seats: where to put gradients, by shard; others after every `receive` and `ask`.

    Raises:
        PeerLost: the server is gone, or gives no answer; by any method.
        Replaced: another process goes on in place of this worker; by any method.
        ServerRefused: the server does not deal with this worker; by any method.
    """

    def __init__(
        self, connection: ServerConnection, worker: int, incarnation: int, check: Callable[[], None], observes: bool
    ) -> None:
        self._connection = connection
        # Its numbers are its own: a worker may have several clients, and a process one after the other.
        own = secrets.randbits(63)
        self._joining = encode(Message(Kind.JOIN, flag=observes, numbers=(worker, incarnation, own)))
        self._check = check
        self._pushes = range(0 if observes else len(connection.layout))
        self._number = 0
        self._unanswered: dict[int, tuple[bytes, Sequence[int], bytes]] = {}
        self._silent_since: float | None = None
        self._probed_at = 0.0
        self._probe: tuple[int, tuple[int, ...]] = (0, ())
        self._moved_bytes = 0
        self._usable = False
        self._sit(connection.transport)
        try:
            self._join(connection.transport, connection.patience_s)
        except (ConnectionError, TimeoutError) as error:
            self.reconnect(error)
        except BaseException:
            self._abandon()
            raise

    @property
    def moved_bytes(self) -> int:
        """Payload that has gone over all links."""
        return self._moved_bytes + (self.transport.moved_bytes if self._usable else 0)

    def ask(self, message: Message, slots: Sequence[int] = (), blob: bytes = b"") -> int:
        """Sends a message, with what lies in some push slots, which must stay there until it is answered.

        Returns:
            Its number.
        """
        self._number = number = self._number + 1
        data = encode(message._replace(number=number))
        self._unanswered[number] = (data, slots, blob)
        try:
            self.transport.send(data, slots, blob)
        except (ConnectionError, TimeoutError) as error:
            self.reconnect(error)
        return number

    def waits_for(self, number: int) -> bool:
        """Whether a question is not answered yet."""
        return number in self._unanswered

    def receive(self, most_s: float = _SLICE_S) -> tuple[Message, memoryview] | None:
        """Returns the answer to something that was asked, and the blob that came with it; None if none came soon.

        Args:
            most_s: how long to wait for one, if that is less than usual.
        """
        try:
            received = self.transport.receive(min(most_s, _SLICE_S))
        except (ConnectionError, TimeoutError) as error:
            self.reconnect(error)
            return None
        if received is None:
            self._check()
            self._look_after()
            return None
        self._silent_since = None
        message = decode(received[0])
        if self._unanswered.pop(message.number, None) is not None:
            return message, received[1]
        self._hear(message, received[1])
        return None

    def reconnect(self, cause: OSError) -> None:
        """Goes on over another link, because this one is of no use any more."""
        reopen, patience_s = self._connection.reopen, self._connection.patience_s
        self._hear_last_words()
        if reopen is None:
            raise self._lost(cause) from cause
        self._abandon()
        deadline = monotonic() + patience_s
        while True:
            try:
                self._resume(reopen())
                return
            except (ConnectionError, TimeoutError) as error:
                cause = error
            self._check()
            if monotonic() > deadline:
                known = f"the link to it has ended, and no other could be opened for {patience_s:g} s ({cause})"
                raise PeerLost(self._connection.rank, self._connection.host, known) from cause
            sleep(_SLICE_S)

    def close(self) -> None:
        """Ends the conversation; says so, if nothing is waited for."""
        if self._usable and not self._unanswered:
            with suppress(ConnectionError, TimeoutError):
                self.transport.send(encode(Message(Kind.LEAVE, flag=1, number=self._number + 1)))
        self._abandon()

    def _abandon(self) -> None:
        if self._usable:
            self._moved_bytes += self.transport.moved_bytes
        self._usable = False
        self.transport.close()

    def _sit(self, transport: ClientTransport) -> None:
        layout = self._connection.layout
        self.transport, self._usable = transport, True
        self._slots = [transport.push_slot(shard) for shard in self._pushes]
        self.push_views = [layout.push_view(shard, slot) for shard, slot in zip(self._pushes, self._slots, strict=True)]

    def _join(self, transport: ClientTransport, most_s: float) -> None:
        """Makes a link this client's; says again that it is where no answer comes."""
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
                self._hear(message, received[1])
        raise TimeoutError(f"it has not answered for {most_s:.1f} s")

    def _resume(self, transport: ClientTransport) -> None:
        """Goes on over a new link."""
        try:
            # The next one may be of more use.
            self._join(transport, self._connection.patience_s / 4)
            for _, slots, _ in self._unanswered.values():
                for slot in slots:
                    # Not encoded again: what was lost in encoding is kept for the next gradient, and is there once.
                    transport.push_slot(slot).copy_(self._slots[slot])
            for data, slots, blob in self._unanswered.values():
                transport.send(data, slots, blob)
        except BaseException:
            transport.close()
            raise
        self._sit(transport)
        self._silent_since = None

    def _look_after(self) -> None:
        """Finds out whether the link is of use still, if nothing has come for a while."""
        if self._connection.reopen is None:
            return
        now = monotonic()
        if self._silent_since is None:
            self._silent_since = self._probed_at = now
        elif now - self._silent_since > self._connection.patience_s:
            self.reconnect(TimeoutError(f"it has said nothing for {self._connection.patience_s:g} s"))
        elif now - self._probed_at > self._connection.probe_s:
            self._number += 1
            self._probe, self._probed_at = (self._number, tuple(self._unanswered)), now
            try:
                self.transport.send(encode(Message(Kind.ALIVE, number=self._number)))
            except (ConnectionError, TimeoutError) as error:
                self.reconnect(error)

    def _hear(self, message: Message, blob: memoryview) -> None:
        """Deals with what answers no question; what comes twice is no news."""
        if message.kind == Kind.ERROR:
            if message.flag and len(message.numbers) == 2:
                raise Replaced(*message.numbers)
            raise ServerRefused(bytes(blob).decode(errors="replace"))
        if message.kind == Kind.OPEN and message.number == self._probe[0]:
            # Whatever was answered before this came before it.
            lost = [number for number in self._probe[1] if self.waits_for(number) and number not in message.numbers]
            if lost:
                self.reconnect(ConnectionError(f"{len(lost)} messages were lost on the way"))

    def _hear_last_words(self) -> None:
        """The server may have said why it ends the link."""
        with suppress(ConnectionError, TimeoutError):
            while (received := self.transport.receive(0.0)) is not None:
                message = decode(received[0])
                if message.kind == Kind.ERROR:
                    self._hear(message, received[1])

    def _lost(self, error: OSError) -> PeerLost:
        """Returns what to raise where the link has ended, unless somebody knows better."""
        deadline = monotonic() + _KNOWN_S
        while monotonic() < deadline:
            self._check()
            sleep(_SLICE_S / 10)
        return PeerLost(self._connection.rank, self._connection.host, f"the link to it has ended ({error})")
