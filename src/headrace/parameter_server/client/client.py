"""A worker's client of the parameter servers: push, pull, and both in one round trip."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor

from headrace.errors import InfeasiblePlan, PeerLost, ServerRefused
from headrace.parameter_server.client.landing import Landing
from headrace.parameter_server.client.session import ServerConnection, Session
from headrace.parameter_server.core.events import Reason, RoundMembers
from headrace.parameter_server.wire import MOST_SHARDS, MOST_TOGETHER, VALUES, Kind, Message, buckets_of, decode
from headrace.training.clipping import all_finite

_Gradients = Sequence[Sequence[Tensor | None]]

_ANSWER_S = 60.0
"""How long a server may take for an answer that depends on no other worker, and that it does not put off."""


class Client:
    """Pushes gradients to all servers, and pulls parameters from them.

    Args:
        incarnation: greater than that of any process that had this number before.
        check: called about every 50 ms while waiting; raises to end the wait.
        in_turn: push to the first server, which decides whose pushes a round has, then to the others; needs `together`.

    `rested` says whether no other worker waited for this one while it waited for its last lease, `apart` is the
    distance of the last push from the mean of its round, if servers measure it. `first_reason` is why the last push did
    not count in the first bucket of the first server, or None: of two workers that push for one lease, each may be the
    first in some buckets, and this one tells which counts. While `exact`, pulls bring what servers have, and not what a
    codec makes of it, for each worker otherwise. Every method raises PeerLost if a server has ended or does not answer,
    Replaced if another process has replaced this worker, and ServerRefused if a server refuses it.
    """

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        worker: int,
        incarnation: int = 0,
        check: Callable[[], None] = lambda: None,
        together: bool = False,
        observes: bool = False,
        in_turn: bool = False,
    ) -> None:
        self._worker, self._in_turn = (worker, incarnation), in_turn
        self.rested, self.apart, self.exact = False, 0.0, False
        self.first_reason: Reason | None = None
        self.pulled: Callable[[], None] = lambda: None
        self.servers: list[_Server] = []
        try:
            for connection in connections:
                count, most = len(connection.layout), MOST_TOGETHER if together else MOST_SHARDS
                if count > most:
                    raise InfeasiblePlan(
                        f"the server of rank {connection.rank} has {count:,} shards, and a message has room for "
                        f"{most:,}; use more servers, or a coarser sharding, as 'max_size:4MB' or 'whole'"
                    )
                session = Session(connection, worker, incarnation, check, observes)
                self.servers.append(_Server(connection, session, together))
        except BaseException:
            self.close()
            raise

    @property
    def moved_bytes(self) -> int:
        """Payload sent to and received from all servers."""
        return sum(server.session.moved_bytes for server in self.servers)

    def pull(self) -> None:
        """Updates this worker's copy of the parameters; waits until the worker may begin its next round."""
        for server in self.servers:
            for shards in server.buckets:
                server.request(shards)
        for server in self.servers:
            server.finish(exact=self.exact)
        self.pulled()

    def push(
        self,
        gradients: _Gradients,
        lease: int,
        weight: float = 1.0,
        share: float = 1.0,
        finite: bool | None = None,
        pull: bool = False,
        steps: int = 1,
        versions: Sequence[Sequence[int]] | None = None,
        patience_s: float = math.inf,
        rows: Sequence[tuple[tuple[int, ...], bytes]] = (),
    ) -> Reason | None:
        """Sends gradients to all servers, and waits until they are applied; returns why they do not count, or None.

        Args:
            gradients: by server and shard; None if the loss does not depend on the parameter.
            weight: in the mean of the round; 0 if there was no data.
            finite: whether all are finite, if the caller has checked; None to check here. Others are refused.
            versions: by server and shard, of the parameters that they were computed with; None for those pulled last.
            patience_s: how long to wait for other workers before the round ends without them; with `together`, and one
                server or `in_turn`.
            rows: gradients of tables, by server; see `RowClient`. They count together with the others, or not at all.
        """
        if finite is None:
            finite = all_finite([gradient for shards in gradients for gradient in shards if gradient is not None])
        head = Message(Kind.PUSH_PULL if pull else Kind.PUSH, 0, finite, lease, weight, share, steps=steps)
        if self._in_turn:
            return self._push_in_turn(gradients, head, pull, patience_s)
        for index in range(max((len(server.buckets) for server in self.servers), default=0)):
            for number, server in enumerate(self.servers):
                if index < len(server.buckets):
                    known = None if versions is None else versions[number]
                    # All workers push in the same order, so that no two wait for each other.
                    server.make_room(pull)
                    server.push(server.buckets[index], gradients[number], head, known)
        for server, (numbers, blob) in zip(self.servers, rows, strict=bool(rows)):
            server.push_rows(head, numbers, blob)
        reason = self._conclude([server.finish(pull, monotonic() + patience_s) for server in self.servers])
        if pull:
            self.pulled()
        return reason

    def _push_in_turn(self, gradients: _Gradients, head: Message, pull: bool, patience_s: float) -> Reason | None:
        """Pushes to the first server, and if the push counts there, to all others."""
        first, *others = self.servers
        first.push(first.buckets[0], gradients[0], head)
        decided = first.finish(pull, monotonic() + patience_s)
        last = decode(bytes(first.ask(Message(Kind.ROUND_MEMBERS)))).numbers
        # A push of an earlier round is repeated: the other servers know only the last round.
        counts = bool(last) and self._worker in RoundMembers.of(last).workers and decided.reason != Reason.LATE
        for server, pushed in zip(others, gradients[1:], strict=True):
            if last:
                server.ask(Message(Kind.ROUND_MEMBERS, numbers=last))
            if counts:
                server.push(server.buckets[0], pushed, head)
            elif pull:
                server.request(server.buckets[0])
        reason = self._conclude([decided, *(server.finish(pull) for server in others)])
        return reason if counts else Reason.LATE

    def _conclude(self, answers: Sequence[_Answers]) -> Reason | None:
        """Returns why a push does not count, from the answers of all servers."""
        self.apart = math.sqrt(sum(answer.apart for answer in answers))
        self.first_reason = next((answer.first_reason for answer in answers if answer.count), None)
        return functools.reduce(_graver, (answer.reason for answer in answers), None)

    @property
    def versions(self) -> list[list[int]]:
        """The versions of the parameters pulled last, by server and shard."""
        return [server.versions[:] for server in self.servers]

    @property
    def is_behind(self) -> bool:
        """Whether the first server is known to have newer parameters in all shards, and so would refuse a push."""
        known, current_version = self.servers[0].versions, self.servers[0].session.transport.current_version
        return all((current_version(shard) or 0) > version for shard, version in enumerate(known))

    def forget(self) -> None:
        """Makes the next pull fetch all parameters, because the local copy was changed."""
        for server in self.servers:
            server.versions = [-1] * len(server.layout)

    def ask(self, server: int, message: Message, blob: bytes = b"") -> bytes:
        """Sends one server a message other than push or pull, and returns the blob of its answer."""
        return bytes(self.servers[server].ask(message, blob))

    def ask_all(self, message: Message, blob: bytes = b"", servers: Sequence[int] | None = None) -> list[bytes]:
        """Sends all servers, or some, one message, and returns the blobs of their answers."""
        asked = self.servers if servers is None else [self.servers[server] for server in servers]
        for server in asked:
            server.tell(message, blob)
        return [bytes(server.answer()) for server in asked]

    def lease(self, rests: bool = False) -> Message:
        """Waits for the first server's next grant or sync point; if `rests`, no other worker waits for this one."""
        self.rested = False
        message = self.servers[0].lease(self._rest if rests else None)
        if self.rested:
            # Other workers wait for this one again from now on.
            self.ask_all(Message(Kind.REST))
        return message

    def _rest(self) -> None:
        first, *others = self.servers
        # The data may have arrived while it asks: then the other servers keep waiting for this worker.
        if self.rested or first.ask(Message(Kind.REST, flag=True)):
            return
        for server in others:
            server.tell(Message(Kind.REST, flag=True))
        self.rested = True

    def close(self) -> None:
        """Ends all connections."""
        for server in self.servers:
            server.session.close()


