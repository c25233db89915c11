"""Collectives through shared memory, in processes."""

from __future__ import annotations

import gc

import pytest
import torch

from belongings import descriptors
from collectives.conftest import Play
from collectives.scenarios import DTYPES, digest, lengths, made
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment

WORLDS = [2, 3, 4]
LAST = 2**31 - 1
"""The largest counter."""

pytestmark = pytest.mark.slow


@pytest.mark.one
@pytest.mark.parametrize("world", WORLDS)
def test_a_sum_has_the_same_bits_on_every_rank_in_rank_order(play: Play, world: int) -> None:
    assert play("sum_everything", world) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_a_broadcast_brings_the_bits_of_rank_0(play: Play, world: int) -> None:
    assert play("spread_everything", world) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_numbers_are_added_in_rank_order_however_many_there_are(play: Play, world: int) -> None:
    counts = [0, 1, 32, 33, 70]
    expected = []
    for count in counts:
        totals = [0.0] * count
        for rank in range(world):
            totals = [total + (0.1 * (rank + 1) + index) for index, total in enumerate(totals)]
        expected.append(totals)
    assert play("add_numbers", world, counts=counts) == [expected] * world


@pytest.mark.one
@pytest.mark.parametrize("world", WORLDS)
def test_everybody_gets_what_everybody_has_and_what_it_is_given(play: Play, world: int) -> None:
    assert play("give_and_take", world) == [[]] * world


def test_groups_of_ranks_act_by_themselves(play: Play) -> None:
    for rank, (across, down, whole, shared, moved) in enumerate(play("meet_in_groups", 4, store="")):
        row, column = rank // 2 * 2, rank % 2
        assert across == [column, 2, 2 * row + 1, 2 * row + 1, 2 * row + 1, row]
        assert down == [rank // 2, 2, 2 * column + 2, 2 * column + 2, 2 * column + 2, column]
        assert whole == [rank, 4, 6, 6, 6, 0]
        assert (shared, moved) == ([column, column + 2], True)


@pytest.mark.parametrize("sizes", [[64, 64], [5, 0, 4097], [0, 3, 0, 1]])
def test_everybody_sees_what_everybody_shares(play: Play, sizes: list[int]) -> None:
    after = [size * (rank + 1) for rank, size in enumerate(sizes)]
    assert play("share_regions", len(sizes), sizes=sizes) == [[sizes, [0] * len(sizes), after]] * len(sizes)


@pytest.mark.one
@pytest.mark.parametrize("world", WORLDS)
def test_no_rank_leaves_a_barrier_before_the_last_has_come(play: Play, world: int) -> None:
    # The counters go round in the middle of it.
    assert play("storm", world, counter=LAST - 5_000, meetings=10_000) == [[]] * world


@pytest.mark.parametrize("behind", range(4))
@pytest.mark.parametrize("world", [2, 3])
def test_counters_go_round(play: Play, world: int, behind: int) -> None:
    assert play("storm", world, counter=LAST - behind, meetings=20) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_the_verbs_may_follow_each_other_in_any_order(play: Play, world: int) -> None:
    assert play("everything_by_turns", world, turns=400) == [[]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_wait_for_a_lost_rank_ends(play: Play, world: int) -> None:
    assert play("wait_for_a_lost_rank", world) == [[1, True]] * world


@pytest.mark.parametrize("how", ["share", "subgroup"])
def test_who_cannot_open_the_memory_of_a_lost_rank_says_that_it_is_lost(play: Play, how: str) -> None:
    assert play("open_what_a_lost_rank_has_offered", 3, how=how) == [2, 2, 2]


def alone() -> SharedMemoryGroup:
    segment = SharedSegment.create(ControlPage.nbytes(1), "control")
    page = ControlPage(segment, 1)
    segment.close()
    return SharedMemoryGroup(page, 0, lambda: None)


def test_a_group_of_one_is_left_as_it_is() -> None:
    host = alone()
    for dtype in DTYPES:
        for length in lengths(dtype.itemsize)[:4]:
            tensor = made(length, dtype, seed=1)
            before = digest(tensor)
            host.all_reduce(tensor)
            host.broadcast(tensor)
            assert digest(tensor) == before
    assert host.sum([1.5, 2.0]) == [1.5, 2.0]
    (region,) = host.share(10)
    assert region.tolist() == [0] * 10


def test_strided_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        alone().all_reduce(torch.zeros(4, 4).t())


def test_memory_outlives_its_group_and_descriptors_do_not_outlive_the_memory() -> None:
    before = descriptors()
    host = alone()
    (region,) = host.share(100)
    host.close()
    del host
    gc.collect()
    assert region.fill_(3).sum() == 300
    del region
    assert descriptors() <= before
