"""Sessions, leases and shards under any order of losses, repetitions, cuts and deaths, by hypothesis' own choice.

A real server, and a wire that a state machine holds: what workers ask arrives or not, once or twice, over this link or
the next; what they are told is heard or not. With lr = 1 and a coordinate of its own for every push the parameter is
the count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from headrace.parameter_server.core import shard as module
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec, decode, encode
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from headrace.transport.base import ReceivedMessage, ServerTransport
from parameter_server.worlds import mutated

WORKERS = 2
WIDTH = 8
FORM = ShardLayout([ShardSpec("count", 0, (WIDTH,))])


class Wire(ServerTransport):
    """A port whose links are lists: what is sent to them stays there until it is taken."""

    def __init__(self) -> None:
        self.moved_bytes, self.address = 0, "here"
        self.region = torch.zeros(FORM.slots.nbytes, dtype=torch.uint8)
        self.gradients: dict[int, Tensor] = {}
        self.mail: deque[ReceivedMessage] = deque()
        self.sent: dict[int, deque[tuple[Message, bytes]]] = {}
        self.numbers = count()

    def open(self) -> int:
        peer = next(self.numbers)
        self.sent[peer] = deque()
        self.gradients[peer] = torch.zeros(FORM.slots.nbytes, dtype=torch.uint8)
        return peer

    def parameters(self, slot: int) -> Tensor:
        return FORM.slots.of(self.region, slot)

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def set_version(self, slot: int, version: int) -> None:
        """Checks nothing."""

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        mail, self.mail = list(self.mail), deque()
        return mail

    def pushed(self, peer: int, slot: int) -> Tensor:
        return FORM.slots.of(self.gradients[peer], slot)

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """It stays."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        raise AssertionError("parameters go as they are")

    def send(self, peer: int, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        if peer in self.sent:
            self.sent[peer].append((decode(message), blob))

    def drop(self, peer: int) -> None:
        self.sent.pop(peer, None)

    def close(self) -> None:
        self.sent.clear()


class Worker:
    """Asks for a portion, pushes it, and asks with the news; one question at a time, asked again under its number."""

    def __init__(self, number: int, incarnation: int, session: int) -> None:
        self.number, self.incarnation, self.session = number, incarnation, session
        self.peer = -1
        self.asked = 0
        self.question: Message | None = None
        self.lease = -1

    def joining(self) -> Message:
        return Message(Kind.JOIN, numbers=(self.number, self.incarnation, self.session))

    def ask(self, message: Message) -> None:
        self.asked += 1
        self.question = message._replace(number=self.asked)

    def go_on(self) -> None:
        """Asks what comes next, if nothing is waited for."""
        if self.question is None and self.lease >= 0:
            self.ask(Message(Kind.PUSH, 0, 1, self.lease, 1.0, 1.0, (0,)))
        elif self.question is None:
            self.ask(Message(Kind.ASK, lease=-1))

    def hear(self, message: Message) -> int:
        """Takes an answer; returns the lease that it acknowledges, or -1."""
        if self.question is None or message.number != self.question.number:
            return -1
        asked, self.question = self.question, None
        if asked.kind == Kind.PUSH:
            assert message.flag in (0, Reason.DUPLICATE.value)
            done, self.lease = self.lease, -1
            self.ask(Message(Kind.ASK, lease=done))
            return done
        assert message.kind in (Kind.GRANT, Kind.SYNC_POINT)
        self.lease = message.lease if message.kind == Kind.GRANT else -1
        return -1


@settings(max_examples=80, stateful_step_count=40, deadline=None)
class Conversations(RuleBasedStateMachine):
    shard: Any = Shard

    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire()
        applier = ShardOptimizer(FORM, partial(torch.optim.SGD, lr=1.0), [ParameterSpec("count", (WIDTH,))])
        shards = [self.shard(range(WORKERS), Unbounded(), EveryPush())]
        self.server = Server(
            self.wire, FORM, applier, shards, (LeaseTable(WIDTH, 1, workers=range(WORKERS)), 0, 1, 1), 0.0
        )
        self.sessions = count(1)
        self.workers = [Worker(number, 0, next(self.sessions)) for number in range(WORKERS)]
        self.acknowledged: set[int] = set()
        self.old: list[tuple[int, bytes]] = []
        for worker in self.workers:
            self.link(worker)

    def deliver(self, peer: int, message: Message, blob: bytes = b"") -> None:
        self.wire.mail.append(ReceivedMessage(peer, encode(message), memoryview(blob)))
        self.server.turn(0.0)

    def link(self, worker: Worker) -> None:
        worker.peer = self.wire.open()
        self.deliver(worker.peer, worker.joining(), FORM.describe())
        (joined,) = self.wire.sent[worker.peer]
        assert joined[0].kind == Kind.DONE
        self.wire.sent[worker.peer].clear()

    def pushes(self, worker: Worker) -> None:
        place = FORM.view(0, FORM.slots.of(self.wire.gradients[worker.peer], 0))
        place.zero_()
        place[worker.lease] = -1.0

    def send(self, worker: Worker, arrives: bool) -> None:
        worker.go_on()
        question = worker.question
        assert question is not None
        if worker.peer not in self.wire.sent:
            self.link(worker)
        if question.kind == Kind.PUSH:
            self.pushes(worker)
        if arrives:
            self.deliver(worker.peer, question)

    @rule(which=st.integers(0, WORKERS - 1), arrives=st.booleans())
    def asks_perhaps_again(self, which: int, arrives: bool) -> None:
        self.send(self.workers[which], arrives)

    @rule(which=st.integers(0, WORKERS - 1), arrives=st.booleans())
    def hears(self, which: int, arrives: bool) -> None:
        worker = self.workers[which]
        waiting = self.wire.sent.get(worker.peer)
        if waiting:
            message, blob = waiting.popleft()
            assert message.kind != Kind.ERROR, blob
            if arrives:
                self.acknowledged |= {worker.hear(message)} - {-1}

    @rule(which=st.integers(0, WORKERS - 1), times=st.integers(1, 5))
    def works(self, which: int, times: int) -> None:
        for _ in range(times):
            self.asks_perhaps_again(which, True)
            self.hears(which, True)

    @rule(which=st.integers(0, WORKERS - 1), told=st.booleans())
    def is_cut(self, which: int, told: bool) -> None:
        worker = self.workers[which]
        self.wire.drop(worker.peer)
        if told:
            # Else the new link comes before the end of the old one is heard of.
            self.wire.mail.append(ReceivedMessage(worker.peer, b""))
            self.server.turn(0.0)
        self.link(worker)
        if worker.question is not None:
            self.send(worker, True)

    @rule(which=st.integers(0, WORKERS - 1), dies=st.integers(0, 2), declared=st.booleans())
    def is_replaced(self, which: int, dies: int, declared: bool) -> None:
        worker = self.workers[which]
        if dies:
            return
        if worker.question is not None:
            self.old.append((worker.peer, encode(worker.question)))
        if declared:
            # Its link may be open still.
            self.server.lose(which, worker.incarnation + 1)
        self.workers[which] = Worker(which, worker.incarnation + 1, next(self.sessions))
        self.link(self.workers[which])

    @precondition(lambda self: self.old)
    @rule()
    def says_something_from_the_grave(self) -> None:
        peer, message = self.old.pop()
        before = self.counts()
        self.wire.mail.append(ReceivedMessage(peer, message))
        self.server.turn(0.0)
        assert torch.equal(self.counts(), before)

    @rule(which=st.integers(0, WORKERS - 1))
    def doubles(self, which: int) -> None:
        worker = self.workers[which]
        if worker.question is not None and worker.peer in self.wire.sent:
            if worker.question.kind == Kind.PUSH:
                self.pushes(worker)
            for _ in range(2):
                self.deliver(worker.peer, worker.question)

    def counts(self) -> Tensor:
        return FORM.view(0, self.wire.parameters(0)).clone()

    @invariant()
    def nothing_counts_twice_and_what_is_acknowledged_counts(self) -> None:
        counts = self.counts()
        assert counts.max() <= 1.0
        assert all(counts[lease] == 1.0 for lease in self.acknowledged)

    def teardown(self) -> None:
        """All go on over new links, and everything is done."""
        for _ in range(4 * WIDTH):
            for worker in self.workers:
                self.wire.drop(worker.peer)
                self.link(worker)
                self.send(worker, True)
                for message, _ in list(self.wire.sent[worker.peer]):
                    self.acknowledged |= {worker.hear(message)} - {-1}
        self.nothing_counts_twice_and_what_is_acknowledged_counts()
        assert self.acknowledged <= set(range(WIDTH))
        assert torch.equal(self.counts(), torch.ones(WIDTH))
        self.server.close()


@pytest.mark.slow
def test_every_conversation_ends_with_everything_counted_once() -> None:
    run_state_machine_as_test(Conversations)


def test_who_is_lost_before_it_has_joined_is_not_waited_for() -> None:
    wire = Wire()
    optimizer = ShardOptimizer(FORM, partial(torch.optim.SGD, lr=1.0), [ParameterSpec("count", (WIDTH,))])
    table = LeaseTable(1, 1, workers=range(WORKERS))
    server = Server(wire, FORM, optimizer, [Shard(range(WORKERS), Unbounded(), EveryPush())], (table, 0, 1, 1), 0.0)
    worker = Worker(1, 0, session=1)
    peer = wire.open()
    for number, message in enumerate((worker.joining(), Message(Kind.ASK), Message(Kind.ASK, lease=0))):
        wire.mail.append(ReceivedMessage(peer, encode(message._replace(number=number)), memoryview(FORM.describe())))
        server.turn(0.0)
    assert [message.kind for message, _ in wire.sent[peer]] == [Kind.DONE, Kind.GRANT]
    server.lose(0, 1)
    met, _ = wire.sent[peer][-1]
    assert (met.kind, met.numbers[-2:]) == (Kind.SYNC_POINT, (1, 0)), "the worker alone, of its first incarnation"
    server.close()


PLANTED = {
    "a lease twice": ("if push.lease not in self._done and push.finite", "if push.finite"),
    "what is acknowledged is lost": ("step.append(ApplyStep(", "push.lease % 2 and step.append(ApplyStep("),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_conversations_find_a_planted_bug(bug: str) -> None:
    class Wrong(Conversations):
        shard = mutated(module, "Shard", *PLANTED[bug])

    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Wrong, settings=settings(phases=[Phase.generate], max_examples=100))
