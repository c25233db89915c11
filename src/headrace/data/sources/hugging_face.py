"""Data sets of Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import DatasetSource, Epoch, Source, emptied
from headrace.data.pipeline.torch_source import gathered
from headrace.data.sources.columns import batch_of, chosen, columns_of
from headrace.errors import DataError, UnfitMachine


def from_hugging_face(dataset: Any, columns: Sequence[str] | None = None, *, limit: int = 100_000) -> InputPipeline:
    """Returns a pipeline over a data set of Hugging Face's `datasets`.

    An example is a dict of values: numbers, and lists of them, as tensors; text as str. If the data set has a format of
    its own (`with_format`, `set_transform`), or columns that must be decoded (images, sound), its examples are those
    that it gives itself. One that streams has no index: it is read once into memory.

    Args:
        dataset: a `datasets.Dataset`, or an `IterableDataset`.
        columns: that are read; None for all.
        limit: so many examples at most are read of one that streams.

    Raises:
        DataError: it is none of these, has more than `limit` examples, or no such column.
        UnfitMachine: `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise UnfitMachine(f"data sets of Hugging Face need their package ({error}); pip install datasets") from error
    if isinstance(dataset, datasets.IterableDataset):
        dataset = datasets.Dataset.from_list(gathered(dataset, limit), features=dataset.features)
    if isinstance(dataset, dict):
        raise DataError(
            f"the data set has the splits {', '.join(dataset)}; give one, dataset[{next(iter(dataset), '')!r}]"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"from_hugging_face takes a datasets.Dataset, got {type(dataset).__name__}")
    names = chosen(dataset.column_names, columns, "the data set")
    selected = dataset.select_columns(names)
    as_stored = dataset.format["type"] is None and all(_is_stored(selected.features[name]) for name in names)
    return InputPipeline(_Rows(selected) if as_stored else DatasetSource(selected))


def _is_stored(feature: Any) -> bool:
    """Returns whether a feature's value is what Arrow holds."""
    import datasets

    if isinstance(feature, datasets.List | datasets.LargeList):
        return _is_stored(feature.feature)
    return isinstance(feature, datasets.Value | datasets.ClassLabel)


class _Rows(Source):
    """Args:
    dataset: without a format of its own.
    """

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        self._identity = f"hugging face {dataset._fingerprint} {dataset.column_names}"
        self._tables = dataset.with_format("arrow")

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, epoch: Epoch) -> Any:
        return columns_of(self._tables[index], lambda _: self.key(index)).row(0)

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def gathers(self) -> bool:
        return True

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        wanted = indices.tolist()
        if not wanted:
            return emptied(self.collate([self.example(0, epoch)]))
        columns = columns_of(self._tables[wanted], lambda row: self.key(wanted[row]))
        return batch_of(columns.take(torch.arange(len(wanted))))
