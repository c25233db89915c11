"""Members of an elastic group of which some die at any instant, as threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from headrace.collectives.elastic import ElasticBarrier, ElasticGroup
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks

ACTS = 40

Members = Sequence[tuple[int, int]]
Views = list[list[tuple[float, ...]]]


class Gone(Exception):
    """This thread plays a process that was killed."""


class Mortal(ElasticBarrier):
    """Ends at some barrier, before it has said that it has come, or after it and before it sees who else has."""

    def __init__(self, make: Callable[[Callable[[], None]], ElasticBarrier], dies_at: int, late: bool) -> None:
        self._barrier = make(self._check)
        self._barriers, self._dies_at, self._late = 0, dies_at, late

    def restart(self, meeting: int) -> None:
        self._barrier.restart(meeting)

    def is_gone(self, member: int, incarnation: int) -> bool:
        return self._barrier.is_gone(member, incarnation)

    def meet(self, members: Members, numbers: Tensor) -> list[Tensor]:
        self._barriers += 1
        if self._barriers == self._dies_at and not self._late:
            raise Gone
        values = self._barrier.meet(members, numbers)
        self._check()
        return values

    def _check(self) -> None:
        if self._barriers == self._dies_at:
            raise Gone


def lives(
    seed: int,
    page: ControlPage,
    make: Callable[[int, Callable[[], None]], ElasticBarrier],
    bury: Callable[[int], object],
) -> Views:
    """Lets some members die among many acts; returns what each of those who live saw of every act.

    `make` makes the barrier of a place, with what it calls while it waits; `bury` declares a place's member lost.
    """
    chance = random.Random(seed)
    world = len(page.ranks)
    dying = chance.sample(range(world), chance.randint(1, world - 1))
    seen: dict[int, list[tuple[float, ...]]] = {}
    everyone = [(member, 0) for member in range(world)]

    def live(place: int) -> None:
        dies_at = random.Random(seed + place).randint(1, 3 * ACTS) if place in dying else 0
        mortal = Mortal(partial(make, place), dies_at, late=random.Random(seed - place).random() < 0.5)
        ends = FinishedRanks([record.heartbeat for record in page.ranks])
        group = ElasticGroup(mortal, place, everyone, lambda: None, ends)

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
            bury(place)
            return
        seen[place] = own

    threads = [threading.Thread(target=live, args=(place,)) for place in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "no thread waits for ever"
    return list(seen.values())


def check(views: Views) -> None:
    """Checks that all who live saw the same, and that a member that counts has counted everywhere."""
    assert views
    assert all(view == views[0] for view in views)
    for count, places, summed, world in views[0]:
        assert (count, places) == (world, summed), "a worker that counts has counted on every place"
