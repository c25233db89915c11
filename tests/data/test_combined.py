"""Pipelines made of several."""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.test_steps import values
from headrace.data import Epoch, InputPipeline, as_pipeline, batches, from_arrays, from_torch, interleave, local, mix
from headrace.data.loading.loader import Loader
from headrace.errors import DataError, UsageError


def marked(which: int, count: int) -> InputPipeline:
    """Examples that say where they are from: 1000 times the pipeline, and the index."""
    return from_arrays(torch.arange(count) + 1000 * which)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(LENGTHS, st.integers(1, 7))
def test_interleaved_every_example_comes_once_in_turn(lengths: list[int], block: int) -> None:
    pipelines = [marked(which, length) for which, length in enumerate(lengths)]
    expected, at = [], [0] * len(lengths)
    while any(place < length for place, length in zip(at, lengths, strict=True)):
        for which, length in enumerate(lengths):
            stop = min(at[which] + block, length)
            expected += [1000 * which + place for place in range(at[which], stop)]
            at[which] = stop
    assert values(interleave(*pipelines, block=block), 7) == expected


@given(LENGTHS)
def test_without_weights_they_follow_each_other(lengths: list[int]) -> None:
    pipelines = [marked(which, length) for which, length in enumerate(lengths)]
    whole = [1000 * which + place for which, length in enumerate(lengths) for place in range(length)]
    assert values(mix(*pipelines), 5) == whole
    assert sorted(values(mix(*pipelines).shuffle(), 5)) == sorted(whole)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=4), st.integers(1, 4))
def test_weights_are_kept_everywhere_and_epochs_go_on(given_: list[tuple[int, int]], epochs: int) -> None:
    lengths, weights = zip(*given_, strict=True)
    mixed = mix(*(marked(which, length) for which, length in enumerate(lengths)), weights=weights)
    loader = Loader(mixed, 0, len(mixed), (1,), 0)
    shares = loader.rounds()
    seen = [value for _ in range(epochs) for value in next(shares).batch[0].tolist()]
    counts = Counter(value // 1000 for value in seen)
    for which, weight in enumerate(weights):
        # Never a whole example behind or ahead of its part.
        assert abs(counts[which] - len(seen) * weight / sum(weights)) < 1 + 1e-9
        places = [value % 1000 for value in seen if value // 1000 == which]
        assert places == [at % lengths[which] for at in range(len(places))], "each goes through its own epochs"


def test_a_part_keeps_its_own_order_and_transforms() -> None:
    small = marked(1, 5).shuffle(seed=3).map(lambda e: (e[0] + 500,))
    mixed = mix(marked(0, 15), small, weights=(3, 1))
    shares = Loader(mixed, 0, 20, (1,), 0).rounds()
    first, second = ([value - 1500 for value in next(shares).batch[0].tolist() if value >= 1500] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second, "a new order in every epoch of its own"
    again = Loader(mixed, 0, 20, (1,), 0).rounds(1)
    assert [value - 1500 for value in next(again).batch[0].tolist() if value >= 1500] == second


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda: mix(), "at least one"),
        (lambda: mix(marked(0, 1), weights=(1, 2)), "as many weights"),
        (lambda: mix(marked(0, 1), marked(1, 1), weights=(1, 0)), "above 0"),
        (lambda: mix(marked(0, 1), marked(1, 1), weights=(1, 1e-6)), "small whole numbers"),
        (lambda: mix(marked(0, 1), marked(1, 1), weights=(1e-6, 1e-6)), "small whole numbers"),
        (lambda: interleave(), "at least one"),
        (lambda: interleave(marked(0, 1), block=0), "block must be"),
        (lambda: mix(local(marked(0, 1)), local(marked(1, 1))), r"mark the whole: hr.data.local\(hr.data.mix"),
        (lambda: interleave(marked(0, 1), local(marked(1, 1))), "each host has other examples"),
        (
            lambda: mix(marked(0, 1), marked(1, 1).on_error("skip")),
            r'part 2 of 2 has on_error\("skip"\), .*of the whole',
        ),
        (lambda: mix(marked(0, 1).filter(bool), marked(1, 1)), r"part 1 of 2 has a filter, .*mix\(...\).filter\(fn\)"),
        (lambda: interleave(marked(0, 1).batch(pad=0)), r"part 1 of 1 has batch\(pad=...\), .*mix\(...\).batch"),
        (
            lambda: mix(as_pipeline(DataLoader([(1.0,)], num_workers=1))[0]),
            r"part 1 of 1 has a DataLoader's num_workers=1, .*hr.data.from_torch\(loader.dataset\)",
        ),
        (
            lambda: mix(marked(0, 1).map(abs, parallel="threads"), marked(1, 1).map(abs, parallel="processes")),
            "parallel='threads' and parallel='processes'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=reason):
        wrong()


def test_several_are_read_as_their_parts_say() -> None:
    reading = mix(marked(0, 1), marked(1, 1).map(abs, parallel=3).prefetch(2), weights=(1, 2)).reading
    assert (reading.parallel, reading.count, reading.ahead) == ("threads", 3, 2)


def test_a_part_with_a_collate_function_of_its_own_needs_one_of_the_whole() -> None:
    first = from_torch(DataLoader([1.0, 2.0], collate_fn=lambda examples: torch.tensor(examples) + 10))
    both = mix(first, first)
    with pytest.raises(DataError, match=r"part 1 of 2 has a collate function of its own, .*batch\(collate=fn\)"):
        list(batches(both.batch(4)))
    assert [batch.tolist() for batch in batches(both.batch(4, collate=torch.tensor))] == [[1, 2, 1, 2]]


class OneReader(Dataset[tuple[Tensor, Tensor]]):
    """Says with each example how many read it at the same time."""

    def __init__(self) -> None:
        self._inside = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._inside += 1
        time.sleep(0.003)
        found = self._inside
        self._inside -= 1
        return torch.tensor(index), torch.tensor(found)


def test_a_data_set_of_the_users_own_is_read_by_one_reader_in_a_mix_too() -> None:
    own = from_torch(OneReader())
    assert max(int(batch[1].max()) for batch in batches(mix(own, own, own).batch(4))) == 1


def test_threads_may_begin_new_epochs_at_the_same_time() -> None:
    source = mix(marked(0, 3).shuffle(), marked(1, 5).shuffle(), weights=(1, 1)).source

    def read(_: int) -> list[int]:
        return [int(source.example(place % 8, Epoch(0, place // 8))[0]) for place in range(3000)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(read, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert all(each == found[0] for each in found)
