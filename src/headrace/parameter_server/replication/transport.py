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
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep

from torch import Tensor

from headrace.machine.background import BackgroundThread
from headrace.parameter_server.replication import machine
from headrace.parameter_server.replication.log import (
    LONGEST,
    OWN,
    BackupLink,
    LogConnections,
    LogEntry,
    LogPayload,
    encode_entry,
    pack,
    pushed_by,
)
from headrace.parameter_server.replication.log_transport import LogTransport
from headrace.parameter_server.replication.machine import Replication, View
from headrace.parameter_server.wire import Kind, Message, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ClientTransport, ReceivedMessage, ServerTransport, Slots

_POLL_S = 0.005
"""How often a process without its peer looks for a new view."""

_ASKS = (bytes([Kind.ALIVE]), bytes([Kind.JOIN]))
"""What a client sends again and again while it hears nothing."""

_SILENT_S = 120.0
"""For so long after the last word of a backup clients are told to wait for it: 15 GB fill it at 1 Gbit/s."""


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
        self.transport: ServerTransport = LogTransport(transport, self, replies)
        self.ready = 0
        self.severed = False
        self.heard = 0
        self._own = transport
        self._lengths = pushes.lengths
        self._process = process
        self._machine = Replication(process)
        self._links = LogConnections()
        self._backup_link = BackupLink(pushes, self._links, connect)
        self._address = ""
        self._grace_s = grace_s
        self._snapshot: Callable[[], SharedSegment] | None = None
        self._copying = BackgroundThread("fill")
        self._copied: SharedSegment | None = None
        self._outside: dict[int, int] = {}
        self._inside: dict[int, int] = {}
        self._ends: deque[tuple[float, int]] = deque()
        self._inbox: deque[LogEntry] = deque()
        self._entries: dict[int, LogEntry] = {}
        self._due: deque[LogEntry] = deque()
        self._callers: dict[int, tuple[int, ...]] = {}
        self._backup = -1
        self._shared: set[int] = set()
        self._fill_at: int | None = None
        self._heard_at = 0.0

    def attach(self, snapshot: Callable[[], SharedSegment], restore: Callable[[memoryview], object]) -> None:
        """Sets how to copy the server's state, and how to load a copy."""
        self._snapshot = snapshot
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
            self._drop_copy()
            self._act(self._machine.handle(view))

    def receive(self, timeout_s: float) -> LogEntry | None:
        """Returns the next log entry to handle; all that it returned before must be handled."""
        if not self._due:
            self._gather(min(timeout_s, _POLL_S) if self.severed else timeout_s)
        return self._due.popleft() if self._due else None

    def outside(self, peer: int) -> int | None:
        """Returns this process's number of a connection of the log; None if it has ended here."""
        return self._inside.get(peer)

    def drop(self, peer: int) -> None:
        """Ends a connection."""
        self._links.ends.pop(peer, None)
        if peer in self._shared:
            # Its end will not be in the log.
            self._shared.remove(peer)
            self._send(encode(Message(Kind.MEMORY, numbers=(peer,))), b"")
        outside = self._inside.pop(peer, None)
        if outside is not None:
            self._own.drop(outside)

    def inject(self, message: ReceivedMessage) -> None:
        """Adds a message to the log that came over no connection; only the primary's counts."""
        if self._machine.leads:
            self._inbox.append(LogEntry(message))

    def close(self) -> None:
        """Ends the connection to the primary, if there is one."""
        self._backup_link.close()
        self._copying.close()
        self._drop_copy()

    def _gather(self, timeout_s: float) -> None:
        if self._machine.leads:
            if self._fill_at is not None:
                self._fill(self._fill_at)
            if self._fill_at is not None:
                # Messages after the request for a snapshot are not in it.
                self._receive_while_filling()
                return
            self._report_ends()
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
        elif peer in self._callers or message[1:2] == bytes([Kind.FOLLOW]):
            self._take_from_backup(mail)
        elif message:
            inside = self._outside.setdefault(peer, self._links.next)
            if inside == self._links.next:
                self._inside[inside] = peer
            if inside in self._inside:
                self._append(LogEntry(ReceivedMessage(inside, message, mail.blob, mail.memory), entry.pushed))
                if message[1:2] in _ASKS and self._machine.last > self._machine.dealt:
                    self._ask_for_patience(peer)
        elif peer in self._outside:
            inside = self._outside.pop(peer)
            if self._inside.pop(inside, None) is not None:
                self._ends.append((monotonic() + self._grace_s, inside))
                self._append(LogEntry(ReceivedMessage(inside, b"")))
                self._shared.discard(inside)

    def _ask_for_patience(self, peer: int) -> None:
        """Answers a client whose requests wait for the backup, which would count the server as lost."""
        if monotonic() - self._heard_at < _SILENT_S:
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

    def _report_ends(self) -> None:
        """Reports ended connections a second time when their grace is over."""
        while self._ends and self._ends[0][0] <= monotonic():
            peer = self._ends.popleft()[1]
            if peer in self._links.ends:
                self._append(LogEntry(ReceivedMessage(peer, b"")))

    def _append(self, entry: LogEntry) -> None:
        self._links.note(entry.mail)
        self._entries[self._machine.last + 1] = entry
        self._act(self._machine.handle(machine.Received()))

    def _take_from_backup(self, mail: ReceivedMessage) -> None:
        """Takes a message of a backup."""
        peer = mail.peer
        self.heard, self._heard_at = self.heard + 1, monotonic()
        try:
            if not mail.message:
                raise ValueError("the link has ended")
            head = decode(mail.message)
            epoch, number = head.numbers
            calls = head.kind == Kind.FOLLOW
            if calls and peer in self._callers:
                raise ValueError("a backup calls once")
            if calls:
                self._callers[peer] = (epoch, number)
            event = machine.Called(epoch, number) if calls else machine.Held(epoch, number)
            actions = [] if not calls and peer != self._backup else self._machine.handle(event)
        except ValueError:
            # A wrong message ends its sender's connection, and nothing else.
            actions = [machine.RefuseOldEpoch(self._machine.epoch)]
        if any(isinstance(action, machine.RefuseOldEpoch) for action in actions):
            view, called = self._machine.view, self._callers.pop(peer, None)
            self.severed = self.severed or called == (view.epoch, view.backup)
            if called and called not in self._callers.values():
                self._machine.handle(machine.Gone(*called))
            self._own.drop(peer)
        else:
            self._act(actions)

    def _act(self, actions: Sequence[machine.Action]) -> None:
        for action in actions:
            if isinstance(action, machine.Deal):
                self._due.append(self._entries.pop(action.number))
            elif isinstance(action, machine.Forward):
                self._forward(action.number)
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
                self._lead()
            elif isinstance(action, machine.Stop):
                self._backup_link.close()
                for pending in (self._inbox, self._entries, self._due):
                    pending.clear()
                for peer in list(self._inside):
                    self.drop(peer)

    def _fill(self, number: int) -> None:
        """Sends the backup the server's state, when a thread has copied it; the log up to here is handled."""
        if not self._copying.done():
            if not self._copying.busy:
                self._copying.start(self._copy)
            return
        assert self._copied is not None
        snapshot, self._copied = self._copied, None
        view = self._machine.view
        wanted = (view.epoch, view.backup)
        self._fill_at = None
        self._backup = next((peer for peer, caller in self._callers.items() if caller == wanted), -1)
        self._shared.clear()
        head = Message(Kind.FILL, lease=number, numbers=(view.epoch, *self._links.numbers()))
        self._send(encode(head), snapshot)
        snapshot.close()

    def _copy(self) -> None:
        assert self._snapshot is not None, "attach() comes first"
        self._copied = self._snapshot()

    def _drop_copy(self) -> None:
        """Waits for the end of a copy that is not needed any more: what it copies must not change."""
        self._copying.wait()
        if self._copied is not None:
            self._copied.close()
            self._copied = None

    def _forward(self, number: int) -> None:
        """Sends a log entry to the backup, which reads gradients in the client's memory if that can be shared."""
        entry, epoch = self._entries[number], self._machine.epoch
        peer, memory = entry.mail.peer, entry.mail.memory
        payload = LogPayload.NONE
        blob: Blob = b""
        # What a client has shared is closed when its connection ends, and then what it has pushed is carried.
        if entry.pushed and memory is not None and memory.descriptor >= 0:
            payload = LogPayload.SHARED
            if peer not in self._shared:
                self._shared.add(peer)
                self._send(encode(Message(Kind.MEMORY, numbers=(peer,))), memory)
        elif entry.pushed:
            payload, blob = LogPayload.CARRIED, pack(self._lengths, entry.pushed)
        elif entry.mail.blob:
            payload, blob = LogPayload.BLOB, entry.mail.blob
        self._send(encode_entry(epoch, number, entry, payload), blob)

    def _send(self, message: bytes, blob: Blob) -> None:
        self._own.send(self._backup, message, blob=blob, limited=False)

    def _lead(self) -> None:
        """Becomes the primary: clients of the old one have to reconnect."""
        self._backup_link.close()
        now, known = monotonic(), self._links.ends.items()
        self._ends.extend((now, peer) for peer, told in known if not told)
        self._ends.extend((now + self._grace_s, peer) for peer, _ in known)
