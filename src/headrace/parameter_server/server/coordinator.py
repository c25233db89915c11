"""The clients of a server, and the coordinator, which leases the data: only the first server has one."""

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
from headrace.parameter_server.core.portions import PortionTable, PortionTableState
from headrace.parameter_server.wire import Kind, Message, encode, floats_in, numbers_of
from headrace.transport.base import ReceivedMessage

_MOST_WORKERS, _MOST_CLIENTS = 1 << 14, 1 << 14
"""That are remembered: a process that has the run's secret can join under any number."""


@dataclass
class Member:
    """One client of a worker.

    Attributes:
        observes: whether it only pulls, and is no member of the shards.
        away: whether its connection has ended, and it may come back over another.
        heard: number of the last message on this connection; a repeated message has no greater one.
        done: number of the last request that was carried out and must not be carried out twice.
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
    """All clients as JSON values: those that may reconnect, those connected, and each worker's newest incarnation."""

    known: tuple[Member, ...]
    linked: tuple[Member, ...]
    newest: tuple[tuple[int, ...], ...]


class Membership:
    """Remembers a client when its connection ends, so that it continues where it was if it comes back."""

    def __init__(self) -> None:
        self._at: dict[int, Member] = {}
        self._known: dict[int, Member] = {}
        self._newest: dict[int, int] = {}

    def at(self, peer: int) -> Member | None:
        """Returns the client of a connection."""
        return self._at.get(peer)

    def join(self, peer: int, worker: int, incarnation: int, session: int, observes: bool) -> tuple[Member, int]:
        """Registers a client on a connection; returns it, and its connection before, or -1.

        Raises Replaced if the worker has a newer incarnation, and ValueError if the session belongs to another worker
        or there are too many workers.
        """
        if worker not in self._newest and len(self._newest) >= _MOST_WORKERS:
            raise ValueError(
                f"{len(self._newest):,} workers have joined, which is the most, and worker {worker} is another one"
            )
        newest = self._newest.setdefault(worker, incarnation)
        if incarnation < newest:
            raise Replaced(worker, newest)
        if incarnation > newest:
            self._newest[worker] = incarnation
            self._known = {number: member for number, member in self._known.items() if member.worker != worker}
        member = self._known.setdefault(session, Member(worker, incarnation, session, observes, peer))
        if (member.worker, member.incarnation, member.observes) != (worker, incarnation, observes):
            raise ValueError(f"worker {worker} uses the session of worker {member.worker}")
        before = member.peer if self._at.pop(member.peer, None) else -1
        member.peer, member.away, member.heard = peer, False, 0
        self._at[peer] = member
        if len(self._known) > _MOST_CLIENTS:
            # The one that ended first; all that are connected are known.
            del self._known[next(key for key, known in self._known.items() if self._at.get(known.peer) != known)]
        return member, before

    def superseded(self, member: Member) -> list[Member]:
        """Returns the clients that this one replaces: earlier incarnations, and other pushing clients of its worker."""
        others = [other for other in self.clients(member.worker) if other is not member]
        older = member.incarnation
        return [other for other in others if other.incarnation < older or not other.observes | member.observes]

    def lose(self, worker: int, incarnation: int) -> bool:
        """Refuses the worker's processes before this incarnation from now on; returns False if it is known already."""
        if incarnation <= self._newest.get(worker, 0):
            return False
        self._newest[worker] = incarnation
        self._known = {number: member for number, member in self._known.items() if member.worker != worker}
        return True

    def clients(self, worker: int) -> list[Member]:
        """Returns all connected clients of a worker."""
        return [member for member in self._at.values() if member.worker == worker]

    def state(self) -> MembershipState:
        """Returns the state."""
        return MembershipState(tuple(self._known.values()), tuple(self._at.values()), tuple(self._newest.items()))

    def load(self, state: MembershipState) -> dict[int, Member]:
        """Takes over a saved state; returns the members by session; raises ValueError if it is not consistent."""
        self._newest = {worker: incarnation for worker, incarnation in state.newest}
        self._known = {member.session: member for member in state.known}
        every = {member.session: member for member in state.linked} | self._known
        self._at = {member.peer: every[member.session] for member in state.linked}
        return every

    def leave(self, peer: int, for_good: bool = False) -> Member | None:
        """Removes a client from its connection, and forgets it if `for_good`; returns it."""
        member = self._at.pop(peer, None)
        if member is not None and for_good:
            self._known.pop(member.session, None)
        return member


class Grace:
    """Reports the end of every connection a second time, `seconds` later, when the client has not come back.

    So a server depends on its messages alone, and not on a clock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends: deque[tuple[float, ReceivedMessage]] = deque()

    def over(self, mail: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Records the ended connections among some messages; returns those whose grace has ended."""
        ends = [message for message in mail if not message.message]
        if not ends and not self._ends:
            return ends
        now = monotonic()
        self._ends.extend((now + self._seconds, message) for message in ends)
        over = []
        while self._ends and self._ends[0][0] <= now:
            over.append(self._ends.popleft()[1])
        return over


