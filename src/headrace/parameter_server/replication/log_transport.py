"""The transport that a replicated server sees: the log is what it receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from headrace.parameter_server.replication.log import LogEntry
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport, Slots


class Log(Protocol):
    """What is received, in the log's order, by the log's numbers of connections."""

    def receive(self, timeout_s: float) -> LogEntry | None: ...

    def outside(self, peer: int) -> int | None:
        """Returns the number of a connection in the process's own transport; None if it has ended here."""
        ...

    def drop(self, peer: int) -> None: ...

    def close(self) -> None: ...


class LogTransport(ServerTransport):
    """The transport that the server uses: it receives log entries, and sends through the process's own transport."""

    def __init__(self, transport: ServerTransport, log: Log, replies: Slots | None) -> None:
        self.trusts_clients = transport.trusts_clients
        self.address = transport.address
        self.moved_bytes = 0
        self._transport = transport
        self._log = log
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
        outside = self._log.outside(peer)
        if outside is not None:
            return self._transport.reply_slot(outside, slot)
        # It is not sent, but its encoding error must be the same on both servers.
        assert self._replies is not None
        return torch.empty(self._replies.lengths[slot], dtype=torch.uint8)

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        outside = self._log.outside(peer)
        if outside is not None:
            self._transport.send(outside, message, slots, blob, limited)

    def drop(self, peer: int) -> None:
        self._log.drop(peer)

    def close(self) -> None:
        self._log.close()
        self._transport.close()
