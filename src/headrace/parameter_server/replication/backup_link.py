"""A backup's end of its link to the primary: where the log comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.parameter_server.replication.log import LogEntry, LogLinks, LogPayload, parse_piece, pushed_by, unpack
from headrace.parameter_server.replication.machine import Filled, LogEntryReceived, RefuseOldEpoch, Replication
from headrace.parameter_server.wire.messages import Kind, Message, encode
from headrace.transport.base import ClientTransport, ReceivedMessage, Slots

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

    def __init__(self, pushes: Slots, links: LogLinks, connect: Callable[[str], ClientTransport]) -> None:
        self.restore: Callable[[memoryview], object] = bytes
        self._links = links
        self._pushes = pushes
        self._connect = connect
        self._link: ClientTransport | None = None
        self._places: dict[int, Sequence[Tensor]] = {}
        self._held: tuple[int, int] | None = None

    @property
    def follows(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    def open(self, epoch: int, process: int, address: str) -> None:
        """Calls the primary.

        Raises:
            ConnectionError: it is not there.
        """
        self.close()
        self._link = self._connect(address)
        self._link.send(encode(Message(Kind.FOLLOW, numbers=(epoch, process))))

    def receive(self, timeout_s: float, machine: Replication) -> list[LogEntry]:
        """Returns pieces of the log; nothing that was returned before may still wait.

        Raises:
            ConnectionError: the primary is gone.
            ValueError: it says what it must not.
        """
        self._say()
        pieces: list[LogEntry] = []
        while self._link is not None and len(pieces) < _MOST:
            received = self._link.receive(0.0 if pieces else timeout_s)
            if received is None:
                break
            head, message = parse_piece(received[0])
            if head.kind == Kind.MEMORY:
                place = torch.frombuffer(received[1], dtype=torch.uint8)
                self._places[head.numbers[0]] = self._pushes.cut(place)
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
        if self._link is not None:
            self._link.close()
        self._link, self._held = None, None
        self._places.clear()

    def _say(self) -> None:
        if self._held is not None and self._link is not None:
            self._link.send(encode(Message(Kind.HELD, numbers=self._held)))
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
