"""The part of a server that gives out data: the first server has one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic

from headrace.errors import Replaced
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
from headrace.parameter_server.wire.messages import Kind, Message, encode
from headrace.transport.base import ReceivedMessage


@dataclass
class Member:
    """One of a worker's clients.

    Attributes:
        worker, incarnation: whose.
        session: the client's own number, drawn by chance.
        observes: whether it only looks, and is no member of the shards.
        peer: its link, or the last one that it had.
        away: whether that link has ended, so that it may come over another.
        heard: number of the last message that came over this link. What comes twice has one that is not greater.
        done: number of the last thing that was done for it and must not be done twice.
    """

    worker: int
    incarnation: int
    session: int
    observes: bool
    peer: int
    away: bool = False
    heard: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True)
class MembershipState:
    """All that is known of clients, as JSON takes it.

    Attributes:
        known: all that may come again.
        linked: those that have links.
        newest: worker and its newest incarnation.
    """

    known: tuple[Member, ...]
    linked: tuple[Member, ...]
    newest: tuple[tuple[int, ...], ...]


class Membership:
    """What is known of a client is kept when its link ends: if it comes again, it goes on where it was."""

    def __init__(self) -> None:
        self._at: dict[int, Member] = {}
        self._known: dict[int, Member] = {}
        self._newest: dict[int, int] = {}

    def at(self, peer: int) -> Member | None:
        """Returns who is at the other end of a link."""
        return self._at.get(peer)

    def join(self, peer: int, worker: int, incarnation: int, session: int, observes: bool) -> tuple[Member, int]:
        """Notes that a client speaks over this link from now on; returns it, and the link that it had before, or -1.

        Raises:
            Replaced: the worker has come in a newer incarnation.
            ValueError: it is not who it was.
        """
        newest = self._newest.setdefault(worker, incarnation)
        if incarnation < newest:
            raise Replaced(worker, newest)
        if incarnation > newest:
            self._newest[worker] = incarnation
            self._known = {number: each for number, each in self._known.items() if each.worker != worker}
        member = self._known.setdefault(session, Member(worker, incarnation, session, observes, peer))
        if (member.worker, member.incarnation, member.observes) != (worker, incarnation, observes):
            raise ValueError(f"worker {worker} comes as one that was worker {member.worker}")
        before = member.peer if self._at.pop(member.peer, None) else -1
        member.peer, member.away, member.heard = peer, False, 0
        self._at[peer] = member
        return member, before

    def superseded(self, member: Member) -> list[Member]:
        """Returns who must go because this one has come: earlier incarnations, and who has pushed in its place."""
        return [
            each
            for each in self._at.values()
            if each.worker == member.worker
            and (each.incarnation < member.incarnation or (each is not member and not each.observes | member.observes))
        ]

    def clients(self, worker: int) -> list[Member]:
        """Returns all clients of a worker that have links."""
        return [each for each in self._at.values() if each.worker == worker]

    def state(self) -> MembershipState:
        """Returns all that is known."""
        return MembershipState(tuple(self._known.values()), tuple(self._at.values()), tuple(self._newest.items()))

    def load(self, state: MembershipState) -> dict[int, Member]:
        """Knows what another one has known; returns the members by session.

        Raises:
            ValueError: nobody ever has known that.
        """
        self._newest = {worker: incarnation for worker, incarnation in state.newest}
        self._known = {member.session: member for member in state.known}
        every = {member.session: member for member in state.linked} | self._known
        self._at = {member.peer: every[member.session] for member in state.linked}
        return every

    def leave(self, peer: int, for_good: bool = False) -> Member | None:
        """Notes that nobody speaks over this link any more, and perhaps never comes again; returns who did."""
        member = self._at.pop(peer, None)
        if member is not None and for_good:
            self._known.pop(member.session, None)
        return member


class Grace:
    """Tells the end of every link a second time, later, so that whoever has come again by then was never gone.

    So what a server does depends on its mail alone, and not on a clock.

    Args:
        seconds: how much later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends: deque[tuple[float, ReceivedMessage]] = deque()

    def over(self, mail: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Takes note of the ends in some mail; returns those that are to be told again now."""
        ends = [each for each in mail if not each.message]
        if not ends and not self._ends:
            return ends
        now = monotonic()
        self._ends.extend((now + self._seconds, each) for each in ends)
        over = []
        while self._ends and self._ends[0][0] <= now:
            over.append(self._ends.popleft()[1])
        return over


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
                message = Message(Kind.SYNC_POINT, numbers=fence, number=asked.number)
            asked.answer = encode(message)
            self._send(asked.member.peer, asked.answer)