@dataclass(frozen=True, slots=True)
class AskedState:
    """A worker's last request for data, as JSON values; the answer in hexadecimal digits."""

    worker: int
    session: int
    number: int
    answer: str


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """The state of a coordinator, as JSON values; it has leases or portions."""

    stretch: tuple[int, ...]
    leases: LeaseTableState | None
    asked: tuple[AskedState, ...]
    portions: PortionTableState | None = None

    def detached(self) -> CoordinatorState:
        """Returns the state without workers."""
        leases = self.leases and self.leases.detached()
        portions = self.portions and self.portions.detached()
        return CoordinatorState(self.stretch, leases, (), portions)


@dataclass
class _Asked:
    """A worker's last request for data; the answer is empty while the worker waits."""

    member: Member
    number: int
    answer: bytes = b""


class Coordinator:
    """Gives the leases of a run to workers.

    `first` and `until` are the rounds at the run's start and at its first sync point, `span` the rounds of a lease
    until then. `send` sends a message to a connection.
    """

    def __init__(
        self, leases: LeaseTable | PortionTable, first: int, until: int, span: int, send: Callable[[int, bytes], None]
    ) -> None:
        self._leases = leases
        self._send = send
        # Round and lease number at the last sync point, round of the next, rounds of a lease: what a new worker needs.
        self._stretch = (first, first, until, span)
        self._asked: dict[int, _Asked] = {}

    def handle(self, worker: int, message: Message) -> None:
        """Handles a message about leases."""
        if message.kind == Kind.HALT:
            self._tell(self._leases.handle(Halt()))
        elif message.kind == Kind.ADVANCE:
            if len(message.numbers) != 5:
                raise ValueError(f"an advance has 5 numbers, not {len(message.numbers)}")
            fence, (ahead, alone, done, until, span) = message.lease, message.numbers
            if fence == self._leases.until:
                self._stretch = (done, fence, until, span)
            self._tell(self._leases.handle(Advance(fence, ahead, alone)))
        elif message.lease >= 0:
            commit = Commit(message.lease, worker, floats_in(message.numbers))
            self._tell(self._leases.handle(Return(message.lease, worker) if message.flag else commit))

    def ask(self, member: Member, message: Message) -> None:
        """Handles a request for data, which also says what became of the lease before."""
        asked = self._asked.get(member.worker)
        if asked is not None and asked.member is member and asked.number == message.number:
            # The request was repeated on another connection.
            if asked.answer:
                self._send(member.peer, asked.answer)
            return
        self.handle(member.worker, message)
        self._asked[member.worker] = _Asked(member, message.number)
        self._tell(self._leases.handle(Ask(member.worker)))

    def open(self, member: Member) -> list[int]:
        """Returns the number of the request that a client waits for, if any."""
        asked = self._asked.get(member.worker)
        return [asked.number] if asked is not None and asked.member is member and not asked.answer else []

    def lost(self, worker: int) -> None:
        """Releases the leases of a lost worker."""
        self._asked.pop(worker, None)
        self._tell(self._leases.handle(WorkerLost(worker)))

    def state(self) -> CoordinatorState:
        """Returns the state."""
        every = self._asked.items()
        asked = (AskedState(worker, one.member.session, one.number, one.answer.hex()) for worker, one in every)
        state = self._leases.state()
        if isinstance(state, PortionTableState):
            return CoordinatorState(self._stretch, None, tuple(asked), state)
        return CoordinatorState(self._stretch, state, tuple(asked))

    def load(self, state: CoordinatorState, members: Mapping[int, Member]) -> None:
        """Takes over a saved state, with the members by session; raises ValueError if the state is not consistent."""
        done, fence, until, span = state.stretch
        self._stretch = (done, fence, until, span)
        if isinstance(self._leases, LeaseTable) and state.leases is not None:
            self._leases.load(state.leases)
        elif isinstance(self._leases, PortionTable) and state.portions is not None:
            self._leases.load(state.portions)
        else:
            raise ValueError(f"the state is of no {type(self._leases).__name__}")
        self._asked = {
            one.worker: _Asked(members[one.session], one.number, bytes.fromhex(one.answer)) for one in state.asked
        }

    def _tell(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            asked = self._asked.get(answer.worker)
            if asked is None:
                continue
            if isinstance(answer, Grant):
                numbers = (*self._stretch, answer.round, answer.part, *numbers_of(answer.report))
                message = Message(Kind.GRANT, lease=answer.lease, numbers=numbers, number=asked.number)
            else:
                # A worker that was lost unnoticed may have been replaced by now.
                members = chain.from_iterable(
                    (rank, self._asked[rank].member.incarnation) for rank in answer.members if rank in self._asked
                )
                fence = (*self._stretch, answer.round, answer.meeting, *members)
                message = Message(Kind.SYNC_POINT, numbers=fence, number=asked.number)
            asked.answer = encode(message)
            self._send(asked.member.peer, asked.answer)
