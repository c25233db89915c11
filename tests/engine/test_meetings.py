"""Barriers at the store of a launcher's processes, whose members may be lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import monotonic

import pytest
import torch

from collectives.mortals import check, lives
from engine.conftest import until
from headrace.collectives.elastic import ElasticGroup, MemberLost
from headrace.engine.torchrun.elastic_workers.barrier import StoreBarrier, member_name
from headrace.engine.torchrun.key_value import StoreClient
from headrace.engine.torchrun.store_server import Meetings, StoreServer
from headrace.errors import PeerLost, Replaced, UsageError
from headrace.shared_memory import ends
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks

SECRET, RUN = b"the secret of this run", "run"
WITHIN_S = 20.0


@dataclass
class Store:
    """A store, a connection to it, and the page of a process."""

    server: StoreServer
    client: StoreClient
    page: ControlPage

    def barrier(self, place: int, check: Callable[[], None] = lambda: None) -> StoreBarrier:
        give_up = monotonic() + WITHIN_S

        def in_time() -> None:
            check()
            assert monotonic() < give_up, "it waits for ever"

        ends = FinishedRanks([record.heartbeat for record in self.page.ranks])
        return StoreBarrier(self.client.clone(), RUN, self.page, place, "host-0", in_time, ends)

    def group(self, place: int, world: int = 2) -> ElasticGroup:
        barrier = self.barrier(place)
        members = [(member, 0) for member in range(world)]
        return ElasticGroup(barrier, place, members, lambda: None, FinishedRanks([]))

    def lose(self, place: int) -> None:
        self.client.lose(member_name(RUN, place, 0))


@pytest.fixture
def store() -> Iterator[Store]:
    server = StoreServer("tcp://127.0.0.1:0", SECRET, lambda _: None)
    client = StoreClient(server.address, SECRET, WITHIN_S)
    made = Store(server, client, ControlPage.create(5))
    yield made
    client.close()
    made.server.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_those_who_live_see_the_same(store: Store, seed: int) -> None:
    world = random.Random(seed).randint(2, 5)
    barriers: list[StoreBarrier] = []

    def make(place: int, check: Callable[[], None]) -> StoreBarrier:
        barriers.append(store.barrier(place, check))
        return barriers[-1]

    page = ControlPage.create(world)
    check(lives(seed, page, make, store.lose))
    for barrier in barriers:
        barrier.close()


def test_a_member_that_was_lost_after_it_had_come_is_met(store: Store) -> None:
    group, lost = store.group(0), store.group(1)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(lost.sum, [2.0])
        assert until(lambda: bool(store.server._meetings._open), WITHIN_S)
        store.lose(1)
        assert group.sum([1.0]) == came.result(WITHIN_S) == [3.0]
        with pytest.raises(MemberLost, match="rank 1 was lost"):
            group.barrier()
        with pytest.raises(Replaced, match="the run goes on without this process"):
            lost.barrier()
    assert group.together(lambda: group.sum([1.0])) == [1.0]
    for each in (group, lost):
        each.close()


def test_a_lost_member_does_not_meet_the_others() -> None:
    meetings = Meetings[str]()
    assert list(meetings.lose(b"a")) == []
    assert list(meetings.arrive("late", b"first", b"a", b"1", [b"a", b"b"])) == [("late", [])]
    assert list(meetings.arrive("other", b"first", b"b", b"2", [b"a", b"b"])) == [("other", [b"", b"+2"])]


def test_another_one_in_the_same_place_is_met_after_the_next_sync_point(store: Store) -> None:
    store.lose(1)
    store.page.ranks[1].restarts = 1
    group, other = store.group(0), store.group(1)
    members = [(0, 0), (1, 1)]
    for each in (group, other):
        each.regroup(members, 7)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(other.sum, [2.0, 0.5])
        assert group.sum([1.0, 0.25]) == came.result(WITHIN_S) == [3.0, 0.75]
    for each in (group, other):
        each.close()


def test_what_the_first_member_decides_comes_to_the_page_of_every_process(store: Store) -> None:
    pages = [ControlPage.create(2) for _ in range(2)]
    groups = [replace(store, page=page).group(place) for place, page in enumerate(pages)]
    pages[0].stop_after, pages[0].save_after = 8, 5
    # An older decision of a member that was the first one.
    pages[1].stop_after, pages[1].save_after = 4, 6
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(groups[1].barrier)
        groups[0].barrier()
        came.result(WITHIN_S)
        assert [(page.stop_after, page.save_after) for page in pages] == [(8, 6)] * 2
        added = pool.submit(groups[1].sum, [2.0])
        assert groups[0].sum([1.0]) == added.result(WITHIN_S) == [3.0]
    for group in groups:
        group.close()


def test_nothing_is_kept_of_meetings_that_are_over(store: Store) -> None:
    groups = [store.group(place) for place in range(2)]
    large = torch.ones(10_000)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(groups[1].all_reduce, large.clone())
        groups[0].all_reduce(large)
        other.result(WITHIN_S)
    assert large.tolist() == [2.0] * 10_000
    assert not store.server._meetings._open
    for group in groups:
        group.close()


def test_a_member_whose_loop_has_ended_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "_ON_THE_WAY_S", 0.1)
    barrier = store.barrier(0)
    store.page.ranks[1].heartbeat.finished = 8
    with pytest.raises(UsageError, match="the loop on rank 1 ended after 7 rounds"):
        barrier.meet([(0, 0), (1, 0)], torch.empty(0, dtype=torch.float64))
    barrier.close()


def test_the_end_of_the_store_is_the_loss_of_rank_0(store: Store) -> None:
    barrier = store.barrier(1)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(barrier.meet, [(0, 0), (1, 0)], torch.empty(0, dtype=torch.float64))
        assert until(lambda: bool(store.server._meetings._open), WITHIN_S)
        store.server.close()
        with pytest.raises(PeerLost, match="rank 0 on host-0 was lost: the launcher's store"):
            meeting.result(WITHIN_S)
    barrier.close()
    store.server = StoreServer("tcp://127.0.0.1:0", SECRET, lambda _: None)


def test_what_a_connection_leaves_is_there_when_it_ends(store: Store) -> None:
    other = store.client.clone()
    store.client.set("ended", b"")
    other.leave("ended", b"1")
    assert store.client.get("ended") == b""
    other.close()
    assert until(lambda: store.client.get("ended") == b"1", WITHIN_S)
