"""Who computes which portion: examples by hand, and random histories of workers that are slow, late, lost and come."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from headrace.parameter_server.core.leases import (
    Advance,
    Answer,
    Ask,
    Commit,
    Event,
    Grant,
    Halt,
    MeetAtSyncPoint,
    Return,
    WorkerLost,
)
from headrace.parameter_server.core.portions import PortionTable


def told(table: PortionTable, *events: Event) -> list[Answer]:
    return [answer for event in events for answer in table.handle(event)]


def portion(worker: int, lease: int, loss: float = 1.0, weight: float = 1.0) -> Commit:
    return Commit(lease, worker, (loss, weight))


def test_portions_go_to_who_asks_and_then_one_steers() -> None:
    table = PortionTable(portions=2, until=1)
    assert told(table, Ask(5), Ask(3)) == [Grant(5, 0, 0, 0, (0.0,)), Grant(3, 1, 0, 1, (0.0,))]
    assert told(table, portion(3, 1, 8.0, 1.0), Ask(3)) == []
    steering = Grant(5, 2, 0, 2, (5.0, 4.0))
    assert told(table, portion(5, 0, 4.0, 3.0), Ask(5)) == [Grant(3, 2, 0, 2, (5.0, 4.0))]
    assert told(table, WorkerLost(3)) == [steering], "another one goes on"
    assert told(table, Commit(2, 5, (1.0,)), Ask(5)) == [Grant(5, 3, 0, 0, (1.0,))], "the next evaluation"
    assert told(table, portion(5, 3), Ask(5)) == [Grant(5, 4, 0, 1, (1.0,))]
    assert told(table, portion(5, 4), Ask(5)) == [Grant(5, 5, 0, 2, (5.0, 4.0, 1.0, 2.0))]
    assert told(table, Commit(5, 5, (0.0,)), Ask(5)) == [MeetAtSyncPoint(5, 1, 1, (5,))]
    assert told(table, Ask(5), Advance(0, 9), Advance(1, 2)) == [Grant(5, 6, 1, 0, (0.0,))]


def test_a_portion_of_a_slow_worker_is_given_to_a_fast_one_and_the_first_answer_counts() -> None:
    table = PortionTable(portions=4, until=1)
    told(table, Ask(0), Ask(1))
    assert told(table, portion(0, 0), Ask(0)) == [Grant(0, 2, 0, 2, (0.0,))]
    assert told(table, portion(0, 2), Ask(0)) == [Grant(0, 3, 0, 3, (0.0,))]
    assert told(table, portion(0, 3), Ask(0)) == [Grant(0, 1, 0, 1, (0.0,))]
    assert told(table, portion(0, 1, 5.0), Ask(0)) == [Grant(0, 4, 0, 4, (2.0, 4.0))]
    assert told(table, portion(1, 1, 99.0), Ask(1)) == [], "too late"
    assert told(table, Commit(4, 0, (0.0,)), Ask(0))[0].worker == 0


def test_no_portion_is_given_to_a_worker_that_is_hardly_faster() -> None:
    table = PortionTable(portions=3, until=1)
    told(table, Ask(0), Ask(1), portion(0, 0), Ask(0), portion(0, 2))
    assert told(table, Ask(2)) == []
    assert told(table, Ask(0)) == [Grant(0, 1, 0, 1, (0.0,))], "it has done two more"


def test_a_halt_ends_with_the_round_that_has_begun() -> None:
    table = PortionTable(portions=1, until=9)
    told(table, Ask(0), Halt())
    assert table.until == 1
    assert told(table, portion(0, 0), Ask(0), Commit(1, 0, (0.0,)), Ask(0))[-1] == MeetAtSyncPoint(0, 1, 1, (0,))
    fresh = PortionTable(portions=1, until=9, first=4)
    assert told(fresh, Halt(), Ask(0)) == [MeetAtSyncPoint(0, 4, 1, (0,))]


@pytest.mark.parametrize(("lease", "report"), [(0, ()), (0, (1.0,)), (2, (1.0, 1.0))])
def test_a_commit_that_does_not_say_what_it_must_is_refused(lease: int, report: tuple[float, ...]) -> None:
    table = PortionTable(portions=2, until=1)
    told(table, Ask(0))
    if lease:
        told(table, portion(0, 0), Ask(0), portion(0, 1), Ask(0))
    with pytest.raises(ValueError, match="committed with"):
        table.handle(Commit(lease, 0, report))


def test_the_state_of_another_number_of_portions_is_refused() -> None:
    with pytest.raises(ValueError, match="the state is of 3 portions a batch, and this run has 2"):
        PortionTable(2, 1).load(PortionTable(3, 1).state())


@dataclass
class History:
    """A random history; `seen` counts what has happened in it."""

    chance: random.Random
    portions: int
    rounds: int

    def run(self) -> Counter[str]:
        chance, seen = self.chance, Counter[str]()
        workers = list(range(chance.randint(1, 5)))
        self.speeds = {worker: chance.choice([1.0, 1.0, 0.1]) for worker in range(20)}
        self.table = PortionTable(self.portions, chance.randint(1, self.rounds), workers=workers)
        self.busy: dict[int, Grant] = {}
        self.idle, self.waiting, self.met = set(workers), set[int](), set[int]()
        self.results: dict[int, tuple[float, float]] = {}
        self.counts: Counter[int] = Counter()
        self.serial, self.round, self.evaluations, newest = 0, 0, 0, len(workers)
        for _ in range(20_000):
            if self.round >= self.rounds and self.met and not self.busy:
                return seen
            if chance.random() < 0.02:
                # The server's backup takes over, with the state of the server.
                state, self.table = self.table.state(), PortionTable(self.portions, 1)
                self.table.load(state)
            if chance.random() < 0.01:
                self.tell(Halt())
            present = sorted({*self.busy, *self.idle, *self.waiting, *self.met})
            if chance.random() < 0.02 and len(present) > 1:
                self.lose(chance.choice(present), seen)
            if chance.random() < 0.02 and newest < 20:
                self.idle.add(newest)
                newest += 1
            self.act(seen)
        raise AssertionError(f"it does not end: {self.table.state()}")

    def lose(self, worker: int, seen: Counter[str]) -> None:
        seen["lost"] += 1
        self.busy.pop(worker, None)
        for group in (self.idle, self.waiting, self.met):
            group.discard(worker)
        self.tell(WorkerLost(worker))

    def act(self, seen: Counter[str]) -> None:
        able = [worker for worker in sorted(self.busy) if self.chance.random() < self.speeds[worker]]
        moves = [*sorted(self.idle), *able, *([-1] if self.met and not self.busy else [])]
        if not moves:
            return
        worker = self.chance.choice(moves)
        if worker == -1:
            met = self.round
            self.met, waited = set(), self.met
            self.idle |= waited
            for _ in waited:
                self.tell(Advance(met, met + 3))
        elif worker in self.idle:
            self.idle.discard(worker)
            self.waiting.add(worker)
            self.tell(Ask(worker))
        else:
            self.finish(worker, self.busy.pop(worker), seen)

    def finish(self, worker: int, grant: Grant, seen: Counter[str]) -> None:
        """Ends what a worker computes, and lets it ask again."""
        serial, part = divmod(grant.lease, self.portions + 1)
        self.waiting.add(worker)
        if self.chance.random() < 0.03:
            seen["returned"] += 1
            self.tell(Return(grant.lease, worker), Ask(worker))
        elif part < self.portions:
            late = serial != self.serial or part in self.results
            seen["late"] += late
            if not late:
                self.results[part] = (self.chance.random(), float(self.chance.randint(0, 3)))
                self.counts[worker] += 1
            self.tell(Commit(grant.lease, worker, self.results[part] if not late else (99.0, 9.0)), Ask(worker))
        elif serial == self.serial:
            self.steer(worker, grant)

    def steer(self, worker: int, grant: Grant) -> None:
        every = [self.results[part] for part in range(self.portions)]
        weight = sum(own for _, own in every)
        assert len(grant.report) == 2 * (self.evaluations + 1)
        assert grant.report[-1] == weight
        assert grant.report[-2] * weight == pytest.approx(sum(loss * own for loss, own in every))
        ends = self.evaluations >= 2 or self.chance.random() < 0.3
        self.serial, self.results, self.counts = self.serial + 1, {}, Counter()
        self.evaluations = 0 if ends else self.evaluations + 1
        self.round += ends
        self.tell(Commit(grant.lease, worker, (float(not ends),)), Ask(worker))

    def tell(self, *events: Event) -> None:
        for event in events:
            for answer in self.table.handle(event):
                assert answer.worker in self.waiting
                self.waiting.discard(answer.worker)
                self.take(answer)

    def take(self, answer: Answer) -> None:
        if isinstance(answer, MeetAtSyncPoint):
            assert answer.round == self.round == self.table.until
            assert not self.results
            assert answer.worker in answer.members
            self.met.add(answer.worker)
            return
        serial, part = divmod(answer.lease, self.portions + 1)
        assert (serial, part, answer.round) == (self.serial, answer.part, self.round)
        others = {worker: grant for worker, grant in self.busy.items() if grant.lease == answer.lease}
        if part == self.portions:
            assert len(self.results) == self.portions
            assert not others, "one steers"
        else:
            assert answer.report == (float(self.evaluations),)
            assert part not in self.results
            assert all(self.counts[answer.worker] >= self.counts[other] + 2 for other in others)
            held = {
                grant.lease % (self.portions + 1)
                for grant in self.busy.values()
                if grant.lease // (self.portions + 1) == serial
            }
            assert not others or held | self.results.keys() == set(range(self.portions)), "nothing else is left"
        self.busy[answer.worker] = answer


@pytest.mark.parametrize("portions", [1, 3, 9])
def test_every_history_comes_to_its_end_with_every_portion_counted_once(portions: int) -> None:
    seen = Counter[str]()
    for seed in range(120):
        seen += History(random.Random(f"{portions} {seed}"), portions, rounds=5).run()
    assert min(seen["lost"], seen["returned"]) > 20
    assert portions == 1 or seen["late"] > 20, "no portion was ever computed twice"
