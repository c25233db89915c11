"""A server's transport where its clients are on several hosts: shared memory for those of its own, TCP for the others.

worker of this host   ── Unix socket ──► LocalServerTransport  ─┐  one region of parameters,
worker of another     ── CURVE ────────► RemoteServerTransport ─┘  which both send from
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import monotonic

from torch import Tensor

from headrace.shared_memory.futex import Spin, look
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport
from headrace.transport.local_client import SPIN_S
from headrace.transport.local_server import LocalServerTransport
from headrace.transport.remote_server import RemoteServerTransport


class MixedServerTransport(ServerTransport):
    """Both transports as one; a client of this host uses the first word of `address`, any other one the second.

    `remote` has the parameters of `local`. Connection n of `local` is 2 n here, that of `remote` 2 n + 1.
    """

    def __init__(self, local: LocalServerTransport, remote: RemoteServerTransport) -> None:
        self.address = f"{local.address} {remote.address}"
        self.moved_bytes = 0
        self._both = (local, remote)
        self._local, self._remote = self._both
        self._poll = select.epoll()
        for transport in self._both:
            self._poll.register(transport.descriptor, select.EPOLLIN)
        self._spin = Spin(SPIN_S)

    def parameters(self, slot: int) -> Tensor:
        return self._local.parameters(slot)

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return self._local.writing(slots)

    def set_version(self, slot: int, version: int) -> None:
        for transport in self._both:
            transport.set_version(slot, version)

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        deadline = monotonic() + timeout_s
        while True:
            # Without the memory of a client of this host: a backup is on another one.
            received = [
                replace(mail, peer=2 * mail.peer + place, memory=None)
                for place, transport in enumerate(self._both)
                for mail in transport.receive(0.0)
            ]
            self.moved_bytes = self._local.moved_bytes + self._remote.moved_bytes
            left = min(deadline - monotonic(), self._remote.rest_s)
            if received or deadline <= monotonic():
                return received
            look(self._poll.poll, self._spin, max(0.0, left))

    def pushed(self, peer: int, slot: int) -> Tensor:
        return self._both[peer % 2].pushed(peer // 2, slot)

    def release(self, peer: int, slots: Sequence[int]) -> None:
        self._both[peer % 2].release(peer // 2, slots)

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        return self._both[peer % 2].reply_slot(peer // 2, slot)

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        self._both[peer % 2].send(peer // 2, message, slots, blob, limited)

    def drop(self, peer: int) -> None:
        self._both[peer % 2].drop(peer // 2)

    def close(self) -> None:
        self._poll.close()
        for transport in (self._remote, self._local):
            transport.close()