@dataclass
class _Answers:
    """The answers to the requests of one push or pull that have come so far, `count` of them; `missing` ones have not.

    `reason` is that of all together, `first_reason` that of the first one, `apart` the squared distance of the push.
    """

    missing: int = 0
    count: int = 0
    reason: Reason | None = None
    first_reason: Reason | None = None
    apart: float = 0.0

    def take(self, answer: Message) -> None:
        """Takes one answer."""
        reason = Reason(answer.flag) if answer.flag else None
        self.first_reason = self.first_reason if self.count else reason
        self.reason = _graver(self.reason, reason)
        self.missing, self.count, self.apart = self.missing - 1, self.count + 1, self.apart + answer.weight


class _Server:
    """One server, as a client sees it; `versions` are of this worker's copy, -1 for an unknown one.

    `moved` says that it has told of a later map of rows; who reads it sets it back.
    """

    def __init__(self, connection: ServerConnection, session: Session, together: bool) -> None:
        self.session, self.layout = session, connection.layout
        self.buckets = [range(len(self.layout))] if together else buckets_of(self.layout)
        self._landing = Landing(connection.places)
        self.versions = [-1] * len(self.layout)
        self._connection = connection
        self.moved = False
        self._answers = _Answers()
        # Of the last message that was told.
        self._told = 0
        self._leases: deque[Message] = deque()
        self._early: dict[int, memoryview | None] = {}

    def push(
        self, shards: range, gradients: Sequence[Tensor | None], head: Message, versions: Sequence[int] | None = None
    ) -> None:
        """Writes the gradients of some shards to their push slots, and announces them."""
        known = self.versions if versions is None else versions
        sends, present, numbers = bool(head.weight and head.flag), [], []
        for shard in shards:
            gradient, made_with = gradients[shard], max(0, known[shard])
            numbers.append(made_with if gradient is not None else ~made_with)
            if gradient is not None and sends:
                self.layout.encode(shard, gradient, self.session.push_views[shard])
                present.append(shard)
        self.session.ask(head._replace(first=shards.start, numbers=tuple(numbers)), present)
        self._answers.missing += 1

    def push_rows(self, head: Message, numbers: tuple[int, ...], blob: bytes) -> None:
        """Sends gradients of tables, with the numbers of PUSH_ROWS; `finish` waits for the answer, too."""
        self.session.ask(head._replace(kind=Kind.PUSH_ROWS, numbers=numbers), (), blob)
        self._answers.missing += 1

    def request(self, shards: range) -> None:
        """Asks for the parameters of some shards."""
        self.session.ask(Message(Kind.PULL, shards.start, 1, numbers=tuple(self.versions[shard] for shard in shards)))
        self._answers.missing += 1

    def finish(self, pulls: bool = True, until: float = math.inf, exact: bool = False) -> _Answers:
        """Waits for all answers, and fetches parameters if asked for; returns what the answers come to.

        After `until`, the server is asked to end the round without the workers that are still missing.
        """
        while self._answers.missing:
            self._await_answer(pulls, until)
        for shard in range(len(self._landing)) if exact and self.layout.reply_slots is not None else ():
            if self.layout.pieces[shard].elements:
                values = bytearray(self.ask(Message(Kind.STATE, shard, VALUES)))
                self._landing.place(shard).copy_(torch.frombuffer(values, dtype=torch.uint8))
        self._landing.land()
        answers, self._answers = self._answers, _Answers()
        return answers

    def make_room(self, pulls: bool) -> None:
        """Waits until another push may be sent."""
        while self._answers.missing >= (self.session.transport.window or math.inf):
            self._await_answer(pulls)

    def _await_answer(self, pulls: bool, until: float = math.inf) -> None:
        # Without a deadline, because the answer depends on other workers.
        message, _ = self._next(until=until)
        if message.kind not in (Kind.ANSWER, Kind.MOVED):
            raise ServerRefused(f"the server answered {message.kind.name} to a push or pull")
        self._answers.take(message)
        self.moved |= message.kind == Kind.MOVED
        if pulls:
            self._fetch(message)

    def ask(self, message: Message, blob: bytes = b"") -> memoryview:
        """Sends a message other than push or pull, waits for its answer, and returns the blob."""
        self.tell(message, blob)
        return self.answer()

    def answer(self, number: int = 0) -> memoryview:
        """Waits for the answer to what was told last, or early with this number, and returns its blob."""
        if number and (early := self._early.pop(number)) is not None:
            return early
        answer, returned = self._next(number or self._told, _ANSWER_S)
        if answer.kind != Kind.DONE:
            raise ServerRefused(f"the server answered {answer.kind.name} to a question")
        return returned

    def tell(self, message: Message, blob: bytes = b"", early: bool = False) -> int:
        """Sends a message other than push or pull, and returns its number.

        The answer to an `early` one, which changes nothing, is kept until it is wanted, whatever is sent before.
        """
        if message.kind == Kind.ASK:
            return self.session.ask(message)
        if early:
            number = self.session.ask(message, (), blob)
            self._early[number] = None
            return number
        if self.session.waits_for(self._told):
            # The server recognizes only the last repeated message.
            self._next(self._told, _ANSWER_S)
        self._told = self.session.ask(message, (), blob)
        return self._told

    def lease(self, rest: Callable[[], None] | None = None) -> Message:
        """Waits for a grant or a sync point; calls `rest` when that takes long."""
        while not self._leases:
            # Without a deadline, because others may compute for any time; the launcher checks that they live.
            received = self.session.receive()
            if received is None and rest:
                rest()
            elif received is not None and not self._takes(*received):
                raise ServerRefused("the server answered a question that was not asked")
        return self._leases.popleft()

    def granted(self) -> Message | None:
        """Returns the lease that the server has for this worker now, if it was asked for one; None if it has none."""
        if not self._leases:
            # Any question: the server answers in order.
            self.ask(Message(Kind.ROUND_MEMBERS))
        return self._leases.popleft() if self._leases else None

    def _takes(self, message: Message, blob: memoryview, awaited: int = 0) -> bool:
        """Takes an answer that this call does not wait for; returns whether it was one."""
        if message.kind == Kind.DONE and message.number in self._early:
            self._early[message.number] = blob
            return True
        if message.kind in (Kind.GRANT, Kind.SYNC_POINT):
            self._leases.append(message)
            return True
        return message.kind == Kind.DONE and message.number != awaited

    def _next(
        self, awaited: int = 0, within_s: float = math.inf, until: float = math.inf
    ) -> tuple[Message, memoryview]:
        began = monotonic()
        while True:
            received = self.session.receive(max(0.0, until - monotonic()))
            if received is not None:
                if not self._takes(*received, awaited):
                    return received
            elif monotonic() >= until:
                until = math.inf
                self.session.ask(Message(Kind.CLOSE))
            elif monotonic() - max(began, self.session.put_off_at) > within_s:
                raise PeerLost(self._connection.rank, self._connection.host, f"has not answered for {_ANSWER_S:.0f} s")

    def _fetch(self, message: Message) -> None:
        for shard, version in enumerate(message.numbers, message.first):
            if version == self.versions[shard]:
                continue
            if self.layout.reply_slots is not None:
                self.layout.decode_reply(shard, self.session.transport.reply_slot(shard), self._landing.place(shard))
                self.versions[shard] = version
                continue
            try:
                self.versions[shard] = self.session.transport.fetch(shard, self._landing.place(shard))
            except ConnectionError as error:
                self.session.reconnect(error)
                self.versions[shard] = -1
                self.request(range(shard, shard + 1))


def _graver(one: Reason | None, other: Reason | None) -> Reason | None:
    """Returns the reason that stands for two: a gradient that is late in one shard is computed again for all."""
    return Reason.LATE if Reason.LATE in (one, other) else one or other
