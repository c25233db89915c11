"""The leases: examples by hand, histories under every order of events, and bugs that the histories must find."""

from __future__ import annotations

import inspect
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.parameter_server.core import leases as module
from headrace.parameter_server.core.events import Push
from headrace.parameter_server.core.leases import (
    Advance,
    Answer,
    Ask,
    Commit,
    Event,
    Grant,
    Halt,
    IntervalSet,
    LeaseTable,
    MeetAtSyncPoint,
    Return,
    WorkerLost,
    intervals_of,
)
from headrace.parameter_server.core.shard import Shard
from headrace.policies.staleness import EveryPush, Unbounded
from parameter_server.virtual import Machines
from parameter_server.worlds import is_found, mutated


def told(leases: LeaseTable, *events: Event) -> list[Answer]:
    return [answer for event in events for answer in leases.handle(event)]


def test_leases_go_to_the_worker_that_asks_and_the_sync_point_waits_for_all() -> None:
    leases = LeaseTable(portions=2, until=1)
    assert told(leases, Ask(5), Ask(3), Ask(4)) == [Grant(5, 0, 0, 0), Grant(3, 1, 0, 1)]
    assert told(leases, Commit(1), Ask(3)) == []
    assert told(leases, Commit(0)) == []
    assert told(leases, Ask(5)) == [MeetAtSyncPoint(worker, 1, 1, (5, 3, 4)) for worker in (5, 3, 4)]
    assert told(leases, Ask(4), Ask(5)) == []
    assert told(leases, Advance(1, 2)) == [Grant(4, 2, 1, 0), Grant(5, 3, 1, 1)]


def test_who_is_awaited_from_the_begin_holds_up_the_fence_until_it_asks_or_is_lost() -> None:
    leases = LeaseTable(portions=1, until=1, workers=range(3))
    assert told(leases, Ask(1), Commit(0), Ask(1), Ask(0)) == [Grant(1, 0, 0, 0)]
    assert told(leases, WorkerLost(2)) == [MeetAtSyncPoint(0, 1, 1, (0, 1)), MeetAtSyncPoint(1, 1, 1, (0, 1))]


def test_who_comes_during_a_meeting_waits_outside_and_all_who_met_let_go_on_once() -> None:
    leases = LeaseTable(portions=1, until=1)
    assert told(leases, Ask(0), Commit(0), Ask(0)) == [Grant(0, 0, 0, 0), MeetAtSyncPoint(0, 1, 1, (0,))]
    assert told(leases, Ask(1)) == []
    assert told(leases, Advance(1, 2)) == [Grant(1, 1, 1, 0)]
    assert told(leases, Advance(1, 5)) == []
    assert leases.until == 2


def test_what_is_returned_or_lost_comes_first_and_only_once() -> None:
    leases = LeaseTable(portions=3, until=2)
    assert [answer.worker for answer in told(leases, Ask(0), Ask(1), Ask(2))] == [0, 1, 2]
    assert told(leases, Return(1), Return(1), Ask(1)) == [Grant(1, 1, 0, 1)]
    assert told(leases, WorkerLost(0), Ask(0), Commit(2), Ask(2)) == [Grant(0, 0, 0, 0), Grant(2, 3, 1, 0)]


def test_no_worker_speaks_for_the_lease_of_another() -> None:
    leases = LeaseTable(portions=2, until=1)
    leases.handle(Ask(0))
    leases.handle(Ask(1))
    assert leases.handle(Commit(0, worker=1)) == leases.handle(Return(1, worker=0)) == []
    # Both are held still: no fence for who is done, and nothing that is free.
    leases.handle(Commit(1, worker=1))
    assert leases.handle(Ask(1)) == []
    assert told(leases, Commit(0, worker=0), Ask(0)) == [
        MeetAtSyncPoint(0, 1, 1, (0, 1)),
        MeetAtSyncPoint(1, 1, 1, (0, 1)),
    ]


def test_a_fixed_portion_is_of_one_worker() -> None:
    leases = LeaseTable(portions=2, until=2, fixed=True)
    assert told(leases, Ask(1), Commit(1), Ask(1), Commit(3), Ask(1)) == [Grant(1, 1, 0, 1), Grant(1, 3, 1, 1)]
    assert told(leases, Ask(0), Commit(0), Ask(0), Commit(2)) == [Grant(0, 0, 0, 0), Grant(0, 2, 1, 0)]
    assert told(leases, Ask(0)) == [MeetAtSyncPoint(1, 2, 1, (1, 0)), MeetAtSyncPoint(0, 2, 1, (1, 0))]


def test_fixed_portions_of_who_is_lost_go_to_the_others_until_it_is_back() -> None:
    leases = LeaseTable(portions=2, until=3, fixed=True)
    assert told(leases, Ask(0), Ask(1), WorkerLost(1)) == [Grant(0, 0, 0, 0), Grant(1, 1, 0, 1)]
    assert told(leases, Commit(0), Ask(0), Commit(1), Ask(0)) == [Grant(0, 1, 0, 1), Grant(0, 2, 1, 0)]
    assert told(leases, Ask(1), Commit(2), Ask(0)) == [Grant(1, 3, 1, 1), Grant(0, 4, 2, 0)]


