"""Processes that join each other by an address alone, here mostly threads of one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headrace.collectives import ProcessGroup, join
from headrace.collectives.joining import _Process
from headrace.errors import PeerLost, UsageError

HOSTS = {"one host": ["a", "a", "a", "a"], "four hosts": ["a", "b", "c", "d"], "two of two": ["a", "b", "a", "b"]}


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def joined(address: str, hosts: Sequence[str], act: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Returns what `act` returned on each rank, or the error there."""
    results: list[Any] = [None] * len(hosts)

    def work(rank: int) -> None:
        try:
            group = join(rank, len(hosts), address, host=hosts[rank], start_timeout_s=30)
            try:
                results[rank] = act(group)
            finally:
                group.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("elements", [5, 100_003])
def test_all_verbs_are_sums_and_copies_by_hand(address: str, hosts: list[str], elements: int) -> None:
    seeded = [torch.Generator().manual_seed(rank) for rank in range(4)]
    owns = [torch.randn(elements, generator=generator, dtype=torch.float64) for generator in seeded]

    def act(group: ProcessGroup) -> list[torch.Tensor]:
        total, first = owns[group.rank].clone(), owns[group.rank].clone()
        group.all_reduce(total)
        group.broadcast(first)
        every, part = torch.empty(4 * elements, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
        group.all_gather_into(every, owns[group.rank])
        group.reduce_scatter(part, owns[group.rank][:4].contiguous())
        group.barrier()
        return [total, first, every, part, torch.tensor(group.sum([0.1 * group.rank]))]

    results = joined(address, hosts, act)
    for rank, (total, first, every, part, numbers) in enumerate(results):
        assert torch.allclose(total, sum(owns), rtol=0, atol=1e-12)
        assert torch.equal(total, results[0][0])
        assert torch.equal(first, owns[0])
        assert torch.equal(every, torch.cat(owns))
        assert torch.allclose(part, sum(owns)[rank : rank + 1], rtol=0, atol=1e-12)
        assert numbers.item() == pytest.approx(0.6)


@pytest.mark.parametrize("arguments", [(2, 2, "[::1]:1"), (-1, 2, "[::1]:1"), (0, 1, "127.0.0.1"), (0, 1, ":9")])
def test_what_is_no_rank_or_address_is_refused(arguments: tuple[int, int, str]) -> None:
    with pytest.raises(UsageError, match="are none"):
        join(*arguments)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"rank 0 cannot listen at .*give all another port"):
            join(0, 2, f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(address: str) -> None:
    with pytest.raises(PeerLost, match=r"rank 1 on .* has not joined within 0\.5 s"):
        join(0, 2, address, start_timeout_s=0.5)


def test_two_of_one_rank_or_of_different_worlds_are_refused(address: str) -> None:
    errors: list[Exception] = []

    def work(rank: int, world: int) -> None:
        try:
            join(rank, world, address, start_timeout_s=5).close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=each) for each in ((0, 2), (1, 3), (1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any("another process has joined as rank 1" in str(error) for error in errors)
    assert all(isinstance(error, UsageError | PeerLost) for error in errors)


@pytest.mark.slow
def test_a_process_that_ends_is_lost_to_those_who_wait(address: str) -> None:
    code = f"import os; from headrace.collectives import join; join(1, 2, {address!r}, host='a'); os._exit(0)"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        group = join(0, 2, address, host="a", start_timeout_s=60)
        with pytest.raises(PeerLost, match="rank 1 on a was lost: its process has ended"):
            group.barrier()
        group.close()
        assert other.wait() == 0


def test_a_process_has_ended_before_it_is_waited_for() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        process = _Process(child.pid)
        assert process.ended_for() == 0.0
        assert child.stdin
        child.stdin.close()
        # A zombie until Popen waits for it.
        while not process.ended_for():
            pass
    assert process.ended_for() > 0
