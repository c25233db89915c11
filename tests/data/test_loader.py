"""A worker's share of every global batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headrace.data import InputPipeline, Loader, as_pipeline, from_arrays
from headrace.data.pipeline.source import collate
from headrace.errors import DataError, UsageError
from headrace.spec.job import Share

COUNTS = st.integers(1, 60)
BATCHES = st.integers(1, 70)
SHARES = st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any)


def numbered(count: int) -> InputPipeline:
    return from_arrays(torch.arange(count)).shuffle()


def seen(shares: Iterator[Share]) -> list[list[int]]:
    return [share.batch[0].tolist() for share in shares]


def global_batches(count: int, size: int, shares: list[int], epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """Returns what all workers together take in each round, in rank order."""
    loaders = [Loader(numbered(count), seed, size, shares, rank) for rank in range(len(shares))]
    rounds = epochs * loaders[0].rounds_per_epoch
    parts = [seen(islice(loader.rounds(), rounds)) for loader in loaders]
    return [[index for part in parts for index in part[r]] for r in range(rounds)]


@given(count=COUNTS, size=BATCHES, shares=SHARES, change=st.integers(0, 20), seed=st.integers(0, 3))
def test_other_shares_from_some_round_on_change_no_batch(
    count: int, size: int, shares: list[int], change: int, seed: int
) -> None:
    loaders = [Loader(numbered(count), seed, size, (1,) * len(shares), rank) for rank in range(len(shares))]
    before = [seen(loader.rounds(0, change)) for loader in loaders]
    for loader in loaders:
        loader.assign(shares)
    after = [seen(loader.rounds(change, change + 5)) for loader in loaders]
    parts = [[*early, *late] for early, late in zip(before, after, strict=True)]
    (expected,) = [seen(Loader(numbered(count), seed, size, (1,), 0).rounds(0, change + 5))]
    assert [[index for part in parts for index in part[r]] for r in range(change + 5)] == expected
    owners = [len(late[0]) > 0 for late in after]
    assert not any(owns and not share for owns, share in zip(owners, shares, strict=True))


@pytest.mark.slow
@given(count=COUNTS, size=BATCHES, shares=SHARES)
def test_every_epoch_visits_every_example_once(count: int, size: int, shares: list[int]) -> None:
    rounds = -(-count // size)
    batches = global_batches(count, size, shares, epochs=3)
    for epoch in range(3):
        visited = [index for batch in batches[epoch * rounds : (epoch + 1) * rounds] for index in batch]
        assert sorted(visited) == list(range(count))


@given(count=COUNTS, size=BATCHES, shares=SHARES)
def test_the_order_does_not_depend_on_the_workers(count: int, size: int, shares: list[int]) -> None:
    assert global_batches(count, size, shares, epochs=2) == global_batches(count, size, [1], epochs=2)


@given(count=COUNTS, size=BATCHES, shares=SHARES, start=st.integers(0, 40))
def test_to_start_at_a_round_is_to_skip_those_before(count: int, size: int, shares: list[int], start: int) -> None:
    loader = Loader(numbered(count), 3, size, shares, len(shares) - 1)
    skipped = list(islice(loader.rounds(), start, start + 5))
    started = list(islice(loader.rounds(start), 5))
    assert seen(iter(started)) == seen(iter(skipped))
    assert [(s.examples, s.of, s.epoch) for s in started] == [(s.examples, s.of, s.epoch) for s in skipped]


@given(count=COUNTS, size=BATCHES, shares=SHARES)
def test_shares_say_what_they_are(count: int, size: int, shares: list[int]) -> None:
    loaders = [Loader(numbered(count), 0, size, shares, rank) for rank in range(len(shares))]
    for round_, parts in enumerate(zip(*(loader.sweep() for loader in loaders), strict=True)):
        of = min(size, count - round_ * size)
        assert sum(part.examples for part in parts) == of
        assert all(part.of == of and part.epoch == 0 for part in parts)
        assert all(len(part.batch[0]) == part.examples for part in parts)


def test_orders_differ_between_epochs_and_seeds_alone() -> None:
    loader = Loader(numbered(40), 5, 40, (1,), 0)
    first, second = seen(islice(loader.rounds(), 2))
    assert first != second
    assert [first, second] == seen(islice(Loader(numbered(40), 5, 40, (1,), 0).rounds(), 2))
    assert first != seen(Loader(numbered(40), 6, 40, (1,), 0).sweep())[0]
    own = from_arrays(torch.arange(40)).shuffle(seed=5)
    assert first == seen(Loader(own, 6, 40, (1,), 0).sweep())[0]


def test_evaluation_keeps_the_order_of_the_data() -> None:
    loader = Loader(numbered(10), 0, 4, (1, 1), 1, ordered=True)
    assert seen(loader.sweep()) == [[2, 3], [6, 7], [9]]
    assert seen(loader.sweep()) == seen(loader.sweep())
    unshuffled = Loader(from_arrays(torch.arange(10)), 0, 4, (1, 1), 1)
    assert seen(islice(unshuffled.rounds(), 6)) == seen(loader.sweep()) * 2


def test_batches_are_copies_with_the_structure_of_the_data() -> None:
    images, labels = torch.rand(6, 2, 3), torch.arange(6)
    (share,) = Loader(from_arrays({"x": images, "y": labels}), 0, 6, (1,), 0).sweep()
    assert list(share.batch) == ["x", "y"]
    assert torch.equal(share.batch["x"], images)
    share.batch["x"].zero_()
    assert images.abs().sum() > 0


def test_a_worker_without_examples_gets_batches_of_length_0() -> None:
    images, labels = torch.rand(5, 2, 3), torch.arange(5)
    for pipeline in (
        from_arrays(images, labels),
        from_arrays(images, labels).map(lambda example: example),
        as_pipeline(Squares(5))[0].map(lambda example: (torch.zeros(2, 3), example[1])),
    ):
        (_, last) = Loader(pipeline, 0, 4, (1, 1), 1).sweep()
        assert (last.examples, last.of) == (0, 1)
        assert isinstance(last.batch, tuple)
        assert [tuple(tensor.shape) for tensor in last.batch] == [(0, 2, 3), (0,)]
        assert last.batch[1].dtype == torch.int64


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="global_batch_size must be at least 1, got 0"):
        Loader(numbered(4), 0, 0, (1,), 0)
    with pytest.raises(UsageError, match="data_rank must be 0 to 1, got 2"):
        Loader(numbered(4), 0, 2, (1, 1), 2)
    with pytest.raises(UsageError, match="start_round must not be negative, got -1"):
        Loader(numbered(4), 0, 2, (1,), 0).rounds(-1)


def noisy(example: Any, rng: np.random.Generator) -> Any:
    value, index = example
    return value + rng.random(), index


def by_index(loaders: list[Loader], epoch: int) -> dict[int, float]:
    """Returns each example's value in one epoch, whichever worker read it."""
    found: dict[int, float] = {}
    for loader in loaders:
        rounds = loader.rounds_per_epoch
        for share in islice(loader.rounds(epoch * rounds), rounds):
            found.update(zip(share.batch[1].tolist(), share.batch[0].tolist(), strict=True))
    return found


