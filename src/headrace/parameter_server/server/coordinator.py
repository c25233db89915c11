"""The part of a server that gives out data: the first server has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from headrace.parameter_server.core.leases import (
    Advance,
    Answer,
    Ask,
    Commit,
    Grant,
    Halt,
    LeaseTable,
    LeaseTableState,
    Return,
    WorkerLost,
)
from headrace.parameter_server.core.membership import Member
from headrace.parameter_server.wire.messages import Kind, Message, encode


@dataclass(frozen=True, slots=True)
class AskedState:
    """A worker's last question for data.

    Attributes:
        worker: whose.
        session: of the client that has asked.
        number: of the question.
        answer: in hexadecimal digits.
    """

    worker: int
    session: int
    number: int
    answer: str


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """All that a coordinator knows, as JSON takes it."""

    stretch: tuple[int, ...]
    leases: LeaseTableState
    asked: tuple[AskedState, ...]

    def detached(self) -> CoordinatorState:
        """Returns it without its workers."""
        return CoordinatorState(self.stretch, self.leases.detached(), ())


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
    first, until: rounds at the run's begin, and at its first fence.
    span: rounds of a lease until there.
    send: gives a link a message.
    """

    def __init__(
        self, leases: LeaseTable, first: int, until: int, span: int, send: Callable[[int, bytes], None]
    ) -> None:
        self._leases = leases
        self._send = send
        # Round and lease number at the fence before, round at the next, rounds of a lease: with them whoever comes late
        # knows where it is.
        self._stretch = (first, first, until, span)
        self._asked: dict[int, _Asked] = {}

    def handle(self, worker: int, message: Message) -> None:
        """Deals with what a worker says about data."""
        if message.kind == Kind.HALT:
            self._tell(self._leases.handle(Halt()))
        elif message.kind == Kind.ADVANCE:
            self._advance(message.lease, message.numbers)
        elif message.lease >= 0:
            self._tell(self._leases.handle((Return if message.flag else Commit)(message.lease, worker)))

    def _advance(self, fence: int, numbers: tuple[int, ...]) -> None:
        if len(numbers) != 5:
            raise ValueError(f"whoever lets all go on says where to by 5 numbers, not {len(numbers)}")
        ahead, alone, done, until, span = numbers
        if fence == self._leases.until:
            self._stretch = (done, fence, until, span)
        self._tell(self._leases.handle(Advance(fence, ahead, alone)))

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
        self._tell(self._leases.handle(Ask(member.worker)))

    def open(self, member: Member) -> list[int]:
        """Returns the number of the question that a client waits on, if it does."""
        asked = self._asked.get(member.worker)
        return [asked.number] if asked is not None and asked.member is member and not asked.answer else []

    def lost(self, worker: int) -> None:
        """Is told that a worker is gone."""
        self._asked.pop(worker, None)
        self._tell(self._leases.handle(WorkerLost(worker)))

    def state(self) -> CoordinatorState:
        """Returns all that it knows."""
        asked = (
            AskedState(worker, each.member.session, each.number, each.answer.hex())
            for worker, each in self._asked.items()
        )
        return CoordinatorState(self._stretch, self._leases.state(), tuple(asked))

    def load(self, state: CoordinatorState, members: Mapping[int, Member]) -> None:
        """Becomes what another one was.

        Args:
            state: its.
            members: by session.

        Raises:
            ValueError: nobody ever was so.
        """
        done, fence, until, span = state.stretch
        self._stretch = (done, fence, until, span)
        self._leases.load(state.leases)
        self._asked = {
            each.worker: _Asked(members[each.session], each.number, bytes.fromhex(each.answer)) for each in state.asked
        }

    def _tell(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            asked = self._asked.get(answer.worker)
            if asked is None:
                continue
            if isinstance(answer, Grant):
                numbers = (*self._stretch, answer.round, answer.part)
                message = Message(Kind.GRANT, lease=answer.lease, numbers=numbers, number=asked.number)
            else:
                # Of a worker that was lost before anybody said so here, there may be another one by now.
                members = chain.from_iterable(
                    (each, self._asked[each].member.incarnation) for each in answer.members if each in self._asked
                )
                fence = (*self._stretch, answer.round, answer.meeting, *members)
                message = Message(Kind.FENCE, numbers=fence, number=asked.number)
            asked.answer = encode(message)
            self._send(asked.member.peer, asked.answer)
