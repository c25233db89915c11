"""What users have already, as a pipeline; and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from headrace.data import InputPipeline, Loader, as_pipeline, from_arrays
from headrace.data.pipeline.source import ArraySource
from headrace.data.sources.torch import DatasetSource
from headrace.errors import DataError

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


class Listed(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return X[index], int(Y[index])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Own:
    """A sampler of a user's own, whose length says that it takes all examples."""

    def __init__(self, taken: list[Any]) -> None:
        self.taken = taken

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        np.random.rand()
        random.random()
        torch.rand(())
        return iter(self.taken)


class OwnBatches(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 4]])


class Waiting(Listed):
    def set_epoch(self, epoch: int) -> None: ...


class Foreign:
    """A map-style data set that knows no torch."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index].numpy(), "y": index}


class Mapped(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return X[index] + 1, Y[index]


def whole(pipeline: InputPipeline) -> Any:
    """Returns all examples as one batch, in their order."""
    (share,) = Loader(pipeline, 0, len(pipeline), (1,), 0, ordered=True).sweep()
    return share.batch


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        (X.numpy()[::-1][::-1], Y.numpy().astype(">i8")),
        TensorDataset(X, Y),
        Listed(),
        [(X[index], index) for index in range(6)],
        DataLoader(Listed(), batch_size=2),
        DataLoader(TensorDataset(X, Y), batch_size=2),
        torch.utils.data.Subset(TensorDataset(X, Y), range(6)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_pairs_in_all_their_forms_give_the_same(data: Any) -> None:
    pipeline, _ = as_pipeline(data)
    assert pipeline.shuffled
    assert len(pipeline) == 6
    inputs, target = whole(pipeline)
    assert torch.equal(inputs, X)
    assert torch.equal(target, Y)


@pytest.mark.parametrize("data", [{"x": X, "y": Y}, {"x": X.numpy(), "y": Y}, Foreign()])
def test_dicts_stay_dicts(data: Any) -> None:
    batch = whole(as_pipeline(data)[0])
    assert torch.equal(batch["x"], X)
    assert torch.equal(batch["y"], Y)


def test_tensors_and_arrays_are_not_copied() -> None:
    array = np.zeros((3, 2))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    pipeline = from_arrays(X[:3], array, frozen)
    assert isinstance(pipeline.source, ArraySource)
    first, second, third = pipeline.source._arrays
    assert first.data_ptr() == X.data_ptr()
    assert second.data_ptr() == array.ctypes.data
    assert third.data_ptr() == frozen.ctypes.data


def test_a_file_mapped_read_only_stays_on_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pipeline = from_arrays(mapped)
    assert isinstance(pipeline.source, ArraySource)
    assert pipeline.source._arrays[0].data_ptr() == mapped.ctypes.data
    assert torch.equal(whole(pipeline)[0], X)


def test_batches_carry_no_graph() -> None:
    weights = torch.rand(3, requires_grad=True)
    assert not whole(from_arrays(weights))[0].requires_grad


def test_a_pipeline_stays_as_it_was_defined() -> None:
    pipeline = from_arrays(X)
    assert as_pipeline(pipeline) == (pipeline, ())
    assert not pipeline.shuffled
    assert pipeline.shuffle(3).seed == 3
    assert not pipeline.shuffled, "definitions are values"


def test_tensor_data_sets_are_read_as_arrays_and_their_subclasses_are_not() -> None:
    assert isinstance(as_pipeline(TensorDataset(X, Y))[0].source, ArraySource)
    pipeline, _ = as_pipeline(Mapped(X, Y))
    assert isinstance(pipeline.source, DatasetSource)
    assert torch.equal(whole(pipeline)[0], X + 1)


def test_a_loader_gives_its_data_set_and_collate_and_a_line_says_what_is_replaced() -> None:
    def first_column(examples: list[Any]) -> Any:
        return torch.stack([x[0] for x, _ in examples]), torch.tensor([y for _, y in examples])

    loader = DataLoader(Listed(), batch_size=4, shuffle=True, drop_last=True, collate_fn=first_column)
    pipeline, (notice,) = as_pipeline(loader)
    assert torch.equal(whole(pipeline)[0], X[:, 0])
    assert "the job's batch size and order replace its batch_size=4 and RandomSampler" in notice
    assert pipeline.batching.drop_last
    assert pipeline.processes is None


def test_the_sampler_of_one_process_of_several_is_replaced() -> None:
    loader = DataLoader(Listed(), sampler=DistributedSampler(Listed(), num_replicas=2, rank=0))
    assert len(as_pipeline(loader)[0]) == 6


def _drawn() -> tuple[Any, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    "options", [{"sampler": Own([2, 3, 0, 1, 4, 5])}, {"batch_sampler": Own([[2, 3, 0, 1, 4, 5]])}]
)
def test_a_permutation_of_ones_own_is_replaced_without_a_draw(options: Any) -> None:
    before = _drawn()
    _, (notice,) = as_pipeline(DataLoader(Listed(), **options))
    assert "order replace its " in notice
    assert before == _drawn()


@pytest.mark.parametrize("data", [Waiting(), DataLoader(torch.utils.data.Subset(Waiting(), range(2)))])
def test_a_data_set_that_waits_to_be_told_the_epoch_is_said(data: Any) -> None:
    assert "set_epoch of the data set Waiting is called by no run" in as_pipeline(data)[1][-1]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_processes_of_a_loader_that_are_no_forks_read(start: str) -> None:
    loader = DataLoader(Listed(), num_workers=1, multiprocessing_context=start)
    shares = Loader(as_pipeline(loader)[0], 0, 3, (1,), 0, ordered=True).sweep()
    assert torch.equal(torch.cat([share.batch[0] for share in shares]), X)


def test_a_loader_keeps_its_processes() -> None:
    loader = DataLoader(Listed(), num_workers=2, prefetch_factor=3, multiprocessing_context="spawn", timeout=9)
    pipeline, (notice,) = as_pipeline(loader)
    assert notice.endswith("each worker reads with 2 processes")
    processes = pipeline.processes
    assert processes is not None
    assert (processes.count, processes.options["prefetch_factor"]) == (2, 3)
    assert (processes.options["multiprocessing_context"], processes.options["timeout"]) == ("spawn", 9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:4]), r"differ in length \(0: 6, 1: 4\).*cut them to 4"),
        ({"x": X, "y": Y[:5]}, r"differ in length \(x: 6, y: 5\)"),
        ((X[:0], Y[:0]), "the data set is empty: it has 0 examples"),
        ((), "the data has no arrays"),
        ({}, "the data has no arrays"),
        ((X, [0, 1, 2]), r"array 1 is a list, not a tensor or array; convert it by torch.as_tensor"),
        ({"x": X, "y": "abc"}, "the array 'y' is a str"),
        ((X, torch.tensor(3)), "array 1 is a single number"),
        ((X, torch.zeros(6, device="meta")), r"array 1 lies on meta; give it as .cpu\(\)"),
        ((X, np.array(list("abcdef"))), "array 1 has numpy's type <U1, which no tensor has"),
        (Endless(), "Endless is an IterableDataset: its examples have no index"),
        (DataLoader(Endless()), "Endless is an IterableDataset"),
        ("train.csv", "data cannot be a str; give a pair of tensors"),
        (7, "data cannot be a int"),
        (None, "data cannot be a NoneType"),
        (DataLoader(Listed(), batch_size=None), "batch_size=None, so its data set makes whole batches"),
        (
            DataLoader(Listed(), sampler=SubsetRandomSampler([0, 2])),
            r"SubsetRandomSampler takes 2 of 6 .*Subset\(dataset, indices\)",
        ),
        (DataLoader(Listed(), sampler=[0, 1, 2]), r"the DataLoader's list takes 3 of 6 examples"),
        (DataLoader(Listed(), sampler=SequentialSampler(range(4))), "SequentialSampler takes 4 of 6 examples"),
        (DataLoader(Listed(), batch_sampler=BatchSampler(SubsetRandomSampler([0, 2]), 2, False)), "takes 2 of 6"),
        (DataLoader(Listed(), sampler=[0] * 7), "the DataLoader's list repeats or leaves out examples"),
        (DataLoader(Listed(), sampler=WeightedRandomSampler([1.0] * 6, 6)), "repeats or leaves out examples"),
        (DataLoader(Listed(), sampler=RandomSampler(Y, num_samples=3)), "repeats or leaves out examples"),
        (DataLoader(Listed(), sampler=Own([0, 0, 1, 2, 3, 4])), "the DataLoader's Own repeats or leaves out examples"),
        (DataLoader(Listed(), sampler=Own([5, 1, 2])), "the DataLoader's Own takes 3 of 6 examples"),
        (DataLoader(Listed(), sampler=count()), "the DataLoader's count repeats or leaves out examples"),  # type: ignore[arg-type]
        (DataLoader(Listed(), batch_sampler=Own([[0, 1], [2, 0], [4, 5]])), "the DataLoader's Own repeats or leaves"),
        (DataLoader(Listed(), batch_sampler=OwnBatches([0] * 6, 2, False)), "OwnBatches repeats or leaves out"),
        (DataLoader(Listed(), sampler=Own([(0, 1)] * 6)), r"the DataLoader's Own gives \(0, 1\) and not the index"),
        (torch.utils.data.Subset(Listed(), []), "the data set is empty"),
    ],
)
def test_bad_data_is_refused_with_the_remedy(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_pipeline(data)


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return X[index]


def test_a_data_set_without_length_is_refused() -> None:
    with pytest.raises(DataError, match="the data set Unsized has no length; give it a __len__"):
        as_pipeline(Unsized())
