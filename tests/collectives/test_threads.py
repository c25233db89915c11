"""Collectives of threads."""

from __future__ import annotations

import pytest
import torch

from collectives.scenarios import DTYPES, digest, made
from collectives.seats import together
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import PeerLost

WORLDS = [1, 2, 5]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_has_the_same_bits_on_every_rank_in_rank_order(world: int, dtype: torch.dtype) -> None:
    def act(host: ThreadCollective) -> str:
        tensor = made(37, dtype, seed=host.rank)
        host.all_reduce(tensor)
        return digest(tensor)

    expected = made(37, dtype, seed=0)
    for rank in range(1, world):
        expected += made(37, dtype, seed=rank)
    assert together(world, act) == [digest(expected)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_everybody_gets_what_everybody_has_and_what_it_is_given(world: int) -> None:
    def act(host: ThreadCollective) -> tuple[list[list[int]], list[list[int]]]:
        own = torch.tensor([200 + host.rank, 7], dtype=torch.uint8)
        pieces = torch.tensor([[host.rank, to, 255] for to in range(world)], dtype=torch.uint8)
        uneven = [[(s + 2 * t) % 3 for t in range(world)] for s in range(world)]
        rows = [torch.full((n,), 10 * host.rank + to, dtype=torch.uint8) for to, n in enumerate(uneven[host.rank])]
        for giver, taken in enumerate(host.all_to_all_uneven(rows, uneven)):
            assert taken.tolist() == [10 * giver + host.rank] * uneven[giver][host.rank]
        return host.gather(own).tolist(), host.all_to_all(pieces).tolist()

    for rank, (gathered, given) in enumerate(together(world, act)):
        assert gathered == [[200 + peer, 7] for peer in range(world)]
        assert given == [[peer, rank, 255] for peer in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_broadcast_brings_the_bits_of_rank_0(world: int) -> None:
    def act(host: ThreadCollective) -> str:
        tensor = made(300, torch.float32, seed=host.rank)
        host.broadcast(tensor)
        return digest(tensor)

    assert together(world, act) == [digest(made(300, torch.float32, seed=0))] * world


@pytest.mark.parametrize("world", WORLDS)
def test_numbers_are_added_in_rank_order(world: int) -> None:
    total = 0.0
    for rank in range(world):
        total += 0.1 * rank
    assert together(world, lambda host: host.sum([0.1 * host.rank] * 40)) == [[total] * 40] * world


@pytest.mark.parametrize("world", WORLDS)
def test_everybody_sees_what_everybody_shares(world: int) -> None:
    def act(host: ThreadCollective) -> list[int]:
        regions = host.share(10 * host.rank)
        regions[host.rank].fill_(1)
        host.barrier()
        return [int(region.sum()) for region in regions]

    assert together(world, act) == [[10 * rank for rank in range(world)]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_verbs_follow_each_other_without_mixing(world: int) -> None:
    def act(host: ThreadCollective) -> list[int]:
        wrong = []
        for turn in range(300):
            tensor = torch.full((3,), float(turn + host.rank))
            host.start_all_reduce(tensor)()
            (number,) = host.sum([turn + host.rank])
            if not tensor[0] == tensor[2] == number == world * turn + world * (world - 1) // 2:
                wrong.append(turn)
        return wrong

    assert together(world, act) == [[]] * world


def test_groups_of_ranks_act_by_themselves() -> None:
    def act(host: ThreadCollective) -> list[list[float]]:
        row, column = host.rank // 2 * 2, host.rank % 2
        groups = (host.subgroup([row, row + 1]), host.subgroup([column, column + 2]), host)
        return [[*group.sum([host.rank]), group.rank, group.world] for group in groups]

    expected = [[[1, 0, 2], [2, 0, 2]], [[1, 1, 2], [4, 0, 2]], [[5, 0, 2], [2, 1, 2]], [[5, 1, 2], [4, 1, 2]]]
    assert together(4, act) == [[*each, [6, rank, 4]] for rank, each in enumerate(expected)]


def test_one_that_fails_ends_the_waits_of_groups_it_does_not_belong_to() -> None:
    def act(host: ThreadCollective) -> None:
        group = host.subgroup([host.rank // 2 * 2, host.rank // 2 * 2 + 1])
        if host.rank == 3:
            raise KeyError("mine")
        if host.rank < 2:
            group.barrier()
        if host.rank != 1:
            group.barrier()

    with pytest.raises(KeyError, match="mine"):
        together(4, act)


def test_waits_end_with_the_name_of_the_thread_that_failed() -> None:
    meeting = ThreadGroup(3)
    meeting.abort(2)
    meeting.abort(1)  # a consequence, not the cause
    with pytest.raises(PeerLost, match="rank 2"):
        ThreadCollective(meeting, 0).barrier()


def test_one_that_fails_lets_the_others_go() -> None:
    def act(host: ThreadCollective) -> None:
        if host.rank == 1:
            raise KeyError("mine")
        host.barrier()

    with pytest.raises(KeyError, match="mine"):
        together(3, act)
