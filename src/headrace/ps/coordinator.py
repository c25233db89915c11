"""The part of a server that gives out data: the first server has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from headrace.ps.leases import Advance, Answer, Ask, Commit, Grant, Halt, Leases, Lost, Return
from headrace.ps.messages import Kind, Message, encode

__all__ = ["Coordinator"]


class Coordinator:
    """Args:
    leases: of the run's data.
    send: gives a link a message.
    until: the first fence, in rounds.
    """

    def __init__(self, leases: Leases, send: Callable[..., None], until: int) -> None:
        self._leases = leases
        self._send = send
        # Round and lease number at the fence before, round at the next: with it whoever comes late knows where it is.
        self._stretch = (leases.first, leases.first, until)
        self._askers: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}
        self._begun = False
        self._early: list[int] = []

    def handle(self, worker: int, peer: int, message: Message) -> None:
        """Deals with what a worker says or asks about data, on one of its links."""
        answers: list[Answer] = []
        if message.kind == Kind.HALT:
            answers = self._leases.handle(Halt())
        elif message.kind == Kind.ADVANCE:
            ahead, alone, done, until = _four(message.numbers)
            if message.lease == self._leases.until:
                self._stretch = (done, message.lease, until)
            answers = self._leases.handle(Advance(message.lease, ahead, alone))
        elif message.kind == Kind.BEGIN:
            self._begin(peer, message.flag)
        else:
            if message.lease >= 0:
                # A question comes with the news of what became of the lease before.
                answers = self._leases.handle((Return if message.flag else Commit)(message.lease, worker))
            if message.kind == Kind.ASK:
                self._askers[worker] = peer
                self._incarnations[worker] = message.numbers[0] if message.numbers else 0
                answers += self._leases.handle(Ask(worker))
        self._tell(answers)

    def lost(self, worker: int) -> None:
        """Is told that a worker is gone."""
        self._askers.pop(worker, None)
        self._tell(self._leases.handle(Lost(worker)))

    def _begin(self, peer: int, flag: int) -> None:
        """Somebody asks whether there are parameters to begin with (2), says that there are (1), or waits for them."""
        if flag == 1:
            self._begun = True
        if flag or self._begun:
            self._done(peer)
        else:
            self._early.append(peer)
        if self._begun:
            for waiting in self._early:
                self._done(waiting)
            self._early.clear()

    def _done(self, peer: int) -> None:
        self._send(peer, encode(Message(Kind.DONE)), blob=b"begun" if self._begun else b"")

    def _tell(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            peer = self._askers.get(answer.worker)
            if peer is None:
                continue
            if isinstance(answer, Grant):
                numbers = (*self._stretch, answer.round, answer.part)
                message = Message(Kind.GRANT, lease=answer.lease, numbers=numbers)
            else:
                # Of a worker that was lost before anybody said so here, there may be another one by now.
                members = chain.from_iterable((each, self._incarnations.get(each, 0)) for each in answer.members)
                message = Message(Kind.FENCE, numbers=(*self._stretch, answer.round, answer.meeting, *members))
            self._send(peer, encode(message))


def _four(numbers: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(numbers) != 4:
        raise ValueError(f"whoever lets all go on says where to by 4 numbers, not {len(numbers)}")
    return numbers[0], numbers[1], numbers[2], numbers[3]
