"""CSV: rows as examples, read once into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch, Source, emptied
from headrace.data.sources.columns import arrow, batch_of, chosen, columns_of
from headrace.data.sources.spans import Spans
from headrace.data.sources.storage import SourceFile, each, find, identity_of
from headrace.errors import DataError, UsageError

_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def from_csv(
    where: str | Sequence[str],
    columns: Sequence[str] | None = None,
    *,
    delimiter: str = ",",
    types: Mapping[str, str] | None = None,
    **options: Any,
) -> InputPipeline:
    """Returns a pipeline over the rows of CSV files, whose first line names the columns.

    An example is a dict of values: numbers as tensors, text as str. All rows are read at once into memory; what does
    not fit there is better written as Parquet.

    Args:
        where: a pattern, "table/*.csv" or "s3://bucket/table/*.csv", or several; .gz and the like are unpacked.
        columns: that are read; None for all.
        delimiter: between the values of a row.
        types: of columns whose type shall not be found out, as Arrow calls them: `{"age": "float32"}`.
        options: of the file system, as fsspec takes them.

    Raises:
        DataError: no file is found, one cannot be parsed, has other columns or types than the first, or there is no
            such column.
        UsageError: there is no such type.
        UnfitMachine: pyarrow is not installed, or what that file system needs.
    """
    pa = arrow()
    files = find(where, options)
    try:
        wanted = {name: pa.type_for_alias(kind) for name, kind in (types or {}).items()}
    except ValueError as error:
        raise UsageError(
            f"types {dict(types or {})} name no type of Arrow: {error}; say 'float32', 'int64', 'string'"
        ) from error
    tables = each(lambda file: _read(file, delimiter, wanted), files)
    names = chosen(tables[0].column_names, columns, files[0].name)
    schema = tables[0].schema
    for file, table in zip(files, tables, strict=True):
        chosen(table.column_names, [*names, *wanted], file.name)
        for name in names:
            found, expected = table.schema.field(name).type, schema.field(name).type
            if found != expected:
                raise DataError(
                    f"{file.name}: column {name!r} is {found}, and in {files[0].name} it is {expected}; say what both "
                    f"are, types={{{name!r}: 'float64'}}"
                )
    return InputPipeline(_Csv(files, [table.select(names) for table in tables], f"{delimiter!r} {dict(types or {})}"))


def _read(file: SourceFile, delimiter: str, types: Mapping[str, Any]) -> Any:
    pa = arrow()
    from pyarrow import csv

    _, ending = os.path.splitext(file.name)
    with file.open() as binary:
        stream = pa.input_stream(binary, compression=_PACKED[ending]) if ending in _PACKED else binary
        try:
            return csv.read_csv(
                stream,
                parse_options=csv.ParseOptions(delimiter=delimiter),
                convert_options=csv.ConvertOptions(column_types=types),
            )
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.name} cannot be read as CSV: {error}") from error


class _Csv(Source):
    """Args:
    files: in turn.
    tables: the rows of each, all of one schema.
    how: they were read.
    """

    def __init__(self, files: Sequence[SourceFile], tables: Sequence[Any], how: str) -> None:
        self._files = tuple(files)
        self._how = how
        self._spans = Spans(table.num_rows for table in tables)
        self._columns = columns_of(arrow().concat_tables(tables), self.key)

    def __len__(self) -> int:
        return self._columns.rows

    def example(self, index: int, epoch: Epoch) -> Any:
        return self._columns.row(index)

    @property
    def identity(self) -> str:
        return identity_of("csv", self._files, self._columns.names, self._how)

    @property
    def gathers(self) -> bool:
        return True

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        if not len(indices):
            return emptied(batch_of(self._columns.take(torch.zeros(1, dtype=torch.int64))))
        return batch_of(self._columns.take(indices))

    def key(self, index: int) -> str:
        at, row = self._spans.find(index)
        # Counted from 0, below the line that names the columns.
        return f"{self._files[at].name}, row {row}"
