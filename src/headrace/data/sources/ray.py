"""Rows of a data set of Ray Data as examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.data.cache.fingerprint import fingerprint
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source
from headrace.data.sources.arrow import Columns, Numbers, batch_of, import_pyarrow, select_columns, to_columns
from headrace.errors import DataError
from headrace.machine.extras import import_package

_REMEDY = (
    'write it to files that all nodes see, dataset.write_parquet(folder), and give hr.data.from_parquet(f"{folder}/*")'
)


def from_ray(dataset: Any, columns: Sequence[str] | None = None, *, memory_limit: int = 1 << 30) -> InputPipeline:
    """Returns a pipeline over the rows of a `ray.data.Dataset`.

    Ray executes the data set once, here, and keeps the order of its input; the rows then go to all workers with the
    job. So every row has an index, and an epoch is shuffled, divided and resumed like that of any data, which a stream
    of Ray's cannot be, and workers need no Ray.

    An example is a dict of values: numbers, lists and arrays of them, as tensors; text as str, the rest as Python has.

    Args:
        dataset: lazy or materialized.
        columns: that are read; None for all.
        memory_limit: bytes that the rows may take. Write larger ones to files by `dataset.write_parquet(folder)`, once,
            and read those by `from_parquet`.

    Raises:
        DataError: it is no such data set, has more than `memory_limit`, no rows, or no such column.
        UnfitMachine: Ray Data is not installed.

    Examples:
        >>> import ray
        >>> _ = ray.init(num_cpus=2, include_dashboard=False)
        >>> len(hr.data.from_ray(ray.data.from_items([{"x": 1.0}, {"x": 2.0}])))
        2
        >>> ray.shutdown()
    """
    data = import_package("ray.data", "data sets of Ray need their package", "pip install 'ray[data]'")
    if not isinstance(dataset, data.Dataset):
        raise DataError(f"from_ray takes a ray.data.Dataset, got {type(dataset).__name__}")
    if columns is not None:
        dataset = dataset.select_columns(select_columns(dataset.columns() or (), columns, "the data set of Ray"))
    rows = _executed(dataset)
    size = rows.size_bytes()
    if size > memory_limit:
        raise DataError(
            f"the data set of Ray has {size:,} bytes, and memory_limit={memory_limit:,}; {_REMEDY}, or give more"
        )
    return InputPipeline(_Rows(_table(rows)))


def _executed(dataset: Any) -> Any:
    """Has Ray execute a data set; the rows are in the order of its input."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return dataset.materialize()
    finally:
        options.preserve_order = before


def _table(rows: Any) -> Any:
    """Returns the blocks of an executed data set as one Arrow table."""
    import ray

    if rows.count() == 0:
        raise DataError("the data set of Ray has no rows; look at its filters")
    blocks = [block for block in ray.get(rows.to_arrow_refs()) if block.num_rows]
    pa = import_pyarrow()
    try:
        return pa.concat_tables(blocks)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"blocks of the data set of Ray differ in columns or types: {error}; cast them by map"
        ) from error


class _Rows(Source):
    def __init__(self, table: Any) -> None:
        self._columns = _columns(table)

    def __len__(self) -> int:
        return self._columns.rows

    def example(self, index: int, epoch: Epoch) -> Any:
        return self._columns.row(index)

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        return batch_of(self._columns.take(indices)) if len(indices) else super().gather(indices, epoch)

    @property
    def identity(self) -> str:
        numbers = [(name, column.values) for name, column in self._columns.numbers.items()]
        others = [(name, column.to_pylist()) for name, column in self._columns.others.items()]
        return f"ray {fingerprint(numbers, others)}"


def _columns(table: Any) -> Columns:
    """Returns the columns of a table, also those of arrays, which Ray has a type of its own for."""
    extension = import_pyarrow().ExtensionType
    names = [name for name in table.column_names if isinstance(table.schema.field(name).type, extension)]
    arrays = {name: _arrays(name, table.column(name)) for name in names}
    plain = to_columns(table.drop_columns(list(arrays)), lambda row: f"row {row} of the data set of Ray")
    numbers: Mapping[str, Numbers] = {**plain.numbers, **arrays}
    return replace(plain, names=tuple(table.column_names), rows=table.num_rows, numbers=numbers)


def _arrays(name: str, column: Any) -> Numbers:
    rows = [row for chunk in column.chunks for row in chunk.to_numpy(zero_copy_only=False)]
    shapes = sorted({row.shape for row in rows})
    if len(shapes) > 1:
        raise DataError(
            f"{name!r} has arrays of {len(shapes)} shapes, {shapes[0]} and {shapes[-1]} among them; give them one "
            "shape by dataset.map, or leave the column out by columns=[...]"
        )
    return Numbers(torch.from_numpy(np.stack(rows)))
