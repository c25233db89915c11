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
from headrace.parameter_server.core.events import Close, Join, Leave, Renew, RoundMembers, Settle
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.portions import PortionTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.lbfgs.store import VectorStore
from headrace.parameter_server.replication.log import OWN
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.coordinator import Coordinator, Grace, Member, Membership
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.server.requests import Requests
from headrace.parameter_server.server.snapshots import ServerState, pack, unpack
from headrace.parameter_server.server.updater import ShardUpdater, StepFailed
from headrace.parameter_server.sparse.requests import RowRequests
from headrace.parameter_server.wire import VALUES, Kind, Message, ShardLayout, decode, encode, layout_difference
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import ReceivedMessage, ServerTransport

_WAIT_S = 0.1

_PUSHES = (Kind.PUSH, Kind.PULL, Kind.PUSH_PULL, Kind.PUSH_ROWS)
_ROWS = (Kind.PULL_ROWS, Kind.ROWS, Kind.LOAD_ROWS, Kind.MOVE_ROWS)
_LEASED = (Kind.COMMIT, Kind.HALT, Kind.ADVANCE)


class Server:
    """Serves its shards' parameters, which are zeros until a worker has loaded others.

    Args:
        coordinates: leases of the run's data, the first round, the first sync point, and the rounds of a lease until
            then, on the server that leases the data; None elsewhere.
        grace_s: how long a worker whose connection has ended may take to reconnect, before it counts as lost.
        replicated: if there is a backup; then `transport` and the grace are its.
        measures: whether workers are told the distance of their push from the mean of its round.
    """

    def __init__(
        self,
        transport: ServerTransport,
        layout: ShardLayout,
        optimizer: ShardUpdater,
        machines: Sequence[Shard],
        coordinates: tuple[LeaseTable | PortionTable, int, int, int] | None = None,
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
        # After the shards' machines comes that of the tables, if there are some.
        dense, tables = machines[: len(layout)], optimizer.tables
        rows = RowRequests(transport, tables, machines[len(layout)], self.counters) if tables else None
        self._requests = Requests(transport, layout, optimizer, dense, self.counters, measures, rows)
        self._coordinator = Coordinator(*coordinates, transport.send) if coordinates else None
        self._members = Membership()
        # With a backup, the second report of an end must be part of the log.
        self._grace = None if replicated else Grace(grace_s)
        self._settled = -1
        self._begun = False
        self._ended = False
        if replicated:
            replicated.attach(self.share, self.restore)

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return self._transport.address

    @property
    def moved_bytes(self) -> int:
        """Payload pushed and pulled."""
        return self.counters.moved_bytes

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters, and of the optimizer's state."""
        return self._optimizer.memory()

    def snapshot(self) -> memoryview:
        """Returns the whole state, for `restore`."""
        return self._pack(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)).numpy().data

    def share(self) -> SharedSegment:
        """Returns the whole state in memory that another process of this host can map."""
        made: list[SharedSegment] = []

        def allocate(nbytes: int) -> Tensor:
            made.append(SharedSegment.create(nbytes, "snapshot", lasting=True))
            return made[0].tensor()

        self._pack(allocate)
        return made[0]

    def restore(self, snapshot: memoryview, clocks: Sequence[int] | None = None) -> None:
        """Takes over the state of another server.

        `clocks` are the rounds that each worker has done, as in a `SnapshotSet`, when a run is resumed: the state is
        then loaded without clients. Raises ValueError if this is no snapshot, or one of another model or strategy; the
        server is then not usable.
        """
        state, tensors = unpack(snapshot)
        if difference := layout_difference(self._layout, state.form.encode()):
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
        """Ends all connections."""
        self._transport.close()

    def lose(self, worker: int, incarnation: int) -> None:
        """Ends the membership of a worker that was declared lost; only processes from `incarnation` on may join.

        A backup learns it from its primary.
        """
        message = ReceivedMessage(OWN, encode(Message(Kind.LOST, numbers=(worker, incarnation))))
        if self.replicated:
            self.replicated.inject(message)
        else:
            self._handle_all([message])

    def serve(self, check: Callable[[], None]) -> None:
        """Serves until a worker ends the run; `check` is called about ten times a second."""
        while not self._ended:
            self.turn(_WAIT_S)
            check()

    def turn(self, timeout_s: float) -> None:
        """Handles all messages that have arrived; waits for one, but not longer than `timeout_s`."""
        received = self._transport.receive(timeout_s)
        if self._grace is not None:
            received += self._grace.over(received)
        began = perf_counter()
        self.counters.queued(len(received))
        self._handle_all(received)
        self.counters.busy_s += perf_counter() - began

    def _handle_all(self, messages: Sequence[ReceivedMessage]) -> None:
        for received in messages:
            try:
                self._handle(received)
            except (Replaced, ValueError) as error:
                # A wrong message ends its sender's connection, and nothing else.
                self._refuse(received.peer, error)
            except StepFailed as failed:
                raise failed.error from None

    def _refuse(self, peer: int, error: Replaced | ValueError) -> None:
        """Ends a connection, and says why."""
        numbers = (error.rank, error.incarnation) if isinstance(error, Replaced) else ()
        message = Message(Kind.ERROR, flag=bool(numbers), numbers=numbers)
        self._transport.send(peer, encode(message), blob=str(error).encode())
        self._forget(peer)
        self._transport.drop(peer)

    def _handle(self, received: ReceivedMessage) -> None:
        if not received.message:
            self._end(received.peer)
            return
        message = decode(received.message)
        if message.kind == Kind.JOIN:
            self._join(received.peer, message, received.blob)
            return
        if message.kind == Kind.LOST and received.peer == OWN:
            self._lose(*message.numbers)
            return
        member = self._members.at(received.peer)
        if member is None:
            raise ValueError(f"{message.kind.name} from a connection that has not joined")
        if message.kind == Kind.ALIVE:
            self._send_open(member, message)
            return
        if message.number <= member.heard:
            # It is done. A client that misses an answer repeats the request on another connection.
            return
        member.heard = message.number
        if message.kind == Kind.PULL and member.observes:
            self._requests.answer_observer(member, message)
        elif message.kind in _PUSHES:
            self._requests.take(member, message, received.blob)
        elif message.kind == Kind.ASK:
            self._leasing().ask(member, message)
        else:
            self._administer(member, received, message)

    def _leasing(self) -> Coordinator:
        if self._coordinator is None:
            raise ValueError("this server gives out no data")
        return self._coordinator

    def _join(self, peer: int, message: Message, blob: memoryview) -> None:
        if difference := layout_difference(self._layout, bytes(blob)):
            raise ValueError(difference)
        if len(message.numbers) != 3:
            raise ValueError("a worker joins with its number, its incarnation and its session's")
        if self._members.at(peer) is None:
            member, before = self._members.join(peer, *message.numbers, bool(message.flag))
            for older in self._members.superseded(member):
                if older.incarnation < member.incarnation:
                    self._refuse(older.peer, Replaced(member.worker, member.incarnation))
                else:
                    self._forget(older.peer)
                    self._transport.drop(older.peer)
            if before >= 0:
                self._transport.drop(before)
            if not member.observes:
                self._withdraw(member)
            self._requests.publish_versions()
        self._transport.send(peer, encode(Message(Kind.DONE)))

    def _withdraw(self, member: Member) -> None:
        """Makes a worker a member, and drops its open requests, which it will send again."""
        self._requests.drop(member.worker)
        self._requests.broadcast(Join(member.worker, member.incarnation))

    def _end(self, peer: int) -> None:
        """Handles the end of a connection: reported when it ends, and again when its worker's grace is over."""
        member = self._members.at(peer)
        if member is None:
            return
        if member.away or member.observes:
            self._forget(peer)
        else:
            member.away = True
            self._withdraw(member)

    def _lose(self, worker: int, incarnation: int) -> None:
        if self._members.lose(worker, incarnation):
            for client in self._members.clients(worker):
                self._refuse(client.peer, Replaced(worker, incarnation))
            # Also of one that was lost before it had joined.
            self._drop(worker, for_good=True)

    def _forget(self, peer: int, for_good: bool = False) -> None:
        """Ends the membership of the client of a connection."""
        member = self._members.leave(peer, for_good)
        if member is not None and not member.observes:
            self._drop(member.worker, for_good)

    def _drop(self, worker: int, for_good: bool) -> None:
        """Releases what a worker holds, and lets no other wait for it."""
        self._requests.drop(worker)
        self._requests.broadcast(Leave(worker))
        if self._coordinator is not None:
            self._coordinator.lost(worker)
        if for_good:
            # Copies of the parameters.
            self._optimizer.sent(worker, None)
            self._layout.forget(worker)

    def _has_answered(self, member: Member) -> bool:
        """Returns whether a worker's request for data here is answered."""
        return self._coordinator is not None and not self._coordinator.open(member)

    def _send_open(self, member: Member, message: Message) -> None:
        """Tells a client which of its requests are open; all others that it waits for were lost."""
        numbers = self._requests.numbers(member.peer)
        if self._coordinator is not None:
            numbers.update(self._coordinator.open(member))
        answer = Message(Kind.OPEN, numbers=tuple(sorted(numbers)), number=message.number)
        self._transport.send(member.peer, encode(answer))

    def _administer(self, member: Member, received: ReceivedMessage, message: Message) -> None:
        """Handles what is asked between rounds, when no worker pushes; a repeated request is only answered."""
        blob = b""
        if message.kind in _ROWS:
            rows = self._requests.rows
            if rows is None:
                raise ValueError(f"{message.kind.name} on a server without tables")
            blob = rows.answer(member, message, received.blob)
        elif message.kind == Kind.VECTORS:
            if not isinstance(self._optimizer, VectorStore):
                raise ValueError("this server computes with no vectors")
            writing = self._transport.writing(range(len(self._layout)))
            blob, moved = self._optimizer.answer(message, received.blob, writing)
            if moved:
                self._requests.broadcast(Renew())
        elif message.kind == Kind.STATE and message.flag == VALUES:
            if message.first >= len(self._layout):
                raise ValueError(f"there is no shard {message.first}, only {len(self._layout)}")
            blob = self._transport.parameters(message.first).numpy().tobytes()
        elif message.kind == Kind.STATE:
            blob = self._optimizer.state(message.first if message.flag else None)
        elif message.number != member.done:
            self._do(member, received, message)
            member.done = message.number
        if message.kind == Kind.ROUND_MEMBERS and not message.numbers:
            last = self._first.last
            blob = encode(Message(Kind.ROUND_MEMBERS, numbers=last.numbers if last else ()))
        if message.kind == Kind.BEGIN and self._begun:
            blob = b"begun"
        if message.kind == Kind.REST and self._has_answered(member):
            blob = b"answered"
        self._transport.send(received.peer, encode(Message(Kind.DONE, number=message.number)), blob=blob)

    def _do(self, member: Member, received: ReceivedMessage, message: Message) -> None:
        if message.kind in _LEASED:
            self._leasing().handle(member.worker, message)
        elif message.kind == Kind.LOAD:
            if message.flag:
                self._requests.replace(message.first, bytes(received.blob))
            else:
                self._optimizer.load(bytes(received.blob))
        elif message.kind == Kind.AVERAGE:
            self._requests.swap_weights(bool(message.flag))
        elif message.kind == Kind.SETTLE:
            # Every worker reports it at a sync point, some after new pushes.
            if message.lease > self._settled:
                self._settled = message.lease
                self._optimizer.settle(message.lease)
                self._requests.broadcast(Settle())
        elif message.kind == Kind.BEGIN:
            self._begun |= message.flag == 1
        elif message.kind == Kind.REST:
            # Other workers do not wait for one that waits for data, unless its data is on the way.
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
            # One client of a worker leaves for all of them, or for itself.
            for client in [member] if message.flag else self._members.clients(member.worker):
                self._forget(client.peer, for_good=True)
        elif message.kind == Kind.END:
            self._ended = True
        else:
            raise ValueError(f"{message.kind.name} is nothing that a worker asks")
