"""The log as it goes from a primary to its backup, in messages that they alone exchange.

backup   FOLLOW  epoch, process                         "I am your backup"
primary  FILL    epoch, number, links; a snapshot       all that has been made of the log up to here
primary  MEMORY  link; a segment                        on one host: where that link pushes
primary  ENTRY   epoch, number, link, mail; a payload   a piece of the log
backup   HELD    epoch, number
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from headrace.parameter_server.replication.machine import Filled, LogEntryReceived, RefuseOldEpoch, Replication
from headrace.parameter_server.wire.messages import Kind, Message, decode, encode
from headrace.transport.base import LARGEST_MESSAGE, ClientTransport, ReceivedMessage, Slots

_HEAD = len(encode(Message(Kind.ENTRY, numbers=(0, 0))))

LONGEST = LARGEST_MESSAGE - _HEAD
"""Bytes of a message that can be written down."""


class LogPayload(IntEnum):
    """How what was pushed, or another blob, comes with a piece of the log."""

    NONE = 0
    BLOB = 1
    """As it came."""
    CARRIED = 2
    """What was pushed, slot after slot."""
    SHARED = 3
    """What was pushed lies where its link has put it."""


@dataclass
class LogEntry:
    """Mail as it is dealt with, here and on the backup.

    Attributes:
        mail: with the number that the log has for its link.
        pushed: by slot, `(bytes,)` uint8.
    """

    mail: ReceivedMessage
    pushed: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass
class LogConnections:
    """The links that the log knows, by numbers of its own.

    Attributes:
        next: number of the next new one; none is used twice.
        ends: of each that is not over, how often its end was told: at once, and again when its worker's grace is over.
    """

    next: int = 0
    ends: dict[int, int] = field(default_factory=dict)

    def note(self, mail: ReceivedMessage) -> None:
        """Takes note of a piece of mail."""
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
        """Becomes what it is in another process.

        Raises:
            ValueError: they are not what `numbers` returns.
        """
        self.next, self.ends = numbers[0], dict(zip(numbers[1::2], numbers[2::2], strict=True))


def pushed_by(message: bytes) -> list[int]:
    """Returns the slots whose content comes with a message; none if it is no message."""
    try:
        return decode(message).pushed
    except ValueError:
        return []


def encode_entry(epoch: int, number: int, piece: LogEntry, payload: LogPayload) -> bytes:
    """Returns the message that a piece of the log is, without its payload."""
    mail = piece.mail
    return encode(Message(Kind.ENTRY, flag=payload, lease=number, numbers=(epoch, mail.peer))) + mail.message


def parse_entry(data: bytes) -> tuple[Message, bytes]:
    """Returns the head of a primary's message, and the mail in it, empty in all but pieces of the log.

    Raises:
        ValueError: it is none.
    """
    entry = len(data) >= _HEAD and data[1] == Kind.ENTRY
    head = decode(data[:_HEAD] if entry else data)
    if head.kind not in (Kind.FILL, Kind.MEMORY, Kind.ENTRY) or len(head.numbers) < (
        2 if head.kind == Kind.FILL else 1
    ):
        raise ValueError(f"{head.kind.name} is nothing that a primary says")
    return head, data[_HEAD:] if entry else b""


def pack(lengths: Sequence[int], pushed: Mapping[int, Tensor]) -> bytearray:
    """Returns what was pushed, slot after slot.

    Args:
        lengths: of all slots, bytes.
        pushed: by slot.
    """
    slots = Slots([lengths[slot] for slot in pushed])
    packed = bytearray(slots.nbytes)
    if packed:
        region = torch.frombuffer(packed, dtype=torch.uint8)
        for index, content in enumerate(pushed.values()):
            slots.of(region, index).copy_(content)
    return packed


def unpack(lengths: Sequence[int], present: Sequence[int], packed: memoryview) -> dict[int, Tensor]:
    """Returns what `pack` was given, in place.

    Args:
        lengths: of all slots, bytes.
        present: the slots that are in it.
        packed: its result.

    Raises:
        ValueError: it has another length.
    """
    slots = Slots([lengths[slot] for slot in present if slot < len(lengths)])
    if len(slots) != len(present) or slots.nbytes != len(packed):
        raise ValueError(f"{len(present)} slots of {slots.nbytes:,} bytes came in {len(packed):,}")
    if not packed:
        return {slot: torch.empty(0, dtype=torch.uint8) for slot in present}
    region = torch.frombuffer(packed, dtype=torch.uint8)
    return {slot: slots.of(region, index) for index, slot in enumerate(present)}


_MOST = 64
"""Pieces of the log that are taken at once; that they are held is said once for all."""


class BackupLink:
    """Args:
    pushes: the places of what links push.
    links: that the log knows.
    connect: opens a link to a primary at an address.

    Attributes:
        restore: makes the server what a snapshot says.
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
        """Whether there is a link."""
        return self._transport is not None

    def open(self, epoch: int, process: int, address: str) -> None:
        """Calls the primary.

        Raises:
            ConnectionError: it is not there.
        """
        self.close()
        self._transport = self._connect(address)
        self._transport.send(encode(Message(Kind.FOLLOW, numbers=(epoch, process))))

    def receive(self, timeout_s: float, machine: Replication) -> list[LogEntry]:
        """Returns pieces of the log; nothing that was returned before may still wait.

        Raises:
            ConnectionError: the primary is gone.
            ValueError: it says what it must not.
        """
        self._say()
        pieces: list[LogEntry] = []
        while self._transport is not None and len(pieces) < _MOST:
            received = self._transport.receive(0.0 if pieces else timeout_s)
            if received is None:
                break
            head, message = parse_entry(received[0])
            if head.kind == Kind.MEMORY:
                place = torch.frombuffer(received[1], dtype=torch.uint8)
                self._places[head.numbers[0]] = self._pushes.views(place)
                continue
            if head.kind == Kind.FILL:
                self._take_up(head, received[1], machine)
                continue
            epoch, peer = head.numbers
            if any(
                isinstance(action, RefuseOldEpoch) for action in machine.handle(LogEntryReceived(epoch, head.lease))
            ):
                self.close()
                break
            pieces.append(self._piece(ReceivedMessage(peer, message), LogPayload(head.flag), received[1]))
            self._held = epoch, head.lease
            if head.flag == LogPayload.SHARED:
                # Its sender may write there again when this is held: it must be dealt with before.
                return pieces
        self._say()
        return pieces

    def close(self) -> None:
        """Ends the link, if there is one."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._held = None, None
        self._places.clear()

    def _say(self) -> None:
        if self._held is not None and self._transport is not None:
            self._transport.send(encode(Message(Kind.HELD, numbers=self._held)))
        self._held = None

    def _take_up(self, head: Message, snapshot: memoryview, machine: Replication) -> None:
        epoch, *links = head.numbers
        machine.handle(Filled(epoch, head.lease))
        self._links.take_up(links)
        self.restore(snapshot)
        self._held = epoch, head.lease
        self._say()

    def _piece(self, mail: ReceivedMessage, payload: LogPayload, blob: memoryview) -> LogEntry:
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
