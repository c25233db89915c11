"""The log as a primary sends it to its backup, the messages that they exchange, and the backup's end of the connection.

backup   FOLLOW  epoch, process                         "I am your backup"
primary  FILL    epoch, number, connections; snapshot   the state after the log up to this number
primary  MEMORY  connection; a segment                  on one host: where that client pushes
primary  MEMORY  connection                             it pushes no more, and what it has pushed is in the log
primary  ENTRY   epoch, number, connection, message     an entry of the log, with a payload
backup   HELD    epoch, number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from headrace.parameter_server.replication.machine import Filled, LogEntryReceived, RefuseOldEpoch, Replication
from headrace.parameter_server.wire import Kind, Message, decode, encode
from headrace.transport.base import LARGEST_MESSAGE, ClientTransport, ReceivedMessage, Slots

_HEAD = len(encode(Message(Kind.ENTRY, numbers=(0, 0))))

LONGEST = LARGEST_MESSAGE - _HEAD
"""Bytes of the longest message that fits into a log entry."""

OWN = -1
"""Instead of the number of a connection: of what a server's own process tells it."""


class LogPayload(IntEnum):
    """How gradients, or another blob, are sent with a log entry."""

    NONE = 0
    BLOB = 1
    """The blob of the message."""
    CARRIED = 2
    """The pushed gradients, slot after slot."""
    SHARED = 3
    """The pushed gradients are in the client's shared memory."""


@dataclass
class LogEntry:
    """A message with the log's number of its connection, and the gradients pushed, `(bytes,)` uint8 by slot."""

    mail: ReceivedMessage
    pushed: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass
class LogConnections:
    """The connections that the log knows, by numbers of its own, of which `next` is the next; none is used twice.

    `ends` tells of each open one how often its end was reported: at once, and when its worker's grace is over. `inside`
    and `outside` are the open ones of this process's own transport: their numbers there by those of the log, and back.
    """

    next: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    inside: dict[int, int] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)

    def enter(self, peer: int) -> int | None:
        """Returns the log's number of a connection of the transport; None if it was dropped."""
        number = self.outside.setdefault(peer, self.next)
        if number == self.next:
            self.inside[number] = peer
        return number if number in self.inside else None

    def leave(self, peer: int) -> int | None:
        """Forgets a connection of the transport that has ended; returns its number, None if the log has none."""
        number = self.outside.pop(peer, None)
        return None if number is None or self.inside.pop(number, None) is None else number

    def note(self, mail: ReceivedMessage) -> None:
        """Records the connection of a message."""
        if mail.peer == OWN:
            return
        self.next = max(self.next, mail.peer + 1)
        ends = self.ends.setdefault(mail.peer, 0) + (not mail.message)
        if ends < 2:
            self.ends[mail.peer] = ends
        else:
            del self.ends[mail.peer]

    def numbers(self) -> tuple[int, ...]:
        """Returns what `take_up` takes."""
        return (self.next, *(number for pair in self.ends.items() for number in pair))

    def take_up(self, numbers: Sequence[int]) -> None:
        """Takes over the state of another process; raises ValueError if this is not what `numbers` returns."""
        self.next, self.ends = numbers[0], dict(zip(numbers[1::2], numbers[2::2], strict=True))


def pushed_by(message: bytes) -> list[int]:
    """Returns the slots whose content is sent with a message; none if it is not a message."""
    try:
        return decode(message).pushed
    except ValueError:
        return []


def encode_entry(epoch: int, number: int, entry: LogEntry, payload: LogPayload) -> bytes:
    """Returns the message of a log entry, without its payload."""
    mail = entry.mail
    return encode(Message(Kind.ENTRY, flag=payload, lease=number, numbers=(epoch, mail.peer))) + mail.message


def parse_entry(data: bytes) -> tuple[Message, bytes]:
    """Returns the head of a primary's message, and a log entry's client message; raises ValueError if it is none."""
    entry = len(data) >= _HEAD and data[1] == Kind.ENTRY
    head = decode(data[:_HEAD] if entry else data)
    least = {Kind.FILL: 2, Kind.MEMORY: 1, Kind.ENTRY: 1}.get(head.kind, math.inf)
    if len(head.numbers) < least:
        raise ValueError(f"{head.kind.name} is nothing that a primary says")
    return head, data[_HEAD:] if entry else b""