def test_who_comes_and_has_no_fixed_portions_gets_those_of_others() -> None:
    leases = LeaseTable(portions=1, until=3, fixed=True)
    assert told(leases, Ask(0), Ask(1)) == [Grant(0, 0, 0, 0), Grant(1, 1, 1, 0)]
    assert told(leases, Commit(0), Commit(1), Ask(0), Ask(1), Commit(2)) == [Grant(0, 2, 2, 0)]
    assert told(leases, Ask(0), Advance(3, 5)) == [
        *[MeetAtSyncPoint(worker, 3, 1, (0, 1)) for worker in (0, 1)],
    ]
    assert told(leases, Ask(1), Ask(0)) == [Grant(1, 3, 3, 0), Grant(0, 4, 4, 0)]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("asked", "fence"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_halt_lets_the_rounds_end_that_have_begun(asked: int, fence: int, fixed: bool) -> None:
    leases = LeaseTable(portions=2, until=9, fixed=fixed)
    for lease in range(asked):
        assert told(leases, Ask(lease % 2), Commit(lease)) == [Grant(lease % 2, lease, lease // 2, lease % 2)]
    leases.handle(Halt())
    assert leases.until == fence


def test_who_is_lost_at_a_fence_waits_outside_when_it_is_back_unless_all_are_lost() -> None:
    leases = LeaseTable(portions=1, until=1)
    assert told(leases, Ask(0), Ask(1), Commit(0)) == [Grant(0, 0, 0, 0)]
    assert told(leases, Ask(0)) == [MeetAtSyncPoint(0, 1, 1, (0, 1)), MeetAtSyncPoint(1, 1, 1, (0, 1))]
    assert told(leases, WorkerLost(1), Ask(1)) == []
    assert told(leases, WorkerLost(0)) == [MeetAtSyncPoint(1, 1, 2, (1,))]


def test_no_sync_point_before_what_only_a_lost_worker_may_do_or_a_worker_holds_that_asks_again() -> None:
    leases = LeaseTable(portions=1, until=1, alone=1)
    assert told(leases, Ask(0), Ask(1), WorkerLost(0)) == [Grant(0, 0, 0, 0)]
    assert told(leases, Ask(0), Ask(0)) == [Grant(0, 0, 0, 0)]
    assert told(leases, Commit(0)) == [MeetAtSyncPoint(1, 1, 1, (1, 0)), MeetAtSyncPoint(0, 1, 1, (1, 0))]


def test_who_looks_ahead_holds_two_leases_and_meets_when_both_are_committed() -> None:
    leases = LeaseTable(portions=1, until=3)
    assert told(leases, Ask(0), Ask(0), Ask(1)) == [Grant(0, 0, 0, 0), Grant(0, 1, 1, 0), Grant(1, 2, 2, 0)]
    # Nothing is left: who asks while it computes waits, also for what another one loses.
    assert told(leases, Commit(0), Ask(0)) == []
    assert told(leases, WorkerLost(1)) == [Grant(0, 2, 2, 0)]
    assert told(leases, Commit(1), Ask(0)) == []
    assert told(leases, Commit(2)) == [MeetAtSyncPoint(0, 3, 1, (0,))]


def test_one_meeting_at_a_time() -> None:
    leases = LeaseTable(portions=1, until=0)
    assert told(leases, Ask(0)) == [MeetAtSyncPoint(0, 0, 1, (0,))]
    assert told(leases, Ask(1), Ask(0)) == []


OWN_LEASES = inspect.getsource(module.LeaseTable._take)
PLANTED = {
    "some do not come": ("len(self._asking) < len(self._present)", "not self._asking"),
    "any worker opens the next stretch": ("elif event.done == self.until:", "else:"),
    "returns get lost": ("self._release([event.lease])", "self._held.pop(event.lease, None)"),
    "losses free nothing": ("if worker == event.worker])", "if worker == event.worker][:0])"),
    "the lost still ask": ("[worker for worker in self._asking if worker != event.worker]", "self._asking"),
    "a halt cuts rounds": ("-(-begun // self._portions)", "begun // self._portions"),
    "one portion behind the fence": ("for lease in streams if lease < stop)]", "for lease in streams)]"),
    "given out twice": ("self._free.remove(lease)", "pass"),
    "commits do not count": ("self._held.pop(event.lease, None)\n", "pass\n"),
    "no worker takes over": ("self._loose = True", "self._loose = False"),
    "a lease of any worker": (OWN_LEASES, OWN_LEASES.replace("self._fixed", "False")),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_histories_find_a_planted_bug(bug: str) -> None:
    assert is_found(Machines(leases=mutated(module, "LeaseTable", *PLANTED[bug])))


def test_histories_find_nothing_where_nothing_is_planted() -> None:
    assert not is_found(
        Machines(leases=mutated(module, "LeaseTable", "self._free.add(lease)", "self._free.add(lease)")), histories=5
    )


@given(st.lists(st.integers(0, 30)))
def test_intervals_hold_what_a_set_does(numbers: list[int]) -> None:
    held, expected = IntervalSet(), set(numbers)
    for number in numbers:
        held.add(number)
    assert set(held) == {each for each in range(-1, 32) if each in held} == expected
    assert len(held) == len(expected)
    assert held.intervals() == intervals_of(expected) == IntervalSet(held.intervals()).intervals()


def test_leases_that_are_done_take_no_memory_of_their_own() -> None:
    """A server has hundreds of shards, and there may be 100,000 leases between two sync points."""
    shard = Shard(range(2), Unbounded(), EveryPush())
    tracemalloc.start()
    try:
        for lease in range(0, 5_000, 2):
            # Two workers are done in the other order.
            for worker, own in ((0, lease + 1), (1, lease)):
                shard.handle(Push(worker, 0, own, shard.version, 1.0, 1.0, True))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shard.has(0)
    assert shard.has(4_999)
    assert not shard.has(5_000)
    assert used < 20_000
