"""Data sets and loaders of torch, and what can be indexed or iterated over as they can."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import numpy as np
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
    default_collate,
)

from headrace.data.pipeline.pipeline import InputPipeline, Processes, from_arrays
from headrace.data.pipeline.source import Epoch, Source, collate, require_whole, unreadable
from headrace.errors import DataError

_FORMS = (
    "a pair of tensors or arrays, a dict of them, a torch Dataset or DataLoader, an hr.data.Source, or a pipeline from "
    "hr.data"
)

_OPTIONS = ("prefetch_factor", "worker_init_fn", "timeout", "persistent_workers")
_WHOLE = (SequentialSampler, RandomSampler)
"""Samplers whose length says whether they take all examples."""
_CHECKED: WeakSet[DataLoader[Any]] = WeakSet()


@runtime_checkable
class _MapStyle(Protocol):
    """A map-style data set that does not inherit from torch's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DatasetSource(Source):
    """A map-style data set, of torch or alike: it has a length, and `dataset[index]` is an example.

    It has one reader unless it is known to bear several: it may hold an open file, whose position they would share.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        identity: str = "",
        one_reader: bool = True,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise DataError(
                f"the data set {type(dataset).__name__} has no length; give it a __len__, so that an epoch can be split"
            )
        self._dataset: Any = dataset
        self._collate = collate_fn or collate
        self._identity = identity
        self._one_reader = one_reader
        # The name by which torch's loader lets a data set read many examples at once.
        many = getattr(dataset, "__getitems__", None)
        self._many: Callable[[list[int]], Sequence[Any]] | None = many if callable(many) else None

    def __len__(self) -> int:
        return len(self._dataset)

    def example(self, index: int, epoch: Epoch) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise unreadable(self.key(index), "the data set", error) from error

    def many(self, indices: list[int], epoch: Epoch) -> Sequence[Any]:
        if self._many is None:
            return super().many(indices, epoch)
        try:
            return self._many(indices)
        except Exception as error:
            for index in indices:
                self.example(index, epoch)  # names the example, if it fails alone too
            raise unreadable(f"one of the examples {indices}", "the data set", error) from error

    def collate(self, examples: Sequence[Any]) -> Any:
        return self._collate(list(examples))

    @property
    def stacks(self) -> bool:
        return self._collate is collate

    @property
    def one_reader(self) -> bool:
        return self._one_reader

    @property
    def identity(self) -> str:
        return self._identity


def from_indexed(data: Any) -> tuple[InputPipeline, tuple[str, ...]]:
    """Returns the pipeline over a data set or a `DataLoader` around one, as `as_pipeline` does."""
    return _from_loader(data) if isinstance(data, DataLoader) else (_from_dataset(data).shuffle(), _lines_of(data))


def from_torch(data: Any, limit: int = 100_000) -> InputPipeline:
    """Returns a pipeline over a data set or loader of torch, or anything that can be iterated over.

    Of a `DataLoader`, the data set, `collate_fn`, `drop_last`, the reading processes and whether it shuffles are used;
    the job's batch size replaces its own. Data without an index, an `IterableDataset` or a generator, is read into
    memory once.

    Args:
        data: a map-style data set, a `DataLoader`, an `IterableDataset`, or an iterable of examples.
        limit: most examples that are read of data without an index.

    Raises:
        DataError: there are more than `limit`, or none, or it can neither be indexed nor iterated over.
        UsageError: `limit` is below 1.

    Examples:
        >>> pairs = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8))
        >>> len(hr.data.from_torch(pairs))
        8
    """
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            own_collate = None if data.collate_fn is default_collate else data.collate_fn
            return InputPipeline(DatasetSource(read_all(data.dataset, limit), own_collate))
        pipeline, _ = _from_loader(data)
        return dataclasses.replace(pipeline, shuffled=isinstance(data.sampler, RandomSampler))
    indexed = isinstance(data, Dataset | _MapStyle | Source) and not isinstance(data, IterableDataset | Mapping)
    return _from_dataset(data) if indexed else _from_dataset(read_all(data, limit))


def read_all(examples: Any, limit: int) -> list[Any]:
    """Returns all examples of an iterable; a DataError if they are more than `limit`."""
    require_whole("limit must be", limit)
    name = type(examples).__name__
    if not isinstance(examples, Iterable) or isinstance(examples, str | bytes | Mapping):
        raise DataError(f"data cannot be a {name}; give {_FORMS}, or an iterable of examples")
    read = list(islice(examples, limit + 1))
    if len(read) > limit:
        raise DataError(
            f"the {name} has more than {limit:,} examples, and as they have no index, all must fit into memory; if "
            "they do, raise limit; else give a data set with __len__ and __getitem__, or files to hr.data.from_..."
        )
    return read


def _from_dataset(dataset: Any, collate_fn: Any = None) -> InputPipeline:
    if isinstance(dataset, Source):
        return InputPipeline(dataset)
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__name__} is an IterableDataset: its examples have no index, so no order can be "
            "given to them; make it a Dataset with __len__ and __getitem__, or read it into memory by "
            "hr.data.from_torch(...)"
        )
    if collate_fn is None:
        _require_columns_that_stack(dataset)
    # Not a subclass, whose __getitem__ may do more than index the tensors.
    if type(dataset) is TensorDataset and collate_fn is None:
        return from_arrays(*dataset.tensors)
    if isinstance(dataset, Dataset | _MapStyle) and not isinstance(dataset, str | bytes):
        return InputPipeline(DatasetSource(dataset, collate_fn))
    raise DataError(f"data cannot be a {type(dataset).__name__}; give {_FORMS}")


def _require_columns_that_stack(dataset: Any) -> None:
    """Refuses a `datasets.Dataset` whose examples have lists of Python, which torch's collate function transposes."""
    # Not imported for others: it is an extra.
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return
    import datasets

    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] is not None:
        return
    lists = [
        name
        for name, feature in dataset.features.items()
        if not isinstance(feature, datasets.Value | datasets.ClassLabel)
    ]
    if lists:
        raise DataError(
            f"data is a bare datasets.Dataset, whose columns {', '.join(map(repr, lists))} are not numbers or text, so "
            "its examples do not become a batch by themselves; give "
            "hr.data.from_hugging_face(dataset, collator=...).shuffle() with a collator that pads, or without "
            "collator= if all lists of a column are equally long"
        )


