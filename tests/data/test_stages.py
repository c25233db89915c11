"""Where the time of a worker's input goes, and how many examples may be left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headrace.data import InputPipeline, Loader, as_pipeline, from_arrays
from headrace.data.loading import loader as stages_module
from headrace.data.loading.loader import InputCounters
from headrace.data.loading.reader import ReadResult
from headrace.errors import DataError
from headrace.spec.events import InputStageStats, InputStats

BATCH = (torch.zeros(4, 2), torch.zeros(4))
"""48 bytes."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What time it is next."""
    times: list[float] = []
    monkeypatch.setattr(stages_module, "perf_counter", lambda: times.pop(0))
    yield times
    assert times == []


def test_counts_are_sums(clock: list[float]) -> None:
    clock += [10.5, 12.0]
    stages = InputCounters(("source", "map(f)", "batch"), (False, True, False), 100)
    stages.parallel, stages.readers = "threads", 2
    stages.add(0, ReadResult(BATCH, 4, (), (0.2, 0.1, 0.1), (0.1, 0.0, 0.0)), asked=10.0, ready=1)
    stages.add(0, ReadResult(BATCH, 3, ("b: gone",), (0.4, 0.2, 0.1), (0.2, 0.0, 0.0)), asked=11.0, ready=2)
    fed = stages.event(1, 7.0)
    assert fed == InputStats(
        rank=1,
        time_s=7.0,
        parallel="threads",
        readers=2,
        seconds=2.0,
        waited_s=1.5,
        ready=3,
        batches=2,
        examples=7,
        bytes=96,
        skipped=1,
        stages=(
            InputStageStats("source", pytest.approx(0.6), pytest.approx(0.3)),
            InputStageStats("map(f)", pytest.approx(0.3), 0.0, draws=True),
            InputStageStats("batch", pytest.approx(0.2), 0.0),
        ),
    )


def test_it_speaks_about_once_a_second(clock: list[float]) -> None:
    clock += [0.1, 0.9, 1.1, 1.5, 2.0, 2.2]
    heard: list[int] = []
    stages = InputCounters(("source", "batch"), (False, False), 0, lambda told: heard.append(told.examples))
    for asked in (0.0, 0.8, 1.0, 1.4, 1.9, 2.1):
        stages.add(0, ReadResult(BATCH, 4, (), (0.0, 0.0)), asked)
    assert heard == [12, 24]


def odd_ones(count: int, bad: set[int], most: int) -> InputPipeline:
    def check(example: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if int(example[0]) in bad:
            raise ValueError(f"{int(example[0])} is odd")
        return example

    return from_arrays(torch.arange(count)).map(check).on_error("skip", most)


def test_as_many_may_be_left_out_as_was_said_in_every_epoch() -> None:
    loader = Loader(odd_ones(12, {3, 7}, 2), 0, 4, (1,), 0)
    shares = list(islice(loader.rounds(), 9))
    assert [share.batch[0].tolist() for share in shares[:3]] == [[0, 1, 2], [4, 5, 6], [8, 9, 10, 11]]
    assert loader.counters.skipped == 6
    assert loader.counters.shown[0] == "example 3: map(check) raised ValueError: 3 is odd"


def test_one_more_ends_it_with_the_first_of_them() -> None:
    loader = Loader(odd_ones(12, {3, 7, 9}, 2), 0, 4, (1,), 0)
    shares = loader.rounds()
    assert [next(shares).examples for _ in range(2)] == [3, 3]
    with pytest.raises(DataError, match=r"3 examples of epoch 0 .*most=2.* The first: example 3: .* is odd; .*7"):
        next(shares)


def test_every_sweep_over_evaluation_data_counts_anew() -> None:
    loader = Loader(odd_ones(8, {3, 4}, 2), 0, 4, (1,), 0, ordered=True)
    for _ in range(3):
        assert sum(share.examples for share in loader.sweep()) == 6


class Examples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


@pytest.mark.slow
def test_the_processes_of_a_data_loader_count_too() -> None:
    pipeline, _ = as_pipeline(DataLoader(Examples(), num_workers=2))
    loader = Loader(pipeline, 0, 4, (1,), 0)
    assert sum(share.examples for share in loader.rounds(0, 3)) == 12
    fed = loader.counters.event(0, 0.0)
    assert (fed.parallel, fed.readers, fed.batches, fed.examples) == ("processes", 2, 3, 12)


@pytest.mark.parametrize("parallel", ["inline", "threads"])
def test_a_loader_says_what_each_stage_costs(parallel: str) -> None:
    def sleep(example: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return example

    def compute(example: torch.Tensor) -> torch.Tensor:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return example

    pipeline = from_arrays(torch.arange(12)).map(sleep, parallel=parallel).map(compute)
    loader = Loader(pipeline, 0, 4, (1,), 0)
    shares = loader.rounds()
    for _ in range(3):
        next(shares)
    shares.close()
    fed = loader.counters.event(0, 0.0)
    names = [stage.name for stage in fed.stages]
    assert names == ["source", "map(sleep)", "map(compute)", "batch"]
    slept, computed = fed.stages[1], fed.stages[2]
    assert slept.busy_s >= 12 * 0.002
    assert slept.waiting_s >= 0.8 * slept.busy_s
    assert computed.busy_s - computed.waiting_s >= 12 * 0.0019
    assert (fed.parallel, fed.batches, fed.examples, fed.bytes) == (parallel, 3, 12, 96)
    assert fed.seconds >= fed.waited_s > 0
