"""Rows of Arrow tables as examples: dicts of values. The data sets of Hugging Face are such tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import internals
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source, collate, take_rows
from headrace.data.sources.torch import DatasetSource, read_all
from headrace.errors import DataError, UsageError
from headrace.machine.extras import import_package


@dataclass(frozen=True)
class Numbers:
    """A column of numbers, `(rows, ...)`; `missing` marks rows with a null, `(rows,)` bool, or is None."""

    values: Tensor
    missing: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of one table, or of a piece of one; `key` names a row in messages.

    `numbers` has the columns of numbers, or of equally long lists of them; `others` the rest, as Arrow arrays.
    """

    names: tuple[str, ...]
    rows: int
    numbers: Mapping[str, Numbers]
    others: Mapping[str, Any]
    key: Callable[[int], str]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        tensors = sum(column.values.numel() * column.values.element_size() for column in self.numbers.values())
        return tensors + sum(int(array.nbytes) for array in self.others.values())

    def row(self, index: int) -> dict[str, Any]:
        """Returns one row."""
        return {name: self._value(name, index) for name in self.names}

    def take(self, indices: Tensor) -> dict[str, Any]:
        """Returns the values of rows, `(rows,)` int64, by column: a tensor, or a list if they have no common shape."""
        return {name: self._taken(name, indices) for name in self.names}

    def _taken(self, name: str, indices: Tensor) -> Any:
        numbers = self.numbers.get(name)
        if numbers is not None:
            if numbers.missing is not None and bool(numbers.missing[indices].any()):
                raise self._missing(name, int(indices[numbers.missing[indices]][0]))
            return take_rows(numbers.values, indices)
        taken = self.others[name].take(import_pyarrow().array(indices.numpy()))
        if taken.null_count:
            raise self._missing(name, int(indices[taken.is_null().index(True).as_py()]))
        if not _is_list(taken.type):
            return taken.to_pylist()
        column = _numbers(taken)
        if column is not None and column.missing is None:
            return column.values
        return [self._value(name, index) for index in indices.tolist()]

    def _value(self, name: str, index: int) -> Any:
        numbers = self.numbers.get(name)
        if numbers is not None:
            if numbers.missing is not None and bool(numbers.missing[index]):
                raise self._missing(name, index)
            return numbers.values[index]
        array = self.others[name]
        scalar = array[index]
        if not scalar.is_valid:
            raise self._missing(name, index)
        if _is_list(array.type):
            # A single list has one length.
            alone = _numbers(array.slice(index, 1))
            if alone is not None and alone.missing is None:
                return alone.values[0]
        return scalar.as_py()

    def _missing(self, name: str, index: int) -> DataError:
        return DataError(f"{self.key(index)}: {name!r} is missing (null); fill it in, or leave out that row or column")


def to_columns(table: Any, key: Callable[[int], str]) -> Columns:
    """Returns the columns of a `pyarrow.Table`."""
    pa = import_pyarrow()
    numbers: dict[str, Numbers] = {}
    others: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name)
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        # As one array, which is decoded. Offsets of 32 bits end at 2 GB of text.
        wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)
        array = column.cast(wide).combine_chunks()
        column_numbers = _numbers(array)
        if column_numbers is None:
            others[name] = array
        else:
            numbers[name] = column_numbers
    return Columns(tuple(table.column_names), table.num_rows, numbers, others, key)


def concatenate(pieces: Iterable[Columns], rows: int, key: Callable[[int], str]) -> Columns:
    """Concatenates pieces whose columns are all of numbers; at most one piece is held at a time."""
    numbers: dict[str, Numbers] = {}
    begin = 0
    for piece in pieces:
        end = begin + piece.rows
        for name in piece.names:
            if name in piece.others:
                raise DataError(f"{piece.key(0)} and the rows after it: {name!r} has lists that are missing or ragged")
            column = piece.numbers[name]
            if name not in numbers:
                values = torch.empty((rows, *column.values.shape[1:]), dtype=column.values.dtype)
                numbers[name] = Numbers(values, None)
            held = numbers[name]
            held.values[begin:end] = column.values
            if column.missing is not None:
                missing = torch.zeros(rows, dtype=torch.bool) if held.missing is None else held.missing
                missing[begin:end] = column.missing
                numbers[name] = Numbers(held.values, missing)
        begin = end
    return Columns(tuple(numbers), rows, numbers, {}, key)