@given(count=st.integers(1, 20), size=st.integers(1, 9), workers=st.integers(1, 4), epoch=st.integers(0, 3))
def test_augmentation_depends_on_seed_epoch_and_index_alone(count: int, size: int, workers: int, epoch: int) -> None:
    pipeline = from_arrays(torch.zeros(count), torch.arange(count)).shuffle().map(noisy)
    alone = by_index([Loader(pipeline, 1, 5, (1,), 0)], epoch)
    together = by_index([Loader(pipeline, 1, size, (1,) * workers, r) for r in range(workers)], epoch)
    assert together == alone
    assert alone != by_index([Loader(pipeline, 1, 5, (1,), 0)], epoch + 1)
    assert alone != by_index([Loader(pipeline, 2, 5, (1,), 0)], epoch)
    assert len(set(alone.values())) == count


def test_transforms_follow_one_another_and_draw_apart() -> None:
    data = from_arrays(torch.zeros(3), torch.arange(3))
    (once,) = Loader(data.map(noisy), 0, 3, (1,), 0).sweep()
    (doubled,) = Loader(data.map(noisy).map(lambda e: (e[0] * 2, e[1])), 0, 3, (1,), 0).sweep()
    (twice,) = Loader(data.map(noisy).map(noisy), 0, 3, (1,), 0).sweep()
    assert torch.allclose(doubled.batch[0], once.batch[0] * 2)
    assert not torch.allclose(twice.batch[0], once.batch[0] * 2)


def test_dicts_go_through_map_as_dicts() -> None:
    data = from_arrays({"x": np.arange(4), "y": np.arange(4)}).map(lambda e: {"x": e["x"] + 1, "n": 7})
    (share,) = Loader(data, 0, 4, (1,), 0).sweep()
    assert {key: value.tolist() for key, value in share.batch.items()} == {"x": [1, 2, 3, 4], "n": [7] * 4}


def test_an_error_in_map_names_the_example() -> None:
    def broken(example: tuple[Tensor]) -> tuple[Tensor]:
        if example[0] == 2:
            raise ZeroDivisionError("nothing to divide by")
        return example

    loader = Loader(from_arrays(torch.arange(4)).map(broken), 0, 4, (1,), 0)
    with pytest.raises(DataError, match=r"example 2 .*map\(broken\).*ZeroDivisionError: nothing to") as caught:
        next(loader.rounds())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__cause__.__traceback__ is not None


