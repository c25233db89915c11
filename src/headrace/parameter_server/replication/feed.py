"""A primary's end of the connection to its backup: who calls, the state that it is filled with, the log's entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from headrace.machine.background import BackgroundThread
from headrace.parameter_server.replication.log import LogConnections, LogEntry, LogPayload, encode_entry, pack
from headrace.parameter_server.replication.machine import Called, Held, View
from headrace.parameter_server.wire import Kind, Message, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport

_SILENT_S = 120.0
"""For so long after the last word of a backup clients are told to wait for it: 15 GB fill it at 1 Gbit/s."""


class BackupFeed:
    """Sends a backup what it needs, over the server's own transport; `lengths` are the bytes of all push slots.

    Attributes:
        snapshot: copies the server's state.
        callers: epoch and process of each connection that has said to be a backup.
    """

    def __init__(self, transport: ServerTransport, lengths: Sequence[int]) -> None:
        self.snapshot: Callable[[], SharedSegment] | None = None
        self.callers: dict[int, tuple[int, int]] = {}
        self._transport = transport
        self._lengths = lengths
        self._backup = -1
        # Connections of the log whose memory the backup has mapped.
        self._shared: set[int] = set()
        self._copying = BackgroundThread("fill")
        self._copied: SharedSegment | None = None
        self._heard_at = 0.0

    @property
    def silent(self) -> bool:
        """Whether no backup has said anything for so long that clients should not wait for it."""
        return monotonic() - self._heard_at >= _SILENT_S

    def takes(self, mail: ReceivedMessage) -> bool:
        """Returns whether a message is a backup's."""
        return mail.peer in self.callers or mail.message[1:2] == bytes([Kind.FOLLOW])

    def parse(self, mail: ReceivedMessage) -> Called | Held | None:
        """Returns what a backup says; None if it is not the one that is filled. Raises ValueError if it is wrong."""
        self._heard_at = monotonic()
        if not mail.message:
            raise ValueError("the link has ended")
        head = decode(mail.message)
        epoch, number = head.numbers
        if head.kind != Kind.FOLLOW:
            return Held(epoch, number) if mail.peer == self._backup else None
        if mail.peer in self.callers:
            raise ValueError("a backup calls once")
        self.callers[mail.peer] = (epoch, number)
        return Called(epoch, number)

    def fill(self, view: View, number: int, connections: LogConnections) -> bool:
        """Sends the state after the log up to `number`, when a thread has copied it; returns whether it is sent."""
        if not self._copying.done():
            if not self._copying.busy:
                self._copying.start(self._copy)
            return False
        assert self._copied is not None
        snapshot, self._copied = self._copied, None
        wanted = (view.epoch, view.backup)
        self._backup = next((peer for peer, caller in self.callers.items() if caller == wanted), -1)
        self._shared.clear()
        head = Message(Kind.FILL, lease=number, numbers=(view.epoch, *connections.numbers()))
        self._send(encode(head), snapshot)
        snapshot.close()
        return True

    def forward(self, epoch: int, number: int, entry: LogEntry) -> None:
        """Sends a log entry to the backup, which reads gradients in the client's memory if that can be shared."""
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

    def forget(self, peer: int, unlogged: bool = False) -> None:
        """Forgets the memory of a connection of the log; the backup is told of an `unlogged` end."""
        if peer in self._shared:
            self._shared.remove(peer)
            if unlogged:
                self._send(encode(Message(Kind.MEMORY, numbers=(peer,))), b"")

    def drop_copy(self) -> None:
        """Waits for the end of a copy that is not needed any more: what it copies must not change."""
        self._copying.wait()
        if self._copied is not None:
            self._copied.close()
            self._copied = None

    def close(self) -> None:
        """Ends the thread that copies."""
        self._copying.close()
        self.drop_copy()

    def _copy(self) -> None:
        assert self.snapshot is not None, "ReplicatedTransport.attach() comes first"
        self._copied = self.snapshot()

    def _send(self, message: bytes, blob: Blob) -> None:
        self._transport.send(self._backup, message, blob=blob, limited=False)
