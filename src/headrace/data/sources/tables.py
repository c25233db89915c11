"""CSV and Parquet files: rows as examples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import Epoch
from headrace.data.sources.arrow import (
    Columns,
    batch_of,
    concatenate,
    import_pyarrow,
    select_columns,
    to_columns,
    width,
)
from headrace.data.sources.storage import BoundedCache, FileSource, SourceFile, Spans, find_files, map_files, unreadable
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
        UsageError: there is no such type, or the delimiter is not one character.
        UnfitMachine: pyarrow is not installed, or what that file system needs.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("houses.csv").write_text("rooms,price\\n3,120.5\\n4,180\\n")
        >>> hr.data.from_csv("houses.csv").source.example(0, hr.data.Epoch(0, 0))["rooms"]
        tensor(3)
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise UsageError(f"delimiter must be one character, got {delimiter!r}; tabs are '\\t'")
    pa = import_pyarrow()
    files = find_files(where, options)
    try:
        wanted = {name: pa.type_for_alias(kind) for name, kind in (types or {}).items()}
    except ValueError as error:
        raise UsageError(
            f"types {dict(types or {})} name no type of Arrow: {error}; say 'float32', 'int64', 'string'"
        ) from error
    tables = map_files(lambda file: _read(file, delimiter, wanted), files)
    names = select_columns(tables[0].column_names, columns, files[0].name)
    select_columns(tables[0].column_names, list(wanted), files[0].name)
    _require_one_schema(
        files, [table.schema for table in tables], [*names, *wanted], "say what both are, types={{{!r}: 'float64'}}"
    )
    how = f"{delimiter!r} {dict(types or {})}"
    return InputPipeline(_Csv(files, [table.select(names) for table in tables], how))


def _read(file: SourceFile, delimiter: str, types: Mapping[str, Any]) -> Any:
    pa = import_pyarrow()
    from pyarrow import csv

    _, ending = os.path.splitext(file.name)
    with file.open() as binary:
        stream = pa.input_stream(binary, compression=_PACKED[ending]) if ending in _PACKED else binary
        try:
            table = csv.read_csv(
                stream,
                parse_options=csv.ParseOptions(delimiter=delimiter),
                convert_options=csv.ConvertOptions(column_types=types),
            )
            # Arrow decodes the names when they are asked for.
            table.column_names  # noqa: B018
            return table
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file.name} cannot be read as CSV: {error}") from error


class _Csv(FileSource):
    unit = "row"  # counted below the line that names the columns

    def __init__(self, files: Sequence[SourceFile], tables: Sequence[Any], how: str) -> None:
        super().__init__("csv", files, [table.num_rows for table in tables], tuple(tables[0].column_names), how)
        self._columns = to_columns(import_pyarrow().concat_tables(tables), self.key)

    def example(self, index: int, epoch: Epoch) -> Any:
        return self._columns.row(index)

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        return batch_of(self._columns.take(indices)) if len(indices) else super().gather(indices, epoch)


def from_parquet(
    where: str | Sequence[str],
    columns: Sequence[str] | None = None,
    *,
    memory_limit: int = 1 << 30,
    **options: Any,
) -> InputPipeline:
    """Returns a pipeline over the rows of Parquet files.

    An example is a dict of values: numbers, and lists of them, as tensors; text as str, the rest as Python has it.

    Files are read by row groups. Those that were decoded are kept as far as `memory_limit` goes: where all fit, each is
    decoded once. A shuffled epoch over more than that comes back to every row group in almost every batch; chain
    `.cache(path)`, or write the files with small row groups.

    Args:
        where: a pattern, "table/*.parquet" or "s3://bucket/table/*.parquet", or several.
        columns: that are read; None for all.
        memory_limit: bytes that decoded row groups may take, of each worker.
        options: of the file system, as fsspec takes them.

    Raises:
        DataError: no file is found, one is no Parquet, has another schema than the first, or there is no such column.
        UnfitMachine: pyarrow is not installed, or what that file system needs.

    Examples:
        >>> import pyarrow
        >>> import pyarrow.parquet
        >>> pyarrow.parquet.write_table(pyarrow.table({"rooms": [3, 4]}), "houses.parquet")
        >>> hr.data.from_parquet("houses.parquet").source.example(1, hr.data.Epoch(0, 0))
        {'rooms': tensor(4)}
    """
    files = find_files(where, options)
    metadata = map_files(lambda file: _opened(file, None, attrgetter("metadata")), files)
    schemas = [file.schema.to_arrow_schema() for file in metadata]
    names = select_columns(schemas[0].names, columns, files[0].name)
    _require_one_schema(files, schemas, names, "write both with one type, or leave it out by columns=[...]")
    widths = [width(schemas[0].field(name).type) for name in names]
    row = None if None in widths else sum(filter(None, widths))
    return InputPipeline(_Parquet(files, metadata, names, row, memory_limit))


def _opened(file: SourceFile, metadata: Any, use: Any) -> Any:
    """Returns what `use` makes of the opened file."""
    damaged = import_pyarrow().ArrowException
    from pyarrow import parquet

    with file.open() as binary:
        try:
            # A file of this machine is read by name, without the interpreter's lock.
            source = binary if file.remote else file.name
            with parquet.ParquetFile(source, metadata=metadata, pre_buffer=file.remote is not None) as opened:
                return use(opened)
        except (damaged, OSError) as error:
            size = "an unknown number of" if file.size is None else f"{file.size:,}"
            raise DataError(
                f"{file.name} ({size} bytes when it was found) is not a whole Parquet file: {error}"
            ) from error
        except Exception as error:
            raise unreadable(file.name, error) from error


def _require_one_schema(files: Sequence[SourceFile], schemas: Sequence[Any], names: Sequence[str], remedy: str) -> None:
    for file, schema in zip(files, schemas, strict=True):
        counts = Counter(schema.names)
        for name in names:
            if not counts[name]:
                has = ", ".join(schema.names)
                raise DataError(f"{file.name} has no column {name!r}, which {files[0].name} has; it has {has}")
            if counts[name] > 1:
                raise DataError(f"{file.name} has {counts[name]} columns of the name {name!r}; give each its own")
            dtype, expected = schema.field(name).type, schemas[0].field(name).type
            if dtype != expected:
                raise DataError(
                    f"{file.name}: column {name!r} is {dtype}, and in {files[0].name} it is {expected}; "
                    + remedy.format(name)
                )


def _in_order(values: Sequence[Any], places: NDArray[np.int64]) -> Any:
    """Returns values of one column, taken from several pieces, as one tensor or list, at their places."""
    forms = {value.shape[1:] if isinstance(value, Tensor) else None for value in values}
    if len(forms) == 1 and None not in forms:
        return torch.from_numpy(np.concatenate([value.numpy() for value in values])[places])
    flat = list(chain.from_iterable(values))
    return [flat[place] for place in places.tolist()]


class _Parquet(FileSource):
    """Decodes one piece at a time and caches it: all row groups as one if they fit into memory, else each alone.

    `row` is the size of a decoded row in bytes, None if a column is not of numbers.
    """

    def __init__(
        self, files: Sequence[SourceFile], metadata: Sequence[Any], names: Sequence[str], row: int | None, limit: int
    ) -> None:
        self._metadata = tuple(metadata)
        self._names = list(names)
        # The file of each row group, and its number there.
        self._groups = [(at, group) for at, file in enumerate(metadata) for group in range(file.num_row_groups)]
        lengths = [metadata[at].row_group(group).num_rows for at, group in self._groups]
        for (at, group), rows in zip(self._groups, lengths, strict=True):
            if rows < 0:
                raise DataError(f"{files[at].name} is damaged: its row group {group} says that it has {rows:,} rows")
        super().__init__("parquet", files, lengths, self._names)
        whole = row is not None and row * len(self) <= limit
        self._pieces = Spans([len(self)]) if whole else self._spans
        self._decoded: BoundedCache[Columns] = BoundedCache(limit, attrgetter("nbytes"))

    def example(self, index: int, epoch: Epoch) -> Any:
        which, row = self._pieces.find(index)
        return self._piece(which).row(row)

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        if not len(indices):
            return super().gather(indices, epoch)
        # By numpy: torch would synchronize all its threads for each of these small operations.
        wanted, begins = indices.numpy(), np.array(self._pieces.begins)
        which = np.searchsorted(begins, wanted, side="right") - 1
        places = np.argsort(which, kind="stable")
        rows = torch.from_numpy((wanted - begins[which])[places])
        # Piece by piece, so that each is decoded once even if two do not fit into memory.
        tables = []
        for piece, count in zip(*(it.tolist() for it in np.unique(which, return_counts=True)), strict=True):
            tables.append(self._piece(piece).take(rows[:count]))
            rows = rows[count:]
        back = np.argsort(places)
        return batch_of({name: _in_order([table[name] for table in tables], back) for name in self._names})

    def key(self, index: int) -> str:
        which, row = self._spans.find(index)
        at, group = self._groups[which]
        begins = self._spans.begins
        return f"{self._files[at].name}, row {begins[which] - begins[which - group] + row}"

    def nbytes(self, index: int) -> int | None:
        at, group = self._groups[self._spans.find(index)[0]]
        about = self._metadata[at].row_group(group)
        return int(about.total_byte_size // max(1, about.num_rows))

    def _piece(self, which: int) -> Columns:
        def decode() -> Columns:
            if self._pieces is self._spans:
                return self._group(which)
            return concatenate(map(self._group, range(len(self._groups))), len(self), self.key)

        return self._decoded.get(which, decode)

    def _group(self, which: int) -> Columns:
        at, group = self._groups[which]
        # Opened anew, since two threads may not read one at once.
        table = _opened(
            self._files[at],
            self._metadata[at],
            lambda opened: opened.read_row_group(group, self._names, use_threads=False),
        )
        first = self._spans.begins[which]
        return to_columns(table, lambda row: self.key(first + row))