class Squares(Dataset[Any]):
    """(index squared, index); one index may be broken."""

    def __init__(self, count: int, broken: int = -1) -> None:
        self.count = count
        self.broken = broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"no file for {index}")
        return torch.tensor(float(index**2)), index


def test_an_error_in_the_data_set_names_the_example() -> None:
    for data in (Squares(6, broken=3), torch.utils.data.Subset(Squares(9, broken=3), range(6))):
        with pytest.raises(DataError, match=r"example 3 .*OSError: no file for 3") as caught:
            list(Loader(as_pipeline(data)[0], 0, 4, (1,), 0).sweep())
        assert isinstance(caught.value.__cause__, OSError)


def test_examples_of_different_shapes_are_refused() -> None:
    examples = [(torch.zeros(length), 0) for length in (2, 3)]
    with pytest.raises(
        DataError, match=r"^examples of a batch differ in shape, \[2\] and \[3\]: let \.batch\(pad=0\) fill them up"
    ):
        list(Loader(as_pipeline(examples)[0], 0, 2, (1,), 0).sweep())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_large_examples_are_stacked_as_torch_does(dtype: torch.dtype) -> None:
    examples = [(torch.rand(90, 120).mul(200).to(dtype).T, {"index": index}) for index in range(4)]
    images, named = collate(examples)
    assert torch.equal(images, torch.stack([image for image, _ in examples]))
    assert torch.equal(named["index"], torch.arange(4))


def test_numpys_arrays_and_numbers_of_two_types_are_stacked_as_torch_does() -> None:
    batch = collate([{"a": np.ones((2, 3)), "b": 1}, {"a": np.zeros((2, 3)), "b": 2}])
    assert torch.equal(batch["a"], torch.stack([torch.ones(2, 3), torch.zeros(2, 3)]).double())
    assert torch.equal(collate([torch.ones(2), torch.ones(2).double()]), torch.ones(2, 2).double())
    with pytest.raises(DataError, match="2 examples do not make one batch"):
        collate([(1, 2), (1,)])


def test_large_batches_of_single_numbers_are_stacked() -> None:
    count = 1 << 15
    assert torch.equal(collate(list(torch.arange(count).unbind())), torch.arange(count))


@pytest.mark.parametrize(
    "example",
    [
        torch.arange(40_000.0).view(-1, 2)[:, 0],
        torch.arange(40_000.0).numpy()[::2],
        torch.arange(40_000.0).view(100, 400)[:, ::2],
        torch.ones(1).expand(20_000),
        torch.arange(20_000.0).view(100, 200).T,
    ],
    ids=["column", "array", "columns", "expanded", "transposed"],
)
def test_large_examples_whose_numbers_lie_apart_in_memory_are_stacked(example: Any) -> None:
    expected = torch.stack([torch.as_tensor(example)] * 2)
    assert torch.equal(collate([example, example]), expected)


@pytest.mark.slow
def test_reading_processes_give_what_the_worker_itself_would() -> None:
    def pair(workers: int) -> InputPipeline:
        return as_pipeline(DataLoader(Squares(7), batch_size=3, num_workers=workers))[0].map(noisy)

    state = torch.random.get_rng_state()
    ahead = [Loader(pair(2), 4, 3, (1, 1), rank) for rank in range(2)]
    alone = [Loader(pair(0), 4, 3, (1, 1), rank) for rank in range(2)]
    for one, other in zip(ahead, alone, strict=True):
        shares = zip(islice(one.rounds(2), 5), islice(other.rounds(2), 5), strict=True)
        for share, expected in shares:
            assert (share.examples, share.of, share.epoch) == (expected.examples, expected.of, expected.epoch)
            assert torch.equal(share.batch[0], expected.batch[0])
            assert torch.equal(share.batch[1], expected.batch[1])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
def test_reading_processes_name_a_broken_example_and_end() -> None:
    pipeline = as_pipeline(DataLoader(Squares(6, broken=5), num_workers=1))[0]
    loader = Loader(pipeline, 0, 2, (1,), 0, ordered=True)
    shares = loader.sweep()
    assert seen_pairs(next(shares)) == [(0.0, 0), (1.0, 1)]
    assert seen_pairs(next(shares)) == [(4.0, 2), (9.0, 3)]
    with pytest.raises(DataError, match=r"^example 5 .*OSError: no file for 5") as caught:
        next(shares)
    assert "in __getitem__" in caught.value.__notes__[0]
    del shares, caught
    assert torch.multiprocessing.active_children() == []


def seen_pairs(share: Share) -> list[tuple[float, int]]:
    return list(zip(share.batch[0].tolist(), share.batch[1].tolist(), strict=True))