def _from_loader(loader: DataLoader[Any]) -> tuple[InputPipeline, tuple[str, ...]]:
    if isinstance(loader.dataset, IterableDataset):
        return _from_dataset(loader.dataset), ()  # raises
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "the DataLoader has batch_size=None, so its data set makes whole batches; "
            "give a data set of single examples, so that a batch can be split among workers"
        )
    _require_all_examples(loader)
    own_collate = None if loader.collate_fn is default_collate else loader.collate_fn
    pipeline = _from_dataset(loader.dataset, own_collate).shuffle()
    replaced = f"its {type(loader.batch_sampler).__name__}"
    if loader.batch_size is not None:
        replaced = f"its batch_size={loader.batch_size} and {type(loader.sampler).__name__}"
    notice = (
        f"of the DataLoader, its data set and collate_fn are used; the job's batch size and order replace {replaced}"
    )
    if loader.num_workers > 0 and isinstance(pipeline.source, DatasetSource):
        options = {name: getattr(loader, name) for name in _OPTIONS}
        context: Any = loader.multiprocessing_context
        options["multiprocessing_context"] = context and context.get_start_method()
        pipeline = InputPipeline(pipeline.source, shuffled=True, processes=Processes(loader.num_workers, options))
        notice += f"; each worker reads with {loader.num_workers} processes"
    if loader.drop_last:
        pipeline = dataclasses.replace(pipeline, batching=dataclasses.replace(pipeline.batching, drop_last=True))
        notice += (
            "; training leaves out a last batch that is shorter than the job's (drop_last=True), evaluation has it"
        )
    return pipeline, (notice, *_lines_of(loader.dataset))


def _require_all_examples(loader: DataLoader[Any]) -> None:
    """Refuses samplers that choose examples: replacing them would change what is trained on."""
    batches: Any = loader.batch_sampler
    whole = type(batches) is not BatchSampler
    sampler: Any = batches if whole else batches.sampler
    # That of one process of several takes its part of all examples, as workers do anyway.
    if loader in _CHECKED or type(sampler) is DistributedSampler:
        return
    length = len(DatasetSource(loader.dataset))
    name = type(sampler).__name__
    repeats = isinstance(sampler, WeightedRandomSampler) or (
        isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != length)
    )
    indices = range(len(sampler)) if repeats or type(sampler) in _WHOLE else _drawn(sampler, whole, length)
    taken = len(indices)
    repeats |= len(set(indices)) < taken
    if not repeats and (taken < length or isinstance(sampler, SubsetRandomSampler)):
        raise DataError(
            f"the DataLoader's {name} takes {taken} of {length} examples, and the job's order would "
            "replace it; give torch.utils.data.Subset(dataset, indices) instead"
        )
    if repeats or set(indices) != set(range(length)):
        raise DataError(
            f"the DataLoader's {name} repeats or leaves out examples, but an epoch visits each exactly once; "
            "weight the loss instead, or change the data set"
        )
    _CHECKED.add(loader)


def _drawn(sampler: Any, batches: bool, length: int) -> list[int]:
    """Returns what a sampler takes in an epoch, one index more than there are examples at most."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        taken = list(islice(chain.from_iterable(sampler) if batches else sampler, length + 1))
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        return list(map(operator.index, taken))
    except TypeError:
        raise DataError(
            f"the DataLoader's {type(sampler).__name__} gives {taken[0]!r:.60} and not the index of an example, and "
            "the job's order would replace it; give a data set that is indexed by numbers"
        ) from None


def _lines_of(dataset: Any) -> tuple[str, ...]:
    """Returns a line where a data set waits to be told the epoch."""
    names = []
    while dataset is not None:
        if callable(getattr(dataset, "set_epoch", None)):
            names.append(type(dataset).__name__)
        dataset = getattr(dataset, "dataset", None)
    return tuple(
        f"set_epoch of the data set {name} is called by no run, so only a loop of one's own (hr.launch) tells it the "
        "epoch; the parameter rng of a function in hr.data's map differs from epoch to epoch by itself"
        for name in names
    )
