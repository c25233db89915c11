"""A server's end of its links where it has a backup, or is one: mail becomes the log, and the log becomes mail.

    worker ──► port ──► Pairing ──► Server                of the primary
                          │ ▲
                    log   ▼ │ held
                        Pairing ──► Server                of the backup, whose port nobody uses yet

Both servers deal with the same mail in the same order, and so are equal bit for bit. Links are numbered by the log, not
by a process's own port: that of a backup begins to count when it is promoted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic, sleep

import torch
from torch import Tensor

from headrace.parameter_server.replication.log import (
    LONGEST,
    BackupLink,
    LogConnections,
    LogEntry,
    LogPayload,
    encode_entry,
    pack,
    pushed_by,
)
from headrace.parameter_server.replication.machine import (
    Action,
    Called,
    Deal,
    Fill,
    Follow,
    Forward,
    Held,
    Lead,
    Ready,
    Received,
    RefuseOldEpoch,
    Replication,
    Stop,
    View,
)
from headrace.parameter_server.wire.messages import Kind, Message, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ClientTransport, ReceivedMessage, ServerTransport, Slots

_LOOK_S = 0.005
"""How often whoever has lost the other looks for what it is now."""


class ReplicatedTransport:
    """Args:
    port: of this process.
    pushes, replies: its slots.
    process: its number, as views say it.
    connect: opens a link without pushes to a primary at an address.
    grace_s: how long a worker whose link has ended may take to come over another, before it is taken for lost.

    Attributes:
        port: for the server.
        ready: the epoch whose backup can be promoted; 0 before there is one.
        severed: whether the other process of the view cannot be heard any more.
    """

    def __init__(
        self,
        transport: ServerTransport,
        pushes: Slots,
        replies: Slots | None,
        process: int,
        connect: Callable[[str], ClientTransport],
        grace_s: float = 2.0,
    ) -> None:
        self.transport: ServerTransport = _LogPort(transport, self, replies)
        self.ready = 0
        self.severed = False
        self._real = transport
        self._lengths = pushes.lengths
        self._process = process
        self._machine = Replication(process)
        self._links = LogConnections()
        self._follower = BackupLink(pushes, self._links, connect)
        self._address = ""
        self._grace_s = grace_s
        self._snapshot: Callable[[], SharedSegment] | None = None
        self._outside: dict[int, int] = {}
        self._inside: dict[int, int] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._inbox: deque[ReceivedMessage] = deque()
        self._pieces: dict[int, LogEntry] = {}
        self._due: deque[LogEntry] = deque()
        self._callers: dict[int, tuple[int, ...]] = {}
        self._backup = -1
        self._shared: set[int] = set()
        self._fill_at: int | None = None

    def attach(self, snapshot: Callable[[], SharedSegment], restore: Callable[[memoryview], object]) -> None:
        """Is told how to copy what the server is, and how to become such a copy."""
        self._snapshot = snapshot
        self._follower.restore = restore

    @property
    def leads(self) -> bool:
        """Whether this process is the primary."""
        return self._machine.leads

    def view(self, view: View, address: str = "") -> None:
        """Is told who is what; a view that it knows changes nothing.

        Args:
            view: the newest.
            address: where its primary is reached.

        Raises:
            ValueError: it cannot be what it is told to be.
        """
        if view.epoch > self._machine.epoch:
            self.severed, self._address = False, address
            self._fill_at = None
            self._act(self._machine.handle(view))

    def receive(self, timeout_s: float) -> LogEntry | None:
        """Returns the next piece of the log; whatever it has returned before has been dealt with."""
        if not self._due:
            self._gather(min(timeout_s, _LOOK_S) if self.severed else timeout_s)
        return self._due.popleft() if self._due else None

    def outside(self, peer: int) -> int | None:
        """Returns which link of this process's port it is that the log calls so; None if there is none any more."""
        return self._inside.get(peer)

    def drop(self, peer: int) -> None:
        """Ends a link."""
        self._links.ends.pop(peer, None)
        outside = self._inside.pop(peer, None)
        if outside is not None:
            self._real.drop(outside)

    def close(self) -> None:
        """Ends its link to the primary, if it has one."""
        self._follower.close()

    def _gather(self, timeout_s: float) -> None:
        if self._machine.leads:
            if self._fill_at is not None:
                self._fill(self._fill_at)
            self._tell_ends()
            if not self._inbox:
                self._inbox.extend(self._real.receive(0.0 if self._due else timeout_s))
            # What comes after the question for a snapshot is not in it.
            while self._inbox and self._fill_at is None:
                self._take(self._inbox.popleft())
        elif self._follower.follows:
            try:
                self._due.extend(self._follower.receive(timeout_s, self._machine))
            except (ConnectionError, TimeoutError):
                self._follower.close()
                self.severed = True
        else:
            sleep(min(timeout_s, _LOOK_S))

    def _take(self, mail: ReceivedMessage) -> None:
        """Takes mail of this process's own port."""
        peer, message = mail.peer, mail.message[:LONGEST]
        if peer in self._callers or message[1:2] == bytes([Kind.FOLLOW]):
            self._hear(mail)
        elif message:
            inside = self._outside.setdefault(peer, self._links.next)
            if inside == self._links.next:
                self._inside[inside] = peer
            if inside in self._inside:
                pushed = self._capture(peer, message)
                self._write_down(LogEntry(ReceivedMessage(inside, message, mail.blob, mail.memory), pushed))
        elif peer in self._outside:
            inside = self._outside.pop(peer)
            if self._inside.pop(inside, None) is not None:
                self._ends.append((monotonic() + self._grace_s, inside))
                self._write_down(LogEntry(ReceivedMessage(inside, b"")))

    def _capture(self, peer: int, message: bytes) -> dict[int, Tensor]:
        """Returns what a link has pushed, which stays there whatever becomes of the link."""
        slots = pushed_by(message)
        try:
            pushed = {slot: self._real.pushed(peer, slot) for slot in slots}
        except ValueError:
            # The server will say so, and the backup's, too.
            return {}
        self._real.release(peer, slots)
        return pushed

    def _tell_ends(self) -> None:
        """Tells ends of links a second time whose grace is over."""
        while self._ends and self._ends[0][0] <= monotonic():
            peer = self._ends.popleft()[1]
            if peer in self._links.ends:
                self._write_down(LogEntry(ReceivedMessage(peer, b"")))

    def _write_down(self, piece: LogEntry) -> None:
        self._links.note(piece.mail)
        self._pieces[self._machine.last + 1] = piece
        self._act(self._machine.handle(Received()))

    def _hear(self, mail: ReceivedMessage) -> None:
        """Takes what a backup says."""
        peer = mail.peer
        try:
            if not mail.message:
                raise ValueError("the link has ended")
            head = decode(mail.message)
            epoch, number = head.numbers
            calls = head.kind == Kind.FOLLOW
            if calls:
                self._callers[peer] = (epoch, number)
            event = Called(epoch, number) if calls else Held(epoch, number)
            actions = [] if not calls and peer != self._backup else self._machine.handle(event)
        except ValueError:
            # Whoever cannot speak properly harms itself alone.
            actions = [RefuseOldEpoch(self._machine.epoch)]
        if any(isinstance(action, RefuseOldEpoch) for action in actions):
            view = self._machine.view
            self.severed = self.severed or self._callers.pop(peer, ()) == (view.epoch, view.backup)
            self._real.drop(peer)
        else:
            self._act(actions)

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Deal):
                self._due.append(self._pieces.pop(action.number))
            elif isinstance(action, Forward):
                self._forward(action.number, at_once=Deal(action.number) in actions)
            elif isinstance(action, Fill):
                self._fill_at = action.number
            elif isinstance(action, Ready):
                self.ready = action.epoch
            elif isinstance(action, Follow):
                self._follow(action)
            elif isinstance(action, Lead):
                self._lead()
            elif isinstance(action, Stop):
                self._stop()

    def _fill(self, number: int) -> None:
        """Gives the backup what the server is now that it has dealt with the log up to here."""
        view = self._machine.view
        wanted = (view.epoch, view.backup)
        self._fill_at = None
        self._backup = next((peer for peer, caller in self._callers.items() if caller == wanted), -1)
        self._shared.clear()
        head = Message(Kind.FILL, lease=number, numbers=(view.epoch, *self._links.numbers()))
        assert self._snapshot is not None, "whoever makes a server attaches it"
        snapshot = self._snapshot()
        self._send(encode(head), snapshot)
        snapshot.close()

    def _forward(self, number: int, at_once: bool) -> None:
        """Writes a piece of the log to the backup.

        Args:
            number: of it.
            at_once: whether it is dealt with before it is held, so that what was pushed does not stay where it is.
        """
        piece, epoch = self._pieces[number], self._machine.epoch
        peer, memory = piece.mail.peer, piece.mail.memory
        payload = LogPayload.NONE
        blob: Blob = b""
        if piece.pushed and memory is not None and not at_once:
            payload = LogPayload.SHARED
            if peer not in self._shared:
                self._shared.add(peer)
                self._send(encode(Message(Kind.MEMORY, numbers=(peer,))), memory)
        elif piece.pushed:
            payload, blob = LogPayload.CARRIED, pack(self._lengths, piece.pushed)
        elif piece.mail.blob:
            payload, blob = LogPayload.BLOB, piece.mail.blob
        self._send(encode_entry(epoch, number, piece, payload), blob)

    def _send(self, message: bytes, blob: Blob) -> None:
        self._real.send(self._backup, message, blob=blob, limited=False)

    def _follow(self, action: Follow) -> None:
        try:
            self._follower.open(action.epoch, self._process, self._address)
        except ConnectionError:
            self.severed = True

    def _lead(self) -> None:
        """Is the primary: whoever had a link to the old one has to come over another."""
        self._follower.close()
        now, known = monotonic(), self._links.ends.items()
        self._ends.extend((now, peer) for peer, told in known if not told)
        self._ends.extend((now + self._grace_s, peer) for peer, _ in known)

    def _stop(self) -> None:
        """Is nothing any more: nobody shall wait for it."""
        self._follower.close()
        for pending in (self._inbox, self._pieces, self._due):
            pending.clear()
        for peer in list(self._inside):
            self.drop(peer)


