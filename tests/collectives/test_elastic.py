"""Members of a group are lost at any instant: those who live agree on what was done, and with whom."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from collectives.mortals import check, lives
from headrace.collectives.elastic import ElasticGroup, MemberLost, PageBarrier, elastic_on_page
from headrace.errors import UsageError
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_those_who_live_see_the_same(seed: int) -> None:
    world = random.Random(seed).randint(2, 5)
    page = ControlPage.create(world)
    ends = FinishedRanks([record.heartbeat for record in page.ranks])

    def make(place: int, check: Callable[[], None]) -> PageBarrier:
        return PageBarrier(page, place, check, ends)

    def bury(place: int) -> None:
        page.ranks[place].restarts = 1

    check(lives(seed, page, make, bury))


def pair() -> tuple[ControlPage, ElasticGroup]:
    page = ControlPage.create(2)
    return page, elastic_on_page(page, 0, [(0, 0), (1, 0)], lambda: None)


def test_a_member_that_never_comes_is_named() -> None:
    page, group = pair()
    page.ranks[1].restarts = 1
    with pytest.raises(MemberLost) as caught:
        group.barrier()
    assert caught.value.rank == 1


def test_a_member_that_was_lost_after_it_had_come_is_met() -> None:
    page, group = pair()
    page.ranks[1].elastic_counter = 1
    page.ranks[1].restarts = 1
    group.barrier()
    assert group.members == [0, 1]
    assert group.together(lambda: group.sum([1.0])) == [1.0]
    assert group.members == [0]


def test_numbers_stay_until_all_have_come_to_the_barrier_of_a_loss() -> None:
    page = ControlPage.create(3)
    members = [(place, 0) for place in range(3)]
    ends = FinishedRanks([record.heartbeat for record in page.ranks])
    quick, slow = (PageBarrier(page, place, lambda: None, ends) for place in range(2))
    page.ranks[2].elastic_counter = 1
    came = threading.Event()

    def go_on() -> None:
        quick.meet(members, torch.tensor([5.0], dtype=torch.float64))
        page.ranks[2].restarts = 1
        came.set()
        for told in (6.0, 7.0):
            with pytest.raises(MemberLost):
                quick.meet(members, torch.tensor([told], dtype=torch.float64))

    thread = threading.Thread(target=go_on)
    thread.start()
    seen, *_ = slow.meet(members, torch.tensor([1.0], dtype=torch.float64))
    assert came.wait(10.0)
    thread.join(0.3)
    assert seen.tolist() == [5.0], "it reads late, before it comes to the next barrier"
    for told in (2.0, 3.0):
        with pytest.raises(MemberLost):
            slow.meet(members, torch.tensor([told], dtype=torch.float64))
    thread.join()


def test_another_one_in_the_same_place_is_no_member_before_the_next_meeting() -> None:
    page, group = pair()
    page.ranks[1].restarts = 1
    assert group.is_gone(1)
    group.regroup([(0, 0), (1, 1)], meeting=1)
    assert not group.is_gone(1)
    assert (group.rank, group.world) == (0, 2)


def test_a_member_whose_loop_has_ended_is_an_error() -> None:
    page, group = pair()
    page.ranks[1].heartbeat.finished = 8
    with pytest.raises(UsageError, match="the loop on rank 1 ended after 7 rounds"):
        group.barrier()
