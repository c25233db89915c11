"""Rows of a table of Arrow as examples: dicts of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.source import collate
from headrace.errors import DataError, UnfitMachine

__all__ = ["Columns", "arrow", "chosen", "is_numeric"]


class Columns:
    """The columns of one table: numbers as tensors, all else as Arrow has it.

    Args:
        table: a `pyarrow.Table`.
        called: returns what messages call a row.

    Attributes:
        names: of the columns.
    """

    def __init__(self, table: Any, called: Callable[[int], str]) -> None:
        self._called = called
        self._length: int = table.num_rows
        self._numbers: dict[str, Tensor] = {}
        self._others: dict[str, Any] = {}
        self.names = tuple(table.column_names)
        for name in table.column_names:
            array = _whole(table.column(name))
            numbers = _numbers(array)
            if numbers is None:
                self._others[name] = array
            else:
                self._numbers[name] = numbers

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """What they take."""
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in self._numbers.values())
        return tensors + sum(int(array.nbytes) for array in self._others.values())

    def row(self, index: int) -> dict[str, Any]:
        """Returns one row.

        Raises:
            DataError: one of its values is missing.
        """
        return {name: self._value(name, index) for name in self.names}

    def gather(self, indices: Tensor) -> dict[str, Any]:
        """Returns rows as a batch, `indices` `(rows,)` int64, at least one.

        Raises:
            DataError: a value is missing, or the rows do not make one batch.
        """
        return {name: self._gathered(name, indices) for name in self.names}

    def _gathered(self, name: str, indices: Tensor) -> Any:
        if name in self._numbers:
            return self._numbers[name].index_select(0, indices)
        return collate([self._value(name, index) for index in indices.tolist()])

    def _value(self, name: str, index: int) -> Any:
        numbers = self._numbers.get(name)
        if numbers is not None:
            return numbers[index]
        array = self._others[name]
        alone = array.slice(index, 1)
        if alone.null_count:
            raise DataError(
                f"{self._called(index)}: {name!r} is missing (null); fill it in, or leave out that row or column"
            )
        numbers = _numbers(alone)
        if numbers is not None:
            return numbers[0]
        return array[index].as_py()


def chosen(names: Sequence[str], columns: Sequence[str] | None, where: str) -> list[str]:
    """Returns the columns that are read.

    Raises:
        DataError: there is no such column.
    """
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise DataError(f"{where} has no column {missing[0]!r}; it has {', '.join(names)}")
    return list(names if columns is None else columns)


def arrow() -> Any:
    """Returns pyarrow.

    Raises:
        UnfitMachine: it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UnfitMachine(f'tables are read by pyarrow ({error}); pip install "headrace[data]"') from error
    return pyarrow


def _whole(column: Any) -> Any:
    """Returns a column in one piece, with words in place of a dictionary's numbers."""
    pa = arrow()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    # Offsets of 32 bits end at 2 GB of text.
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)
    return column.cast(wide).combine_chunks()


def is_numeric(kind: Any) -> bool:
    """Returns whether an Arrow type is of numbers, or of lists of them that have one length."""
    types = arrow().types
    if types.is_fixed_size_list(kind):
        return is_numeric(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _numbers(array: Any) -> Tensor | None:
    """Returns an Arrow array as a tensor, `(rows, ...)`; None where it is none of numbers, has gaps, or is ragged."""
    if array.null_count:
        return None
    types = arrow().types
    if types.is_fixed_size_list(array.type):
        return _stacked(array, array.type.list_size)
    if types.is_list(array.type) or types.is_large_list(array.type):
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        return None if np.any(lengths != lengths[:1]) else _stacked(array, int(lengths[0]) if len(lengths) else 0)
    if not is_numeric(array.type):
        return None
    found: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    # Arrow's memory may not be written to, and a worker's may be.
    return torch.from_numpy(np.array(found))


def _stacked(array: Any, width: int) -> Tensor | None:
    inner = _numbers(array.flatten())
    return None if inner is None else inner.reshape(len(array), width, *inner.shape[1:])
