"""The part of a server that gives out data: the first server has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from headrace.ps.leases import Advance, Answer, Ask, Commit, Grant, Halt, Leases, Lost, Return
from headrace.ps.membership import Member
from headrace.ps.messages import Kind, Message, encode

__all__ = ["Coordinator"]


@dataclass
class _Asked:
    """A worker's last question for data.

    Attributes:
        member: who has asked, for that worker.
        number: of the question.
        answer: what it was told; empty as long as it waits.
    """

    member: Member
    number: int
    answer: bytes = b""


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
        self._asked: dict[int, _Asked] = {}
        self._incarnations: dict[int, int] = {}
        self._begun = False
        self._early: dict[int, tuple[Member, int]] = {}

    def handle(self, worker: int, message: Message) -> None:
        """Deals with what a worker says about data."""
        if message.kind == Kind.HALT:
            self._tell(self._leases.handle(Halt()))
        elif message.kind == Kind.ADVANCE:
            ahead, alone, done, until = _four(message.numbers)
            if message.lease == self._leases.until:
                self._stretch = (done, message.lease, until)
            self._tell(self._leases.handle(Advance(message.lease, ahead, alone)))
        elif message.lease >= 0:
            self._tell(self._leases.handle((Return if message.flag else Commit)(message.lease, worker)))

    def ask(self, member: Member, message: Message) -> None:
        """Deals with a question for data, which comes with the news of what became of the lease before."""
        asked = self._asked.get(member.worker)
        if asked is not None and asked.member is member and asked.number == message.number:
            # It comes again over another link.
            if asked.answer:
                self._send(member.peer, asked.answer)
            return
        self.handle(member.worker, message)
        self._asked[member.worker] = _Asked(member, message.number)
        self._incarnations[member.worker] = member.incarnation
        self._tell(self._leases.handle(Ask(member.worker)))

    def begin(self, member: Member, message: Message) -> None:
        """Somebody asks whether there are parameters to begin with (2), says that there are (1), or waits for them."""
        self._begun = self._begun or message.flag == 1
        self._early[member.session] = (member, message.number)
        if message.flag and not self._begun:
            self._send_begun(member.session)
        for session in list(self._early) if self._begun else ():
            self._send_begun(session)

    def open(self, member: Member) -> list[int]:
        """Returns the numbers of the questions that a client waits on."""
        asked, early = self._asked.get(member.worker), self._early.get(member.session)
        numbers = [asked.number] if asked is not None and asked.member is member and not asked.answer else []
        return [*numbers, early[1]] if early is not None else numbers

    def lost(self, worker: int) -> None:
        """Is told that a worker is gone."""
        self._asked.pop(worker, None)
        self._tell(self._leases.handle(Lost(worker)))

    def _send_begun(self, session: int) -> None:
        member, number = self._early.pop(session)
        done = encode(Message(Kind.DONE, number=number))
        self._send(member.peer, done, blob=b"begun" if self._begun else b"")

    def _tell(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            asked = self._asked.get(answer.worker)
            if asked is None:
                continue
            if isinstance(answer, Grant):
                portion = (*self._stretch, answer.round, answer.part)
                message = Message(Kind.GRANT, lease=answer.lease, numbers=portion, number=asked.number)
            else:
                # Of a worker that was lost before anybody said so here, there may be another one by now.
                members = chain.from_iterable((each, self._incarnations.get(each, 0)) for each in answer.members)
                meeting = (*self._stretch, answer.round, answer.meeting, *members)
                message = Message(Kind.FENCE, numbers=meeting, number=asked.number)
            asked.answer = encode(message)
            self._send(asked.member.peer, asked.answer)


def _four(numbers: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(numbers) != 4:
        raise ValueError(f"whoever lets all go on says where to by 4 numbers, not {len(numbers)}")
    return numbers[0], numbers[1], numbers[2], numbers[3]
