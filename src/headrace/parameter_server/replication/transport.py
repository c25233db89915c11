"""A server's transport where it has a backup, or is one: messages become the log, and the log becomes messages.

    worker ──► transport ──► ReplicatedTransport ──► Server     of the primary
                               │ ▲
                         log   ▼ │ held
                             ReplicatedTransport ──► Server     of the backup, whose own transport is not used yet

Both servers handle the same messages in the same order, and so are equal bit for bit. The log numbers connections by
itself, because a backup's own transport begins to count only when it is promoted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from time import monotonic, sleep

import torch
from torch import Tensor

from headrace.parameter_server.replication import machine
from headrace.parameter_server.replication.feed import BackupFeed
from headrace.parameter_server.replication.log import LONGEST, OWN, BackupLink, LogConnections, LogEntry, pushed_by
from headrace.parameter_server.replication.machine import Replication, View
from headrace.parameter_server.wire import Kind, Message, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ClientTransport, ReceivedMessage, ServerTransport, Slots

_POLL_S = 0.005
"""How often a process without its peer looks for a new view."""

_ASKS = (bytes([Kind.ALIVE]), bytes([Kind.JOIN]))
"""What a client sends again and again while it hears nothing."""


class ReplicatedTransport:
    """Replicates the messages of one server.

    `connect` opens a connection without pushes to a primary at an address. A worker whose connection has ended counts
    as lost if it has not reconnected after `grace_s`. `ready` is the epoch whose backup can be promoted, 0 before.
    `severed` says whether the connection to the other process of the view has ended; `heard` counts what came over it.
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
        self._links = LogConnections()
        self.transport: ServerTransport = _LogTransport(transport, self, self._links, replies)
        self.ready = 0
        self.severed = False
        self.heard = 0
        self._own = transport
        self._process = process
        self._machine = Replication(process)
        self._feed = BackupFeed(transport, pushes.lengths)
        self._backup_link = BackupLink(pushes, self._links, connect)
        self._address = ""
        self._grace_s = grace_s
        # Ended connections, and when their grace is over.
        self._ends: deque[tuple[float, int]] = deque()
        # An entry comes into the inbox, is in the log, and is due when it may be handled.
        self._inbox: deque[LogEntry] = deque()
        self._entries: dict[int, LogEntry] = {}
        self._due: deque[LogEntry] = deque()
        self._fill_at: int | None = None

    def attach(self, snapshot: Callable[[], SharedSegment], restore: Callable[[memoryview], object]) -> None:
        """Sets how to copy the server's state, and how to load a copy."""
        self._feed.snapshot = snapshot
        self._backup_link.restore = restore

    @property
    def leads(self) -> bool:
        """Whether this process is the primary."""
        return self._machine.leads

    def view(self, view: View, address: str = "") -> None:
        """Takes a view, and the address of its primary; raises ValueError if this process cannot have the role."""
        if view.epoch > self._machine.epoch:
            self.severed, self._address = False, address
            self._fill_at = None
            self._feed.drop_copy()
            self._act(self._machine.handle(view))

    def receive(self, timeout_s: float) -> LogEntry | None:
        """Returns the next log entry to handle; all that it returned before must be handled."""
        if not self._due:
            self._gather(min(timeout_s, _POLL_S) if self.severed else timeout_s)
        return self._due.popleft() if self._due else None

    def drop(self, peer: int) -> None:
        """Ends a connection."""
        self._links.ends.pop(peer, None)
        self._feed.forget(peer, unlogged=True)
        outside = self._links.inside.pop(peer, None)
        if outside is not None:
            self._own.drop(outside)

    def inject(self, message: ReceivedMessage) -> None:
        """Adds a message to the log that came over no connection; only the primary's counts."""
        if self._machine.leads:
            self._inbox.append(LogEntry(message))

    def close(self) -> None:
        """Ends the connection to the primary, if there is one."""
        self._backup_link.close()
        self._feed.close()

    def _gather(self, timeout_s: float) -> None:
        if self._machine.leads:
            if self._fill_at is not None:
                # The log up to here is handled; messages after the request for a snapshot are not in it.
                if not self._feed.fill(self._machine.view, self._fill_at, self._links):
                    self._receive_while_filling()
                    return
                self._fill_at = None
            # An ended connection is reported a second time when its grace is over.
            while self._ends and self._ends[0][0] <= monotonic():
                peer = self._ends.popleft()[1]
                if peer in self._links.ends:
                    self._append(LogEntry(ReceivedMessage(peer, b"")))
            if not self._inbox:
                self._inbox.extend(map(self._capture, self._own.receive(0.0 if self._due else timeout_s)))
            while self._inbox and self._fill_at is None:
                self._take(self._inbox.popleft())
        elif self._backup_link.follows:
            try:
                before = self._machine.last
                self._due.extend(self._backup_link.receive(timeout_s, self._machine))
                self.heard += self._machine.last != before
            except (ConnectionError, TimeoutError):
                self._backup_link.close()
                self.severed = True
        else:
            sleep(min(timeout_s, _POLL_S))

    def _receive_while_filling(self) -> None:
        """Keeps what arrives, and answers new clients, which would try elsewhere."""
        for mail in self._own.receive(_POLL_S):
            # Signs of life would grow without end, and are asked for again.
            if mail.message[1:2] != _ASKS[0]:
                self._inbox.append(self._capture(mail))
            if mail.message[1:2] in _ASKS:
                self._ask_for_patience(mail.peer)

    def _take(self, entry: LogEntry) -> None:
        """Takes a message of this process's own transport."""
        mail = entry.mail
        peer, message = mail.peer, mail.message[:LONGEST]
        if peer == OWN:
            self._append(entry)
        elif self._feed.takes(mail):
            self._take_from_backup(mail)
        elif message:
            inside = self._links.enter(peer)
            if inside is not None:
                self._append(LogEntry(ReceivedMessage(inside, message, mail.blob, mail.memory), entry.pushed))
                if message[1:2] in _ASKS and self._machine.last > self._machine.dealt:
                    self._ask_for_patience(peer)
        elif (inside := self._links.leave(peer)) is not None:
            self._ends.append((monotonic() + self._grace_s, inside))
            self._append(LogEntry(ReceivedMessage(inside, b"")))
            self._feed.forget(inside)

    def _ask_for_patience(self, peer: int) -> None:
        """Answers a client whose requests wait for the backup, which would count the server as lost."""
        if not self._feed.silent:
            self._own.send(peer, encode(Message(Kind.OPEN)))

    def _capture(self, mail: ReceivedMessage) -> LogEntry:
        """Returns a message with what its client has pushed, which stays in memory even if the client ends."""
        slots = pushed_by(mail.message[:LONGEST])
        pushed: dict[int, Tensor] = {}
        # A push without its content is refused by the server, and by the backup's.
        with suppress(ValueError):
            pushed = {slot: self._own.pushed(mail.peer, slot) for slot in slots}
            self._own.release(mail.peer, slots)
        return LogEntry(mail, pushed)

    def _append(self, entry: LogEntry) -> None:
        self._links.note(entry.mail)
        self._entries[self._machine.last + 1] = entry
        self._act(self._machine.handle(machine.Received()))

    def _take_from_backup(self, mail: ReceivedMessage) -> None:
        """Takes a message of a backup."""
        peer = mail.peer
        self.heard += 1
        try:
            event = self._feed.parse(mail)
            actions = [] if event is None else self._machine.handle(event)
        except ValueError:
            # A wrong message ends its sender's connection, and nothing else.
            actions = [machine.RefuseOldEpoch(self._machine.epoch)]
        if any(isinstance(action, machine.RefuseOldEpoch) for action in actions):
            view, called = self._machine.view, self._feed.callers.pop(peer, None)
            self.severed = self.severed or called == (view.epoch, view.backup)
            if called and called not in self._feed.callers.values():
                self._machine.handle(machine.Gone(*called))
            self._own.drop(peer)
        else:
            self._act(actions)

    def _act(self, actions: Sequence[machine.Action]) -> None:
        for action in actions:
            if isinstance(action, machine.Deal):
                self._due.append(self._entries.pop(action.number))
            elif isinstance(action, machine.Forward):
                self._feed.forward(self._machine.epoch, action.number, self._entries[action.number])
            elif isinstance(action, machine.Fill):
                self._fill_at = action.number
            elif isinstance(action, machine.Ready):
                self.ready = action.epoch
            elif isinstance(action, machine.Follow):
                try:
                    self._backup_link.open(action.epoch, self._process, self._address)
                except ConnectionError:
                    self.severed = True
            elif isinstance(action, machine.Lead):
                # Clients of the old primary have to reconnect.
                self._backup_link.close()
                now, known = monotonic(), self._links.ends.items()
                self._ends.extend((now, peer) for peer, reported in known if not reported)
                self._ends.extend((now + self._grace_s, peer) for peer, _ in known)
            elif isinstance(action, machine.Stop):
                self._backup_link.close()
                for pending in (self._inbox, self._entries, self._due):
                    pending.clear()
                for peer in list(self._links.inside):
                    self.drop(peer)


