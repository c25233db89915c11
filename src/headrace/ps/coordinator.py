"""The part of a server that gives out data: the first server has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.ps.leases import Advance, Answer, Ask, Commit, Grant, Halt, Leases, Lost, Return
from headrace.ps.messages import Kind, Message, encode

__all__ = ["Coordinator"]


class Coordinator:
    """Args:
    leases: of the run's data.
    send: gives a link a message.
    """

    def __init__(self, leases: Leases, send: Callable[[int, bytes], None]) -> None:
        self._leases = leases
        self._send = send
        self._askers: dict[int, int] = {}

    def handle(self, worker: int, peer: int, message: Message) -> None:
        """Deals with what a worker says or asks about data, on one of its links."""
        answers: list[Answer] = []
        if message.kind == Kind.HALT:
            answers = self._leases.handle(Halt())
        elif message.kind == Kind.ADVANCE:
            answers = self._leases.handle(Advance(message.lease, *message.numbers[:1]))
        else:
            if message.lease >= 0:
                # A question comes with the news of what became of the lease before.
                answers = self._leases.handle((Return if message.flag else Commit)(message.lease, worker))
            if message.kind == Kind.ASK:
                self._askers[worker] = peer
                answers += self._leases.handle(Ask(worker))
        self._tell(answers)

    def lost(self, worker: int) -> None:
        """Is told that a worker is gone."""
        self._askers.pop(worker, None)
        self._tell(self._leases.handle(Lost(worker)))

    def _tell(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            peer = self._askers.get(answer.worker)
            if peer is None:
                continue
            if isinstance(answer, Grant):
                message = Message(Kind.GRANT, lease=answer.lease, numbers=(answer.round, answer.part))
            else:
                message = Message(Kind.FENCE, numbers=(answer.round,))
            self._send(peer, encode(message))
