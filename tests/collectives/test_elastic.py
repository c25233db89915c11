"""Members of a group are lost at any instant: those who live agree on what was done, and with whom."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from headrace.collectives.elastic import ElasticGroup, MemberLost
from headrace.errors import UsageError
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment

ACTS = 40


class Gone(Exception):
    """This thread plays a process that was killed."""


class Mortal(ElasticGroup):
    """Ends in the middle of some meeting, before or after it has said that it has come."""

    def __init__(self, page: ControlPage, place: int, world: int, dies_in: int, late: bool) -> None:
        super().__init__(page, place, [(member, 0) for member in range(world)], lambda: None)
        self._meetings, self._dies_in, self._late = 0, dies_in, late

    def barrier(self) -> None:
        self._meetings += 1
        if self._meetings == self._dies_in:
            if self._late:
                # It has come, and sees nothing any more.
                self._page.ranks[self._place].elastic_counter += 1
            raise Gone
        super().barrier()


def lives(seed: int) -> list[list[tuple[float, ...]]]:
    """Lets some members die among many acts; returns what each of those who live saw of every act."""
    chance = random.Random(seed)
    world = chance.randint(2, 5)
    segment = SharedSegment.create(ControlPage.nbytes(world), "control")
    page = ControlPage(segment, world)
    dying = chance.sample(range(world), chance.randint(1, world - 1))
    seen: dict[int, list[tuple[float, ...]]] = {}

    def live(place: int) -> None:
        dies_in = random.Random(seed + place).randint(1, 3 * ACTS) if place in dying else 0
        group = Mortal(page, place, world, dies_in, late=random.Random(seed - place).random() < 0.5)

        def act() -> tuple[float, ...]:
            group.barrier()
            weights = group.sum([1.0, float(place)])
            vector = torch.full((5,), float(place))
            group.all_reduce(vector)
            return (*weights, float(vector[0]), float(group.world))

        own = []
        try:
            for _ in range(ACTS):
                own.append(group.together(act))
        except Gone:
            page.ranks[place].restarts = 1
            return
        seen[place] = own

    threads = [threading.Thread(target=live, args=(place,)) for place in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "no thread waits for ever"
    segment.close()
    return list(seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_those_who_live_see_the_same(seed: int) -> None:
    views = lives(seed)
    assert views
    assert all(view == views[0] for view in views)
    for count, places, summed, world in views[0]:
        assert (count, places) == (world, summed), "a worker that counts has counted on every place"


def pair() -> tuple[ControlPage, ElasticGroup]:
    page = ControlPage(SharedSegment.create(ControlPage.nbytes(2), "control"), 2)
    return page, ElasticGroup(page, 0, [(0, 0), (1, 0)], lambda: None)


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
