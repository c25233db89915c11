"""Ranks of several hosts, as threads of one process: sums, bytes and codecs between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeVar

import pytest
import torch
from torch import Tensor

from collectives.seats import together
from headrace.collectives.base import HostMap, gather_texts
from headrace.collectives.compression import Compression
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.collectives.threads import ThreadCollective
from headrace.errors import PeerLost
from headrace.shared_memory.control_page import ControlPage

T = TypeVar("T")


def on_hosts(hosts: Sequence[str], act: Callable[[MultiHostGroup], T]) -> list[T]:
    """Runs `act` once a rank, each with a group of all; returns what they returned, by rank."""

    def accuse(error: Exception, suspect: int) -> NoReturn:
        raise PeerLost(suspect, hosts[suspect], str(error))

    def body(thread: ThreadCollective) -> T:
        page = ControlPage.create(len(hosts))
        watch = Watch(page, thread.check, accuse, 10.0)
        home = HostMap(tuple(hosts), "127.0.0.1")
        group = MultiHostGroup(watch, thread.rank, home, partial(gather_texts, thread))
        result = act(group)
        thread.barrier()
        group.close()
        return result

    return together(len(hosts), body)


def made(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (100 * values).to(dtype)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abacb", "aaa"])
def test_every_verb_among_hosts_with_any_number_of_ranks(hosts: str) -> None:
    world = len(hosts)

    def act(group: MultiHostGroup) -> list[Tensor]:
        sums = []
        for dtype, count in [(torch.float32, 3), (torch.float64, 70_001), (torch.int64, 300_000), (torch.bool, 70_000)]:
            tensor = made(group.rank, count, dtype)
            group.start_all_reduce(tensor)()
            sums.append(tensor)
        told = made(group.rank, 200_001)
        group.broadcast(told)
        every = group.gather(torch.full((3,), group.rank, dtype=torch.uint8))
        pieces = torch.tensor([[group.rank, to] for to in range(world)], dtype=torch.uint8)
        numbers = torch.tensor(group.sum([0.5, group.rank]))
        return [*sums, told, every, group.all_to_all(pieces), numbers]

    by_rank = on_hosts(list(hosts), act)
    *sums, told, every, _, numbers = by_rank[0]
    for total in sums:
        expected = torch.stack([made(rank, len(total), total.dtype) for rank in range(world)])
        assert torch.allclose(total, expected.any(0) if total.dtype is torch.bool else expected.sum(0), atol=1e-4)
    assert torch.equal(told, made(0, 200_001))
    assert every.tolist() == [[rank] * 3 for rank in range(world)]
    assert numbers.tolist() == [0.5 * world, sum(range(world))]
    for rank, (*same, given, again) in enumerate(by_rank):
        assert given.tolist() == [[giver, rank] for giver in range(world)]
        assert torch.equal(again, numbers)
        assert all(torch.equal(mine, first) for mine, first in zip(same, by_rank[0], strict=False))


@pytest.mark.parametrize(("codec", "bytes_an_element"), [("plain", 4), ("bf16", 2), ("int8", 1 + 4 / 256)])
@pytest.mark.parametrize("hosts", ["ab", "aabb", "abc"])
def test_of_l_ranks_each_moves_one_lth_of_a_hosts_bytes(hosts: str, codec: str, bytes_an_element: float) -> None:
    count = 300_000

    def act(group: MultiHostGroup) -> int:
        before = group.between_hosts_bytes
        tensor = made(group.rank, count)
        group.start_all_reduce(tensor, Compression(codec, tensor))()
        return group.between_hosts_bytes - before

    names = len(set(hosts))
    a_host = 2 * 2 * (names - 1) / names * count * bytes_an_element
    for moved in on_hosts(list(hosts), act):
        assert moved == pytest.approx(a_host * names / len(hosts), rel=0.03)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_all_ranks_read_the_same_bits_and_int8_makes_up_for_what_it_has_rounded(codec: str) -> None:
    rounds, count = 12, 100_000

    def act(group: MultiHostGroup) -> tuple[Tensor, float]:
        tensor, total, error = torch.empty(count), torch.zeros(count), 0.0
        compression = Compression(codec, tensor)
        for _ in range(rounds):
            tensor.copy_(made(group.rank, count))
            group.start_all_reduce(tensor, compression)()
            total += tensor
            error = max(error, float((tensor - exact).abs().max()))
        return total / rounds, error

    exact = made(0, count) + made(1, count) + made(2, count)
    (mean, once), *others = on_hosts(["a", "b", "a"], act)
    assert all(torch.equal(mean, other) for other, _ in others)
    of_mean = float((mean - exact).abs().max())
    assert 0 < of_mean <= once < 0.05 * float(exact.abs().max())
    if codec == "int8":
        assert of_mean < once / 3


@pytest.mark.parametrize("codec", ["plain", "bf16", "int8"])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(codec: str) -> None:
    def act(group: MultiHostGroup) -> Tensor:
        tensor = made(group.rank, 60_000)
        tensor[group.rank * 40_000] = torch.inf if group.rank else torch.nan
        group.start_all_reduce(tensor, Compression(codec, tensor))()
        return tensor

    first, second = on_hosts(["a", "b"], act)
    assert not first[0].isfinite()
    assert not first[40_000].isfinite()
    assert torch.equal(first.nan_to_num(7), second.nan_to_num(7))


def test_ranks_that_take_part_in_different_collectives_are_told() -> None:
    def act(group: MultiHostGroup) -> str:
        with pytest.raises(PeerLost) as caught:
            group.all_reduce(made(group.rank, 100_000 if group.rank else 200_000))
        return str(caught.value)

    assert any("takes part in another collective" in said for said in on_hosts(["a", "b"], act))