class _LogTransport(ServerTransport):
    """The transport that the server uses: it receives log entries, and sends through the process's own transport."""

    def __init__(
        self, transport: ServerTransport, log: ReplicatedTransport, links: LogConnections, replies: Slots | None
    ) -> None:
        self.trusts_clients = transport.trusts_clients
        self.address = transport.address
        self.moved_bytes = 0
        self._transport = transport
        self._log, self._links = log, links
        self._replies = replies
        self._pushed: Mapping[int, Tensor] = {}

    def parameters(self, slot: int) -> Tensor:
        return self._transport.parameters(slot)

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return self._transport.writing(slots)

    def set_version(self, slot: int, version: int) -> None:
        self._transport.set_version(slot, version)

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        # One at a time, so that two pushes into one slot are handled in order.
        entry = self._log.receive(timeout_s)
        self._pushed = entry.pushed if entry else {}
        self.moved_bytes = self._transport.moved_bytes
        return [entry.mail] if entry else []

    def pushed(self, peer: int, slot: int) -> Tensor:
        try:
            return self._pushed[slot]
        except KeyError:
            raise ValueError(f"a push is announced for slot {slot} and has not been sent") from None

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """Released when it was received."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        outside = self._links.inside.get(peer)
        if outside is not None:
            return self._transport.reply_slot(outside, slot)
        # It is not sent, but its encoding error must be the same on both servers.
        assert self._replies is not None
        return torch.empty(self._replies.lengths[slot], dtype=torch.uint8)

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        outside = self._links.inside.get(peer)
        if outside is not None:
            self._transport.send(outside, message, slots, blob, limited)

    def drop(self, peer: int) -> None:
        self._log.drop(peer)

    def close(self) -> None:
        self._log.close()
        self._transport.close()
