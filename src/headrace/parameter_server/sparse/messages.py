"""Rows on the wire.

pull    table, count, ids                            answer    version, rows
push    table, count, ids, gradients; next table     answer    as of every push
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headrace.spec.embedding import TableSpec
from headrace.trees import as_bytes

_HEAD = struct.Struct("<QQ")
_VERSION = struct.Struct("<q")
_MOVED = -1

Rows = tuple[Tensor, Tensor]
"""Distinct ids, and a gradient for each."""


def encode_pull(table: int, spec: TableSpec, ids: Tensor) -> bytes:
    """Returns the blob that asks for rows of a table."""
    return _HEAD.pack(table, len(ids)) + _bytes(ids.to(_index(spec)))


def decode_pull(tables: Sequence[TableSpec], blob: memoryview) -> tuple[int, Tensor]:
    """Returns table and ids; raises ValueError if this is no pull."""
    table, count, at = _head(tables, blob, 0)
    ids, end = _tensor(blob, at, count, _index(tables[table]))
    if end != len(blob):
        raise ValueError(f"a pull of {count:,} rows came in {len(blob):,} bytes")
    return table, ids.long()


def encode_rows(version: int, rows: Tensor) -> bytes:
    """Returns the blob that answers a pull."""
    return _VERSION.pack(version) + _bytes(rows)


def encode_moved(map_: bytes) -> bytes:
    """Returns the blob that answers a pull of rows of which some are on another server: the map that says so."""
    return _VERSION.pack(_MOVED) + map_


def moved_to(blob: memoryview | bytes) -> bytes | None:
    """Returns the map in the answer to a pull; None if the answer has the rows."""
    (version,) = _VERSION.unpack_from(blob)
    return bytes(blob[_VERSION.size :]) if version == _MOVED else None


def decode_rows(spec: TableSpec, count: int, blob: memoryview | bytes) -> tuple[int, Tensor]:
    """Returns version and rows; raises ValueError if there are not so many."""
    (version,) = _VERSION.unpack_from(blob)
    rows, end = _tensor(memoryview(blob), _VERSION.size, count * spec.width, getattr(torch, spec.dtype))
    if end != len(blob):
        raise ValueError(f"{count:,} rows of the table {spec.name!r} came in {len(blob):,} bytes")
    return version, rows.view(count, spec.width)


def encode_push(tables: Sequence[TableSpec], rows: Sequence[Rows]) -> bytes:
    """Returns the blob of gradients, one for each table; those without rows are left out."""
    parts: list[bytes | memoryview] = []
    for number, (spec, (ids, gradient)) in enumerate(zip(tables, rows, strict=True)):
        if len(ids):
            parts += [_HEAD.pack(number, len(ids)), _bytes(ids.to(_index(spec))), _bytes(gradient)]
    return b"".join(parts)


def longest_push(tables: Sequence[TableSpec]) -> int:
    """Returns the length of a push of all rows that tables may hold."""
    return sum(_HEAD.size + table.most_rows * (_index(table).itemsize + table.row_bytes) for table in tables)


def decode_push(tables: Sequence[TableSpec], blob: memoryview) -> dict[int, Rows]:
    """Returns the gradients by table; raises ValueError if this is no push."""
    return dict(_pushed(tables, blob))


def _pushed(tables: Sequence[TableSpec], blob: memoryview) -> Iterator[tuple[int, Rows]]:
    at = 0
    while at < len(blob):
        table, count, at = _head(tables, blob, at)
        spec = tables[table]
        ids, at = _tensor(blob, at, count, _index(spec))
        gradient, at = _tensor(blob, at, count * spec.width, getattr(torch, spec.dtype))
        ids = ids.long()
        if count and not (int(ids.min()) >= 0 and int(ids.max()) < spec.rows and bool((ids.diff() > 0).all())):
            raise ValueError(f"a push for rows that the table {spec.name!r} has not, or twice for one row")
        yield table, (ids, gradient.view(count, spec.width))


def _index(spec: TableSpec) -> torch.dtype:
    return torch.int32 if spec.rows < 2**31 else torch.int64


def _head(tables: Sequence[TableSpec], blob: memoryview, at: int) -> tuple[int, int, int]:
    if len(blob) - at < _HEAD.size:
        raise ValueError(f"{len(blob) - at} bytes are no rows")
    table, count = _HEAD.unpack_from(blob, at)
    if table >= len(tables):
        raise ValueError(f"there is no table {table}, only {len(tables)}")
    return table, count, at + _HEAD.size


def _tensor(blob: memoryview, at: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    end = at + count * dtype.itemsize
    if end > len(blob):
        raise ValueError(f"{count:,} numbers of {dtype} do not fit into {len(blob) - at:,} bytes")
    if not count:
        return torch.empty(0, dtype=dtype), end
    # A copy: what was received may be overwritten, and need not be aligned.
    return torch.frombuffer(bytearray(blob[at:end]), dtype=dtype), end


def _bytes(tensor: Tensor) -> memoryview:
    return as_bytes(tensor.contiguous()).numpy().data if tensor.numel() else memoryview(b"")
