"""A backup equals its primary, bit for bit; and a promoted backup goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.parameter_server.server.server import Server
from headrace.parameter_server.server.snapshots import ServerState, unpack
from parameter_server.pairs import Group, until
from parameter_server.twins import OPTIMIZERS, REGIMES, WORKERS, Recipe, Worker
from transport.ways import WAYS


def state_of(server: Server) -> tuple[ServerState, dict[str, bytes]]:
    state, tensors = unpack(server.snapshot())
    return state, {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def pushed(workers: list[Worker], count: int) -> None:
    until(lambda: all(each.error or each.pushed >= count for each in workers), f"{count} pushes")
    for each in workers:
        if each.error is not None:
            raise each.error


def settled(group: Group, one: int, other: int) -> None:
    """Waits until both have dealt with all that there is, and ends them."""
    first, second = (group.runners[number].replicated for number in (one, other))
    until(lambda: not first._links.ends and not second._links.ends, "all ends are told")
    until(lambda: first._machine.last == second._machine.last, "the backup has got all")
    for number in (one, other):
        members = group.runners[number].server._members
        until(lambda members=members: not members._at, "the end of the last worker is handled")  # type: ignore[misc]
        group.runners[number].end()


def run(way: str, recipe: Recipe, count: int = 12) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Trains with a backup that comes in the middle; returns what both servers are at the end."""
    with Group(way, recipe.slots, recipe.server).running() as group:
        group.spawn()
        group.see(1, 0)
        workers = [Worker(way, recipe, number, group) for number in range(WORKERS)]
        try:
            pushed(workers, count // 2)
            group.spawn()
            group.see(2, 0, 1)
            pushed(workers, count)
        finally:
            for each in workers:
                each.stop()
        for each in workers:
            each.join()
        settled(group, 0, 1)
        return state_of(group.runners[0].server), state_of(group.runners[1].server)


def assert_same(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert [name for name in first[1] if first[1][name] != second[1][name]] == []


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("codec", ["plain", "bf16", "int8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_backup_is_its_primary_bit_for_bit(regime: str, optimizer: str, codec: str) -> None:
    first, second = run("local", Recipe(regime, optimizer, codec, extras=regime == "asynchronous"))
    assert_same(first, second)
    state, tensors = first
    assert max(shard.version for shard in state.shards) >= 6
    assert any(map(any, (tensors[f"parameter/{shard}"] for shard in range(4))))
    assert any(name.startswith("residual/pull/1/") for name in tensors) == (codec == "int8")
    assert not any(name.startswith("residual/pull/0/") for name in tensors), "it has said that it goes"
    assert any(name.startswith("state/") for name in tensors) == (optimizer != "sgd" or regime == "asynchronous")


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_a_backup_between_hosts_is_its_primary_bit_for_bit(regime: str) -> None:
    assert_same(*run("remote", Recipe(regime, "adam", "int8", extras=regime == "asynchronous")))


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("way", WAYS)
def test_workers_go_on_with_the_promoted_backup(way: str, regime: str) -> None:
    recipe = Recipe(regime, "adam", "int8", extras=regime == "asynchronous")
    with Group(way, recipe.slots, recipe.server).running() as group:
        for _ in range(3):
            group.spawn()
        group.see(1, 0, 1)
        workers = [Worker(way, recipe, number, group) for number in range(WORKERS)]
        try:
            pushed(workers, 8)
            group.runners[0].end()
            until(lambda: group.runners[1].replicated.severed, "the end is noticed")
            group.see(2, 1, 2)
            done = min(each.pushed for each in workers)
            pushed(workers, done + 8)
        finally:
            for each in workers:
                each.stop()
        for each in workers:
            each.join()
        settled(group, 1, 2)
        assert_same(state_of(group.runners[1].server), state_of(group.runners[2].server))