class _LogPort(ServerTransport):
    """What a server takes for its port.

    Args:
        port: of the process.
        pairing: where mail comes from.
        replies: the places of what links pull in another form.
    """

    def __init__(self, transport: ServerTransport, replicated: ReplicatedTransport, replies: Slots | None) -> None:
        self.trusts_clients = transport.trusts_clients
        self.address = transport.address
        self.moved_bytes = 0
        self._transport = transport
        self._replicated = replicated
        self._replies = replies
        self._pushed: Mapping[int, Tensor] = {}

    def parameters(self, slot: int) -> Tensor:
        return self._transport.parameters(slot)

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return self._transport.writing(slots)

    def set_version(self, slot: int, version: int) -> None:
        self._transport.set_version(slot, version)

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        # One at a time, so that what was pushed twice into one slot is dealt with as it came.
        piece = self._replicated.receive(timeout_s)
        self._pushed = piece.pushed if piece else {}
        self.moved_bytes = self._transport.moved_bytes
        return [piece.mail] if piece else []

    def pushed(self, peer: int, slot: int) -> Tensor:
        try:
            return self._pushed[slot]
        except KeyError:
            raise ValueError(f"a push is announced for slot {slot} and has not been sent") from None

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """It was, when it was received."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        outside = self._replicated.outside(peer)
        if outside is not None:
            return self._transport.reply_slot(outside, slot)
        # Nobody will read it, and what encoding loses is to be the same everywhere.
        assert self._replies is not None
        return torch.empty(self._replies.lengths[slot], dtype=torch.uint8)

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        outside = self._replicated.outside(peer)
        if outside is not None:
            self._transport.send(outside, message, slots, blob, limited)

    def drop(self, peer: int) -> None:
        self._replicated.drop(peer)

    def close(self) -> None:
        self._replicated.close()
        self._transport.close()
