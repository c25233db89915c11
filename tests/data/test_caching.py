"""A cache in a pipeline: what stands before is done once, what stands behind each time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headrace as hr
from headrace.data import (
    CpuBudget,
    InputPipeline,
    Loader,
    Source,
    as_pipeline,
    from_arrays,
    from_files,
    interleave,
    mix,
    read_by,
)
from headrace.data.loading.autotune import ReadMode, ReadModes
from headrace.data.pipeline.source import Epoch
from headrace.data.pipeline.steps import Cache
from headrace.errors import DataError, UsageError
from headrace.spec.job import Share

COUNT = 20


class Calls:
    """Counts who was asked for what."""

    def __init__(self) -> None:
        self.done: Counter[int] = Counter()

    def __call__(self, example: Any) -> Any:
        number = int(example[0] if isinstance(example, tuple) else example)
        self.done[number] += 1
        return example


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory" if request.param == "memory" else str(tmp_path / "cache")


def numbers() -> InputPipeline:
    """Returns a pipeline that reads when it is asked, so that what is done can be counted."""
    return from_arrays(torch.arange(COUNT), torch.arange(COUNT) * 2.0).prefetch(0)


def epochs(pipeline: InputPipeline, count: int, size: int = 6) -> list[list[Share]]:
    loader = Loader(pipeline, 0, size, (1,), 0)
    shares = loader.rounds()
    return [[next(shares) for _ in range(loader.rounds_per_epoch)] for _ in range(count)]


def seen(shares: Iterable[Share]) -> list[int]:
    return [number for share in shares for number in share.batch[0].tolist()]


def test_what_stands_before_is_done_once_and_what_stands_behind_each_time(where: str) -> None:
    before, behind = Calls(), Calls()
    pipeline = numbers().shuffle().map(before).cache(where, key="a").map(behind)
    for epoch in epochs(pipeline, 3):
        assert sorted(seen(epoch)) == list(range(COUNT))
    assert set(before.done.values()) == {1}
    assert set(behind.done.values()) == {3}
    assert len(before.done) == len(behind.done) == COUNT


@pytest.mark.parametrize("parallel", ["inline", 3])
def test_batches_are_what_they_are_without_a_cache(where: str, parallel: str | int) -> None:
    def noise(example: Any, rng: np.random.Generator) -> Any:
        return example[0], example[1] + float(rng.random())

    ahead = numbers().prefetch(0 if parallel == "inline" else 4)
    plain = ahead.shuffle().map(lambda example: (example[0] + 1, example[1]), parallel=parallel)
    for behind in (lambda pipeline: pipeline, lambda pipeline: pipeline.map(noise)):
        kept = behind(plain.cache(where, key="a"))
        for one, other in zip(chain(*epochs(kept, 3)), chain(*epochs(behind(plain), 3)), strict=True):
            assert type(one.batch) is type(other.batch) is tuple
            assert all(torch.equal(a, b) for a, b in zip(one.batch, other.batch, strict=True))
            assert (one.examples, one.of, one.epoch) == (other.examples, other.of, other.epoch)


def test_a_later_run_finds_what_an_earlier_one_made(tmp_path: Path) -> None:
    def double(example: Any) -> Any:
        return example[0], example[1] * 2

    first = seen(epochs(numbers().map(double).cache(tmp_path), 1)[0])
    source = numbers()
    taken: list[int] = []
    object.__setattr__(source.source, "example", lambda index, epoch: taken.append(index))
    assert seen(epochs(source.map(double).cache(tmp_path), 1)[0]) == first
    assert taken == []


def test_other_code_makes_the_folder_anew(tmp_path: Path) -> None:
    def scaled(by: int) -> InputPipeline:
        return numbers().map(lambda example: (example[0], example[1] * by)).cache(tmp_path)

    for by in (2, 3):
        loader = Loader(scaled(by), 0, COUNT, (1,), 0)
        (share,) = loader.sweep()
        assert share.batch[1].tolist() == [2.0 * by * number for number in range(COUNT)]
        assert ["made anew" in line for line in loader.counters.notices] == ([] if by == 2 else [True])
        del loader


def test_other_data_makes_the_folder_anew(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        (share,) = epochs(from_arrays(torch.full((3, 2), value)).cache(tmp_path), 1)[0]
        assert share.batch[0].unique().tolist() == [value]


def test_what_a_filter_leaves_out_stays_left_out(where: str) -> None:
    asked = Calls()

    def odd(example: Any) -> bool:
        return bool(asked(example)[0] % 2)

    for more in (lambda pipeline: pipeline, lambda pipeline: pipeline.map(lambda example: example)):
        asked.done.clear()
        pipeline = more(numbers().shuffle().filter(odd).cache(where, key=str(more)))
        for epoch in epochs(pipeline, 3):
            assert sorted(seen(epoch)) == list(range(1, COUNT, 2))
        assert set(asked.done.values()) == {1}
        del pipeline


def test_what_cannot_be_had_is_tried_again_in_every_epoch(where: str) -> None:
    tried = Calls()

    def fails(example: Any) -> Any:
        tried(example)
        if example[0] % 5 == 0:
            raise ValueError("a bad one")
        return example

    for epoch in epochs(numbers().map(fails).cache(where, key="a").on_error("skip"), 3):
        assert seen(epoch) == [number for number in range(COUNT) if number % 5]
    assert tried.done == {number: 1 if number % 5 else 3 for number in range(COUNT)}


def test_functions_that_take_lists_get_only_what_is_missing(where: str) -> None:
    lists: list[list[int]] = []

    def many(examples: list[Any]) -> list[Any]:
        lists.append([int(example[0]) for example in examples])
        return examples

    pipeline = numbers().shuffle().map(many, batched=True).cache(where, key="a").map(lambda example: example)
    Loader(pipeline.take(7), 0, 7, (1,), 0).portion(0, 0, 1)
    epochs(pipeline, 2)
    assert sorted(lists[0]) == list(range(7))
    assert sorted(chain(*lists)) == list(range(COUNT))
    assert all(lists)


def test_parts_and_repetitions_share_a_cache_by_the_index_in_the_source(where: str) -> None:
    before = Calls()
    pipeline = numbers().map(before).cache(where, key="a")
    parts = [sorted(seen(epochs(pipeline.split(rank, 2).repeat(2), 1)[0])) for rank in range(2)]
    assert [part[::2] for part in parts] == [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))]
    assert seen(epochs(pipeline.take(3), 1)[0]) == [0, 1, 2]
    assert set(before.done.values()) == {1}


def test_padding_and_a_collate_of_its_own_still_apply(where: str) -> None:
    rows = [(torch.arange(length), length) for length in range(1, 6)]
    padded = as_pipeline(rows)[0].cache(where, key="a").batch(pad=-1)
    for epoch in epochs(padded, 2, size=5):
        assert epoch[0].batch[0].shape == (5, 5)
    loader = torch.utils.data.DataLoader(rows, batch_size=5, collate_fn=lambda examples: torch.tensor(len(examples)))
    collated = as_pipeline(loader)[0].cache(where, key="b")
    assert [int(epoch[0].batch) for epoch in epochs(collated, 2, size=5)] == [5, 5]


def test_steps_behind_may_write_in_place(where: str) -> None:
    def spoil(example: Any) -> Any:
        example[0].add_(1)
        return example

    pipeline = from_arrays(torch.zeros(4, 3), torch.arange(4)).cache(where).map(spoil)
    for epoch in epochs(pipeline, 3, size=4):
        assert epoch[0].batch[0].unique().tolist() == [1.0]


def test_a_cache_of_a_part_of_a_mixture(where: str) -> None:
    before = Calls()
    kept = numbers().shuffle().map(before).cache(where, key="a")
    for epoch in epochs(mix(kept, numbers()).shuffle(), 3):
        assert sorted(seen(epoch)) == sorted(2 * list(range(COUNT)))
    assert set(before.done.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["threads", "processes"])
def test_every_reader_tells_the_user(tmp_path: Path, parallel: str) -> None:
    pipeline = numbers().map(lambda example: example, parallel=parallel).prefetch(3).cache(tmp_path, limit=1000)
    for _ in range(2):
        loader = Loader(pipeline, 0, 6, (1,), 0)
        assert sorted(seen(loader.sweep())) == list(range(COUNT))
        assert loader.counters.notices
        assert all("it is full with" in line for line in loader.counters.notices)
        del loader
        pipeline = copy.deepcopy(pipeline)


@pytest.mark.parametrize("folder", [None, "cache"])
def test_no_processes_are_started_unasked_where_each_would_have_its_own_cache(
    tmp_path: Path, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def first(ways: ReadModes, read_s: float) -> ReadMode:
        asked.append(ways.kinds)
        return ReadMode("threads", 1)

    monkeypatch.setattr(ReadModes, "first", first)
    pipeline = from_arrays(torch.arange(COUNT)).cache("memory" if folder is None else tmp_path / folder)
    assert (
        sum(share.examples for share in Loader(pipeline, 0, 4, (1,), 0, cpu_budget=CpuBudget(cores=4)).sweep()) == COUNT
    )
    assert [("processes" in kinds) for kinds in asked] == [folder is not None]


def test_a_full_memory_says_so() -> None:
    pipeline = from_arrays(torch.zeros(100, 1000)).cache("memory", limit=50_000).map(lambda example: example)
    loader = Loader(pipeline, 0, 10, (1,), 0)
    for _ in range(2):
        assert sum(share.examples for share in loader.sweep()) == 100
    (line,) = loader.counters.notices
    assert "the cache in memory keeps 11 of 100 examples, it is full with" in line


@pytest.mark.slow
def test_the_user_is_told(tmp_path: Path) -> None:
    def job(by: float) -> hr.Job:
        return hr.Job(
            model=nn.Linear(4, 2), loss=lambda output, target: nn.functional.cross_entropy(output, target),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            data=from_arrays(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
            .map(lambda example: (example[0] * by, example[1])).cache(tmp_path / "cache", limit=1000),
            global_batch_size=4, epochs=2,
        )  # fmt: skip

    lines = []
    for by in (1.0, 2.0):
        run = hr.fit(job(by), run_dir=tmp_path / str(by))
        lines.append([event.text for event in run.events if event.kind == "notice" and "cache" in event.text])
    assert len(lines[0]) == 1
    assert "it is full" in lines[0][0]
    assert any("made anew" in line for line in lines[1])


class Unknown(Source):
    """A source that cannot tell whether it has changed."""

    def __len__(self) -> int:
        return 3

    def example(self, index: int, epoch: Epoch) -> Any:
        return torch.tensor(index)

    @property
    def identity(self) -> str:
        return ""


def augment(example: Any, rng: Any) -> Any:
    return example


@pytest.mark.parametrize(
    ("pipeline", "arguments", "said"),
    [
        (numbers().map(augment), {"where": "memory"}, r"map\(augment\) draws random numbers"),
        (numbers().filter(augment), {"where": "memory"}, r"filter\(augment\) draws random numbers"),
        (numbers().cache("memory"), {"where": "memory"}, r"cache\(memory\) stands before this cache already"),
        (mix(numbers(), numbers()), {"where": "memory"}, "mixed or interleaved .* cache its parts"),
        (interleave(numbers(), numbers()), {"where": "memory"}, "mixed or interleaved"),
        (InputPipeline(Unknown()), {"where": "folder"}, "a Unknown cannot tell whether .* key="),
        (as_pipeline([(1, 2)])[0], {"where": "folder"}, "a DatasetSource cannot tell"),
        (numbers(), {"where": "memory", "limit": 0}, "limit must be a whole number of bytes of at least 1, got 0"),
        (numbers(), {"where": "memory", "limit": True}, "limit must be"),
    ],
)  # fmt: skip
def test_where_a_cache_cannot_stand(pipeline: InputPipeline, arguments: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pipeline.cache(**arguments)


def test_two_pipelines_of_a_job_or_a_mixture_have_no_folder_in_common(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept, other = numbers().cache(folder), numbers().take(4).map(lambda e: e).cache(folder)
    said = rf"two pipelines keep their cache in {folder}, of .* folder of its own: .cache\('{folder}-2'\)"
    with pytest.raises(UsageError, match=said):
        mix(kept, other)
    job = hr.Job(
        model=lambda: nn.Linear(1, 1),
        task=hr.tasks.regression(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=mix(kept, kept.take(2)),
        eval_data=other,
        global_batch_size=4,
        epochs=1,
    )
    with pytest.raises(UsageError, match=said):
        hr.fit(job)
    assert not folder.exists(), "nothing was read"


def test_what_draws_may_stand_behind() -> None:
    assert [step.name for step in numbers().cache("memory").map(augment).steps] == ["cache(memory)", "map(augment)"]


def test_arrays_too_large_to_be_looked_at_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.data.pipeline.source._MOST_HASHED", 100)
    with pytest.raises(UsageError, match="ArraySource cannot tell"):
        numbers().cache("folder")
    assert numbers().cache("folder", key="mine").steps


def test_the_key_follows_what_is_before_and_nothing_else(tmp_path: Path) -> None:
    def key(pipeline: InputPipeline, **more: Any) -> str:
        return next(step.key for step in pipeline.cache(tmp_path, **more).steps if isinstance(step, Cache))

    def one(example: Any) -> Any:
        return example

    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
    pipelines = [
        numbers(), numbers().map(one), numbers().map(one, field=0), numbers().map(one, batched=True),
        numbers().filter(one), numbers().map(one).map(one), from_arrays(torch.arange(COUNT)),
        from_arrays({"a": torch.arange(COUNT)}), from_files(str(tmp_path / "a")), from_files(str(tmp_path / "b")),
    ]  # fmt: skip
    keys = [key(pipeline) for pipeline in pipelines]
    assert len({*keys, key(numbers(), key="a"), key(numbers(), key="b")}) == len(pipelines) + 2
    assert key(numbers().shuffle().take(3).prefetch(4).batch(5)) == keys[0]


def test_an_example_that_cannot_be_kept() -> None:
    pipeline = numbers().map(lambda example: (object(), 1)).cache("memory")
    with pytest.raises(DataError, match=r"example 0\[0\] is a builtins.object, which a cache cannot keep"):
        epochs(pipeline, 1)


def test_a_definition_that_is_copied_has_a_cache_of_its_own() -> None:
    before = Calls()
    pipeline = numbers().map(before).cache("memory")
    epochs(pipeline, 1)
    epochs(copy.deepcopy(pipeline), 1)
    epochs(pipeline, 1)
    assert set(before.done.values()) == {1}


def test_data_that_is_read_in_another_way_has_the_same_batches() -> None:
    def augmented(example: Any, rng: np.random.Generator) -> Any:
        return example[0] + rng.random(), example[1]

    calls = Calls()
    pipeline = from_arrays(torch.arange(COUNT, dtype=torch.float64), torch.arange(COUNT)).shuffle()
    pipeline = pipeline.map(calls).map(augmented).map(calls).batch(4)
    wanted = [batch for epoch in range(3) for batch in hr.data.batches(pipeline, epoch=epoch)]
    changed = read_by(pipeline, "threads", "memory", 2)
    # Behind the last step before the first that draws random numbers.
    assert [step.name.partition("(")[0] for step in changed.steps] == ["map", "cache", "map", "map"]
    found = [batch for epoch in range(3) for batch in hr.data.batches(changed, epoch=epoch)]
    for one, other in zip(found, wanted, strict=True):
        assert all(map(torch.equal, one, other))
    with pytest.raises(UsageError, match="has a cache already"):
        read_by(changed, cache="memory")


def test_of_a_loader_with_workers_only_their_number_is_changed() -> None:
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=1)
    changed = read_by(loader, 3).processes
    assert changed is not None
    assert changed.count == 3
    with pytest.raises(UsageError, match="reads with workers of its own; give their number"):
        read_by(loader, "threads")
