"""What a process has of a cache."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from belongings import private_bytes
from headrace.data.cache.shards import FileShards, MemoryShards, Shards
from headrace.data.cache.store import Store
from headrace.data.pipeline.steps import Absent

LIMIT = 1 << 20


@pytest.fixture(params=["memory", "disk"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Shards:
    return MemoryShards(LIMIT) if request.param == "memory" else FileShards(tmp_path)


def example(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((4,), index), index


def values(store: Store, indices: list[int]) -> list[Any]:
    return [absent or store.example(index) for index, absent in zip(indices, store.find(indices), strict=True)]


def test_what_was_put_is_found(shards: Shards) -> None:
    store = Store(shards, 10, None, "the cache")
    store.put([(3, example(3)), (5, Absent.LEFT_OUT)])
    found = values(store, [3, 4, 5, 3])
    assert found[1:3] == [Absent.MISSING, Absent.LEFT_OUT]
    for each in (found[0], found[3]):
        assert each[0].tolist() == [3, 3, 3, 3]
        assert each[1] == 3
    assert store.take_notices() == ()


def test_what_is_handed_out_can_be_changed_and_the_cache_does_not(shards: Shards) -> None:
    store = Store(shards, 10, None, "the cache")
    tensor, array = torch.zeros(50), np.zeros(50)
    store.put([(0, (tensor, array))])
    tensor += 1
    array += 1
    for _ in range(2):
        kept = store.find([0]) == [None] and store.example(0)
        assert (float(kept[0].sum()), float(kept[1].sum())) == (0, 0)
        kept[0].add_(1)
        kept[1][:] = 1
    found = store.gather(np.array([0]))
    assert found is not None
    found[0][0].add_(1)
    assert float(store.example(0)[0].sum()) == 0


def test_a_batch_is_gathered_without_what_is_left_out(shards: Shards) -> None:
    store = Store(shards, 10, None, "the cache")
    store.put([(index, example(index)) for index in range(4)])
    store.put([(4, Absent.LEFT_OUT)])
    found = store.gather(np.array([2, 4, 0, 2]))
    assert found is not None
    (rows, labels), count = found
    assert (rows[:, 0].tolist(), labels.tolist(), count) == ([2, 0, 2], [2, 0, 2], 3)
    assert store.gather(np.array([4])) is None
    assert store.gather(np.array([0, 5])) is None


def test_examples_of_different_forms_are_not_gathered(shards: Shards) -> None:
    store = Store(shards, 10, None, "the cache")
    store.put([(0, torch.zeros(3)), (1, torch.zeros(4)), (2, "text")])
    assert store.gather(np.array([0, 1])) is None
    assert store.gather(np.array([2])) is None
    assert store.gather(np.array([0, 0])) is not None


def test_more_forms_than_are_remembered(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.data.cache.store._MOST_LAYOUTS", 2)
    store = Store(shards, 10, None, "the cache")
    store.put([(index, torch.full((index,), index)) for index in range(6)])
    assert [each.tolist() for each in values(store, list(range(6)))] == [[index] * index for index in range(6)]
    assert store.gather(np.array([4, 4])) is None


def test_when_it_is_full_it_keeps_what_it_has_and_says_so_once(shards: Shards) -> None:
    store = Store(shards, 100, 2000, "the cache in memory")
    for index in range(100):
        store.put([(index, example(index))])
    kept = store.find(list(range(100))).index(Absent.MISSING)
    assert 0 < kept < 100
    assert 0.9 * 2000 <= shards.nbytes <= 2000
    assert all(absent is Absent.MISSING for absent in store.find(list(range(kept, 100))))
    assert values(store, [0])[0][1] == 0
    (line,) = store.take_notices()
    assert line == (
        f"the cache in memory keeps {kept} of 100 examples, it is full with {shards.nbytes:,} bytes; the rest is made "
        "anew in every epoch; raise its limit"
    )
    store.put([(kept, example(kept))])
    assert store.take_notices() == ()


def test_an_example_is_kept_once(shards: Shards) -> None:
    store = Store(shards, 10, None, "the cache")
    store.put([(1, example(1)), (1, example(1))])
    once = shards.nbytes
    store.put([(1, example(1))])
    assert shards.nbytes == once


@pytest.mark.slow
def test_threads_use_one_store(shards: Shards) -> None:
    store = Store(shards, 300, None, "the cache")

    def use(indices: list[int]) -> bool:
        found = store.find(indices)
        store.put([(index, example(index)) for index, absent in zip(indices, found, strict=True) if absent])
        gathered = store.gather(np.array(indices))
        return gathered is not None and gathered[0][1].tolist() == indices

    dice = np.random.default_rng(0)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(use, dice.integers(0, 300, 10).tolist()) for _ in range(300)]
        assert all(job.result(timeout=60) for job in jobs)
    assert store.take_notices() == ()


def grown_by(length: int, limit: int) -> tuple[int, int, int]:
    """Puts twice as much as fits; returns by how much the process grew, what was said, and what is found of the first.

    For a process of its own: what others give back or take meanwhile would be counted as the cache's.
    """
    rows = torch.zeros(length, dtype=torch.uint8)
    count = 2 * limit // (length + 200)
    # What is loaded when it is first used is not the cache's.
    Store(MemoryShards(limit), 1, limit, "the cache in memory").put([(0, rows)])
    before = private_bytes()
    store = Store(MemoryShards(limit), count, limit, "the cache in memory")
    for start in range(0, count, 32):
        store.put([(index, rows) for index in range(start, start + 32)])
    grown = private_bytes() - before
    return grown, len(store.take_notices()), store.find(range(int(0.9 * limit / (length + 300)))).count(None)


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "limit"),
    [(1, 16 << 20), pytest.param(20_000, 100 << 20, marks=pytest.mark.full), (3_000_000, 100 << 20)],
)
def test_the_limit_of_memory_is_what_the_process_grows_by(
    length: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Freed at once: how much of what is free malloc keeps is not the cache's, and differs between ways to start.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 20))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        grown, said, found = pool.submit(grown_by, length, limit).result(timeout=120)
    # Seen are 1.05; all that was put takes twice the limit.
    assert grown < 1.3 * limit
    assert said == 1
    assert found == int(0.9 * limit / (length + 300))
