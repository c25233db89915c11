"""A server: holds shards, applies what is pushed to them, answers pulls.

It is the only one who writes to the parameters:

    port ──► who says what? ──┬► requests ──► answer ──► port         pushes and pulls
                              └► administration ──► done ──► port     the rest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from headrace.errors import Replaced
from headrace.parameter_server.core.events import Close, Join, Leave, RoundMembers, Settle
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.coordinator import Coordinator, Grace, Member, Membership
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.requests import Requests, StepFailed
from headrace.parameter_server.server.snapshots import ServerState, pack, unpack
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.parameter_server.wire.messages import Kind, Message, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import ReceivedMessage, ServerTransport

_WAIT_S = 0.1

_PUSHES = (Kind.PUSH, Kind.PULL, Kind.PUSH_PULL)
_LEASED = (Kind.COMMIT, Kind.HALT, Kind.ADVANCE)


class Server:
    """Its parameters are zeros until a worker has loaded others.

    Args:
    port: its end of the links.
    form: of its shards.
    applier: moves them.
    machines: one a shard.
    coordinates: leases of the run's data, the run's first round and first fence, and the rounds of a lease until then,
        on the one server that gives them out; None elsewhere.
    grace_s: how long a worker whose link has ended may take to come over another, before it is taken for lost.
    pairing: with its backup, or of that with its primary; then `port` is the pairing's, and `grace_s` is.
    measures: whether workers are told how far what they push is from the mean of its round.

    Attributes:
        tally: what has been done so far.
        pairing: see there.
    """

    def __init__(
        self,
        transport: ServerTransport,
        layout: ShardLayout,
        optimizer: ShardOptimizer,
        machines: Sequence[Shard],
        coordinates: tuple[LeaseTable, int, int, int] | None = None,
        grace_s: float = 2.0,
        replicated: ReplicatedTransport | None = None,
        measures: bool = False,
    ) -> None:
        self.counters = ServerCounters(layout)
        self.replicated = replicated
        self._transport = transport
        self._layout = layout
        self._optimizer = optimizer
        self._first = machines[0]
        self._requests = Requests(transport, layout, optimizer, machines, self.counters, measures)
        self._coordinator = Coordinator(*coordinates, transport.send) if coordinates else None
        self._members = Membership()
        # With a backup, what is told again later must be part of the log.
        self._grace = None if replicated else Grace(grace_s)
        self._settled = -1
        self._begun = False
        self._ended = False
        if replicated:
            replicated.attach(self.share, self.restore)

    @property
    def address(self) -> str:
        """Where clients find it."""
        return self._transport.address

    @property
    def moved_bytes(self) -> int:
        """Payload that was pushed to it and pulled from it."""
        return self.counters.moved_bytes

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters, and of the optimizer's state."""
        return self._optimizer.memory()

    def snapshot(self) -> memoryview:
        """Returns all that it is, for `restore`."""
        return self._pack(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)).numpy().data

    def share(self) -> SharedSegment:
        """Returns all that it is, in memory that another process of this host can be given."""
        made: list[SharedSegment] = []

        def allocate(nbytes: int) -> Tensor:
            made.append(SharedSegment.create(nbytes, "snapshot"))
            return made[0].tensor()

        self._pack(allocate)
        return made[0]

    def restore(self, snapshot: memoryview, clocks: Sequence[int] | None = None) -> None:
        """Becomes what another server was.

        Args:
            snapshot: of it.
            clocks: rounds that each worker has done, as a `SnapshotSet` has them, where a run is resumed: then it is
                without its clients.

        Raises:
            ValueError: it is none, or is of another model or strategy; what this server is then, is not said.
        """
        state, tensors = unpack(snapshot)
        difference = self._layout.difference(state.form.encode())
        if difference:
            raise ValueError(difference.replace("the worker", "the snapshot"))
        if clocks is not None:
            state = state.detached(clocks)
        try:
            members = self._members.load(state.members)
            self._requests.load(state.requests, state.shards, tensors)
            self._optimizer.load_all(state.applier, tensors)
            lost = () if clocks is not None else (name for name in tensors if name.startswith("residual/"))
            self._layout.residuals = {name: tensors[name] for name in lost}
            self._settled, self._begun, self._ended = state.settled, state.begun, state.ended
            if self._coordinator is not None and state.coordinator is not None:
                self._coordinator.load(state.coordinator, members)
        except (LookupError, TypeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"no snapshot of a server: {error!r}") from error

    def _pack(self, allocate: Callable[[int], Tensor]) -> Tensor:
        requests, shards, tensors = self._requests.state()
        optimizer, its_tensors = self._optimizer.all_state()
        coordinator = self._coordinator.state() if self._coordinator else None
        layout, members = self._layout.describe().decode(), self._members.state()
        state = ServerState(
            layout, self._settled, self._begun, self._ended, members, requests, shards, optimizer, coordinator
        )
        return pack(state, tensors | its_tensors | self._layout.residuals, allocate)

    def close(self) -> None:
        """Ends all links."""
        self._transport.close()

    def serve(self, check: Callable[[], None]) -> None:
        """Serves until a worker says that the run has ended; `check` is called about ten times a second."""
        while not self._ended:
            self.turn(_WAIT_S)
            check()

    def turn(self, timeout_s: float) -> None:
        """Deals with all mail that is there; waits for some, but not longer than `timeout_s`."""
        mail = self._transport.receive(timeout_s)
        if self._grace is not None:
            mail += self._grace.over(mail)
        began = perf_counter()
        self.counters.queued(len(mail))
        try:
            self._deal_with(mail)
        except StepFailed as failed:
            raise failed.error from None
        self.counters.busy_s += perf_counter() - began

    def _deal_with(self, mail: Sequence[ReceivedMessage]) -> None:
        for each in mail:
            try:
                self._deal(each)
            except Replaced as error:
                self._refuse(each.peer, error)
            except ValueError as error:
                # Whoever cannot speak properly harms itself alone.
                self._refuse(each.peer, error)

    def _refuse(self, peer: int, error: Replaced | ValueError) -> None:
        """Ends a link, and says why."""
        message = Message(Kind.ERROR)
        if isinstance(error, Replaced):
            message = Message(Kind.ERROR, flag=1, numbers=(error.rank, error.incarnation))
        self._transport.send(peer, encode(message), blob=str(error).encode())
        self._forget(peer)
        self._transport.drop(peer)

    def _deal(self, mail: ReceivedMessage) -> None:
        if not mail.message:
            self._end(mail.peer)
            return
        message = decode(mail.message)
        if message.kind == Kind.JOIN:
            self._join(mail.peer, message, mail.blob)
            return
        member = self._members.at(mail.peer)
        if member is None:
            raise ValueError(f"{message.kind.name} from a link that has not joined")
        if message.kind == Kind.ALIVE:
            self._say_open(member, message)
        elif message.number > member.heard:
            # What has come before is over. Whoever misses its answer asks again, over another link.
            member.heard = message.number
            self._deal_once(member, mail, message)

    def _deal_once(self, member: Member, mail: ReceivedMessage, message: Message) -> None:
        if message.kind == Kind.PULL and member.observes:
            self._requests.answer_observer(member, message)
        elif message.kind in _PUSHES:
            self._requests.take(member, message)
        elif message.kind == Kind.ASK:
            self._leasing().ask(member, message)
        else:
            self._administer(member, mail, message)

    def _leasing(self) -> Coordinator:
        if self._coordinator is None:
            raise ValueError("this server gives out no data")
        return self._coordinator

    def _join(self, peer: int, message: Message, blob: memoryview) -> None:
        difference = self._layout.difference(bytes(blob))
        if difference:
            raise ValueError(difference)
        if len(message.numbers) != 3:
            raise ValueError("a worker joins with its number, its incarnation and its session's")
        if self._members.at(peer) is None:
            member, before = self._members.join(peer, *message.numbers, bool(message.flag))
            for each in self._members.superseded(member):
                if each.incarnation < member.incarnation:
                    self._refuse(each.peer, Replaced(member.worker, member.incarnation))
                else:
                    self._forget(each.peer)
                    self._transport.drop(each.peer)
            if before >= 0:
                self._transport.drop(before)
            if not member.observes:
                self._withdraw(member)
            self._requests.show_all()
        self._transport.send(peer, encode(Message(Kind.DONE)))

    def _withdraw(self, member: Member) -> None:
        """Makes a worker a member; what it has asked and is not answered is taken back: it will come again."""
        self._requests.drop(member.worker)
        self._requests.broadcast(Join(member.worker, member.incarnation))

    def _end(self, peer: int) -> None:
        """Is told of the end of a link: once when it has ended, and once more when its worker's grace has."""
        member = self._members.at(peer)
        if member is None:
            return
        if member.away or member.observes:
            self._forget(peer)
        else:
            member.away = True
            self._withdraw(member)

    def _forget(self, peer: int, for_good: bool = False) -> None:
        """Ends the membership of whoever was at the other end of a link."""
        member = self._members.leave(peer, for_good)
        if member is None or member.observes:
            return
        self._requests.drop(member.worker)
        self._requests.broadcast(Leave(member.worker))
        if self._coordinator is not None:
            self._coordinator.lost(member.worker)

    def _has_answered(self, member: Member) -> bool:
        """Whether a worker that has asked for data here has been told where to go on."""
        return self._coordinator is not None and not self._coordinator.open(member)

    def _say_open(self, member: Member, message: Message) -> None:
        """Says what is still to be answered; whatever else a client waits for was lost on its way."""
        numbers = self._requests.numbers(member.peer)
        if self._coordinator is not None:
            numbers.update(self._coordinator.open(member))
        self._transport.send(
            member.peer, encode(Message(Kind.OPEN, numbers=tuple(sorted(numbers)), number=message.number))
        )

    def _administer(self, member: Member, mail: ReceivedMessage, message: Message) -> None:
        """Does what is asked for between rounds, when nobody pushes; what comes again is answered alone."""
        blob = b""
        if message.kind == Kind.STATE:
            blob = self._optimizer.state(message.first if message.flag else None)
        elif message.number != member.done:
            self._do(member, mail, message)
            member.done = message.number
        if message.kind == Kind.ROUND_MEMBERS and not message.numbers:
            last = self._first.last
            blob = encode(Message(Kind.ROUND_MEMBERS, numbers=last.numbers if last else ()))
        if message.kind == Kind.BEGIN and self._begun:
            blob = b"begun"
        if message.kind == Kind.REST and self._has_answered(member):
            blob = b"answered"
        self._transport.send(mail.peer, encode(Message(Kind.DONE, number=message.number)), blob=blob)

    def _settle(self, done: int) -> None:
        """Is told how many rounds are done, by all who have met: by some of them when new pushes have come since."""
        if done > self._settled:
            self._settled = done
            self._optimizer.settle(done)
            self._requests.broadcast(Settle())

    def _do(self, member: Member, mail: ReceivedMessage, message: Message) -> None:
        if message.kind in _LEASED:
            self._leasing().handle(member.worker, message)
        elif message.kind == Kind.LOAD:
            if message.flag:
                self._requests.replace(message.first, bytes(mail.blob))
            else:
                self._optimizer.load(bytes(mail.blob))
        elif message.kind == Kind.AVERAGE:
            self._requests.show_average(bool(message.flag))
        elif message.kind == Kind.SETTLE:
            self._settle(message.lease)
        elif message.kind == Kind.BEGIN:
            self._begun |= message.flag == 1
        elif message.kind == Kind.REST:
            # Whoever waits for data holds up nobody who has some; whose data is on its way does not wait.
            if not message.flag:
                self._requests.broadcast(Join(member.worker, member.incarnation))
            elif not self._has_answered(member):
                self._requests.broadcast(Leave(member.worker))
        elif message.kind == Kind.ROUND_MEMBERS:
            if message.numbers:
                self._requests.broadcast(RoundMembers.of(message.numbers))
        elif message.kind == Kind.CLOSE:
            self._requests.broadcast(Close(member.worker))
        elif message.kind == Kind.LEAVE:
            # One of a worker's clients says it for all of them, or for itself.
            for each in [member] if message.flag else self._members.clients(member.worker):
                self._forget(each.peer, for_good=True)
        elif message.kind == Kind.END:
            self._ended = True
        else:
            raise ValueError(f"{message.kind.name} is nothing that a worker asks")