def pack(lengths: Sequence[int], pushed: Mapping[int, Tensor]) -> bytearray:
    """Returns pushed gradients in one buffer, slot after slot; `lengths` are the bytes of all slots."""
    slots = Slots([lengths[slot] for slot in pushed])
    packed = bytearray(slots.nbytes)
    if packed:
        region = torch.frombuffer(packed, dtype=torch.uint8)
        for index, content in enumerate(pushed.values()):
            slots.of(region, index).copy_(content)
    return packed


def unpack(lengths: Sequence[int], present: Sequence[int], packed: memoryview) -> dict[int, Tensor]:
    """Returns views of what `pack` was given, the slots `present`; raises ValueError if `packed` has another length."""
    slots = Slots([lengths[slot] for slot in present if slot < len(lengths)])
    if len(slots) != len(present) or slots.nbytes != len(packed):
        raise ValueError(f"{len(present)} slots of {slots.nbytes:,} bytes came in {len(packed):,}")
    if not packed:
        return {slot: torch.empty(0, dtype=torch.uint8) for slot in present}
    region = torch.frombuffer(packed, dtype=torch.uint8)
    return {slot: slots.of(region, index) for index, slot in enumerate(present)}


_MOST = 64
"""Log entries that are received at once, and acknowledged together."""


class BackupLink:
    """A backup's connection to its primary: the source of its log.

    `restore` loads a snapshot into the server, `connect` opens a connection to a primary at an address.
    """

    def __init__(self, pushes: Slots, links: LogConnections, connect: Callable[[str], ClientTransport]) -> None:
        self.restore: Callable[[memoryview], object] = bytes
        self._links = links
        self._pushes = pushes
        self._connect = connect
        self._transport: ClientTransport | None = None
        self._places: dict[int, Sequence[Tensor]] = {}
        self._held: tuple[int, int] | None = None

    @property
    def follows(self) -> bool:
        """Whether there is a connection."""
        return self._transport is not None

    def open(self, epoch: int, process: int, address: str) -> None:
        """Connects to the primary; raises ConnectionError if it cannot be reached."""
        self.close()
        self._transport = self._connect(address)
        self._transport.send(encode(Message(Kind.FOLLOW, numbers=(epoch, process))))

    def receive(self, timeout_s: float, machine: Replication) -> list[LogEntry]:
        """Returns log entries; all entries that were returned before must be handled.

        Raises ConnectionError if the primary has ended, and ValueError if the primary sends what it must not.
        """
        self._acknowledge()
        entries: list[LogEntry] = []
        while self._transport is not None and len(entries) < _MOST:
            received = self._transport.receive(0.0 if entries else timeout_s)
            if received is None:
                break
            head, message = parse_entry(received[0])
            if head.kind == Kind.MEMORY:
                self._take_place(head.numbers[0], received[1])
                continue
            if head.kind == Kind.FILL:
                epoch, *links = head.numbers
                machine.handle(Filled(epoch, head.lease))
                self._links.take_up(links)
                self.restore(received[1])
                self._held = epoch, head.lease
                self._acknowledge()
                continue
            epoch, peer = head.numbers
            actions = machine.handle(LogEntryReceived(epoch, head.lease))
            if any(isinstance(action, RefuseOldEpoch) for action in actions):
                self.close()
                break
            entries.append(self._entry(ReceivedMessage(peer, message), LogPayload(head.flag), received[1]))
            self._held = epoch, head.lease
            if head.flag == LogPayload.SHARED:
                # The client may overwrite it when this entry is held, so it must be handled before.
                return entries
        self._acknowledge()
        return entries

    def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._held = None, None
        self._places.clear()

    def _take_place(self, peer: int, memory: memoryview) -> None:
        if memory:
            self._places[peer] = self._pushes.views(torch.frombuffer(memory, dtype=torch.uint8))
        else:
            self._places.pop(peer, None)

    def _acknowledge(self) -> None:
        if self._held is not None and self._transport is not None:
            self._transport.send(encode(Message(Kind.HELD, numbers=self._held)))
        self._held = None

    def _entry(self, mail: ReceivedMessage, payload: LogPayload, blob: memoryview) -> LogEntry:
        self._links.note(mail)
        if payload == LogPayload.BLOB:
            return LogEntry(ReceivedMessage(mail.peer, mail.message, blob))
        present = pushed_by(mail.message)
        if payload == LogPayload.CARRIED:
            return LogEntry(mail, unpack(self._pushes.lengths, present, blob))
        if payload == LogPayload.SHARED:
            places = self._places[mail.peer]
            return LogEntry(mail, {slot: places[slot] for slot in present})
        if not mail.message:
            self._places.pop(mail.peer, None)
        return LogEntry(mail)