def batch_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch of what `Columns.take` returns."""
    return {name: value if isinstance(value, Tensor) else collate(value) for name, value in values.items()}


def select_columns(names: Sequence[str], columns: Sequence[str] | None, where: str) -> list[str]:
    """Returns the columns to read; a DataError if one does not exist or several have its name."""
    if isinstance(columns, str):
        raise UsageError(f"columns must be a list of names, got {columns!r}; give [{columns!r}]")
    wanted, counts = list(names if columns is None else columns), Counter(names)
    for name in wanted:
        if not counts[name]:
            raise DataError(f"{where} has no column {name!r}; it has {', '.join(names)}")
        if counts[name] > 1:
            raise DataError(
                f"{where} has {counts[name]} columns of the name {name!r}; give each its own, or leave them out"
            )
    return wanted


def import_pyarrow() -> Any:
    return import_package("pyarrow", "tables are read by pyarrow")


def width(kind: Any) -> int | None:
    """Returns the bytes of one value of an Arrow type as a tensor; None if it is not a number or its length varies."""
    types = import_pyarrow().types
    if types.is_fixed_size_list(kind):
        inner = width(kind.value_type)
        return None if inner is None else inner * int(kind.list_size)
    if types.is_boolean(kind):
        return 1
    return int(kind.bit_width) // 8 if types.is_integer(kind) or types.is_floating(kind) else None


def _is_list(kind: Any) -> bool:
    types = import_pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numbers(array: Any) -> Numbers | None:
    """Returns an Arrow array as numbers; None if it is not numeric, or has ragged or missing lists."""
    if _is_list(array.type):
        fixed = import_pyarrow().types.is_fixed_size_list(array.type)
        lengths = np.array([array.type.list_size]) if fixed else array.value_lengths().to_numpy(zero_copy_only=False)
        if array.null_count or np.any(lengths != lengths[:1]):
            return None
        inner = _numbers(array.flatten())
        if inner is None:
            return None
        shape = (len(array), int(lengths[0]) if len(lengths) else 0)
        missing = None if inner.missing is None else inner.missing.reshape(shape).any(1)
        return Numbers(inner.values.reshape(*shape, *inner.values.shape[1:]), missing)
    if width(array.type) is None:
        return None
    if not array.null_count:
        # Copied, because Arrow's memory is read-only and a batch may be changed in place.
        return Numbers(torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False))), None)
    missing = torch.from_numpy(np.array(array.is_null().to_numpy(zero_copy_only=False)))
    filled = array.fill_null(False if import_pyarrow().types.is_boolean(array.type) else 0)
    return Numbers(torch.from_numpy(np.array(filled.to_numpy(zero_copy_only=False))), missing)


def from_hugging_face(
    dataset: Any,
    columns: Sequence[str] | None = None,
    *,
    collator: Callable[..., Any] | None = None,
    limit: int = 100_000,
) -> InputPipeline:
    """Returns a pipeline over a data set of Hugging Face's `datasets`.

    An example is a dict of values: numbers, and lists of them, as tensors; text as str. If the data set has a format of
    its own (`with_format`, `set_transform`), or columns that must be decoded (images, sound), its examples are those
    that it gives itself. One that streams has no index: it is read once into memory.

    Args:
        dataset: a `datasets.Dataset`, or an `IterableDataset`.
        columns: that are read; None for all.
        collator: makes a batch of a list of examples: one of the transformers library, or a function, as of
            `InputPipeline.batch`. It gets examples as the data set gives them: dicts of Python's values.
        limit: so many examples at most are read of one that streams.

    Raises:
        DataError: it is none of these, has more than `limit` examples, or no such column.
        UnfitMachine: `datasets` is not installed.

    Examples:
        >>> from datasets import Dataset
        >>> houses = Dataset.from_dict({"rooms": [3, 4]})
        >>> hr.data.from_hugging_face(houses).source.example(1, hr.data.Epoch(0, 0))
        {'rooms': tensor(4)}
    """
    datasets = import_package("datasets", "data sets of Hugging Face need their package", "pip install datasets")
    if isinstance(dataset, datasets.IterableDataset):
        dataset = datasets.Dataset.from_list(read_all(dataset, limit), features=dataset.features)
    if isinstance(dataset, dict):
        raise DataError(
            f"the data set has the splits {', '.join(dataset)}; give one, dataset[{next(iter(dataset), '')!r}]"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"from_hugging_face takes a datasets.Dataset, got {type(dataset).__name__}")
    names = select_columns(dataset.column_names, columns, "the data set")
    selected = dataset.select_columns(names)
    if collator is not None:
        source = DatasetSource(selected, identity=_identity(selected), one_reader=False)
        return InputPipeline(source).batch(collate=collator)
    as_stored = dataset.format["type"] is None and all(_is_stored(selected.features[name]) for name in names)
    return InputPipeline(_Rows(selected) if as_stored else DatasetSource(selected))


def _is_stored(feature: Any) -> bool:
    """Returns whether a feature's value is what Arrow holds."""
    import datasets

    if isinstance(feature, datasets.List | datasets.LargeList):
        return _is_stored(feature.feature)
    return isinstance(feature, datasets.Value | datasets.ClassLabel)


class _Rows(Source):
    """A `datasets.Dataset` without a format of its own, read as Arrow tables."""

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        self._identity = _identity(dataset)
        self._tables = dataset.with_format("arrow")

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, epoch: Epoch) -> Any:
        return to_columns(self._tables[index], lambda _: self.key(index)).row(0)

    @property
    def identity(self) -> str:
        return self._identity

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        wanted = indices.tolist()
        if not wanted:
            return super().gather(indices, epoch)
        columns = to_columns(self._tables[wanted], lambda row: self.key(wanted[row]))
        return batch_of(columns.take(torch.arange(len(wanted))))


def _identity(dataset: Any) -> str:
    return f"hugging face {internals.fingerprint(dataset)} {dataset.column_names}"
