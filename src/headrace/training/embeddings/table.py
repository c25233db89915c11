"""A table that holds the rows which were changed; all others are as the generator makes them, and take no memory.

ids  ──► index ──► slots ──► values, state          a changed row
             └──► generator                         any other
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UnfitMachine
from headrace.spec.embedding import FLOAT_BYTES, TableSpec
from headrace.training.embeddings.generator import first_rows

_RESERVED_ONLY = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class RowBlock:
    """Rows with their state.

    Attributes:
        ids: `(rows,)` int64.
        values: `(rows, width)`.
        state: by key, `(rows, width)` or `(rows, 1)`.
        steps: of the table so far.
    """

    ids: Tensor
    values: Tensor
    state: Mapping[str, Tensor]
    steps: int = 0


class EmbeddingTable:
    """The changed rows of a table, in the order in which they were changed first.

    Args:
        columns: of the state: by key, how many numbers a row has, and what they begin with.

    `steps` counts the updates of the table, also those without rows.
    """

    def __init__(self, spec: TableSpec, columns: Mapping[str, tuple[int, float]] | None = None) -> None:
        self.spec = spec
        self.steps = 0
        self._columns = dict(columns or {})
        self._count = 0
        self._index: Tensor | None = None

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        # Memory is only reserved for most of the tensors, so that they must not be copied.
        return _rebuilt, (self.spec, self._columns, self.block(0, self._count))

    @property
    def nbytes(self) -> int:
        """Bytes of the values and of the state that it holds."""
        numbers = self.spec.width + sum(width for width, _ in self._columns.values())
        return self._count * numbers * FLOAT_BYTES[self.spec.dtype]

    def read(self, ids: Tensor) -> Tensor:
        """Returns the rows `ids`, distinct int64, as `(ids, width)`; changes nothing.

        Raises:
            ValueError: the table has no such row.
        """
        self._require(ids)
        if not self._count:
            return first_rows(self.spec, ids)
        slots = self._reserved().index_select(0, ids).long() - 1
        unseen = (slots < 0).nonzero().view(-1)
        # Several times as fast as indexing by a tensor.
        rows = self.values.index_select(0, slots.clamp_(min=0))
        if len(unseen):
            rows[unseen] = first_rows(self.spec, ids[unseen])
        return rows

    def slots(self, ids: Tensor) -> Tensor:
        """Returns where distinct rows are in `values` and `state`; makes those that are not there yet."""
        return self._place(ids, begin=True)

    def _place(self, ids: Tensor, begin: bool) -> Tensor:
        """Returns the slots of rows; if not `begin`, the caller writes the values of all of them."""
        self._require(ids)
        index = self._reserved()
        unseen = ids[index[ids] == 0]
        if len(unseen):
            start, stop = self._count, self._count + len(unseen)
            if begin:
                self.values[start:stop] = first_rows(self.spec, unseen)
            for key, (_, first) in self._columns.items():
                self.state[key][start:stop] = first
            self._ids[start:stop] = unseen
            index[unseen] = torch.arange(start + 1, stop + 1, dtype=index.dtype)
            self._count = stop
        return index[ids].long() - 1

    def block(self, start: int, stop: int) -> RowBlock:
        """Returns copies of the changed rows `[start, stop)`, or of as many as there are."""
        stop = min(stop, self._count)
        if start >= stop:
            width, dtype = self.spec.width, getattr(torch, self.spec.dtype)
            none = {key: torch.empty(0, each, dtype=dtype) for key, (each, _) in self._columns.items()}
            return RowBlock(torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=dtype), none, self.steps)
        state = {key: tensor[start:stop].clone() for key, tensor in self.state.items()}
        return RowBlock(self._ids[start:stop].clone(), self.values[start:stop].clone(), state, self.steps)

    def load(self, block: RowBlock) -> None:
        """Takes over rows; state that the block lacks begins anew.

        Raises:
            ValueError: the rows are of another table.
        """
        if block.values.shape != (len(block.ids), self.spec.width):
            raise ValueError(f"{tuple(block.values.shape)} are not {len(block.ids)} rows of {self.spec.width} numbers")
        if len(torch.unique(block.ids)) != len(block.ids):
            raise ValueError(f"of {len(block.ids)} rows of the table {self.spec.name!r}, some are there twice")
        state = {key: block.state[key] for key in self._columns if key in block.state}
        for key, value in state.items():
            if value.shape != (len(block.ids), self._columns[key][0]):
                raise ValueError(f"the state {key!r} of {len(block.ids)} rows is {tuple(value.shape)}")
        slots = self._place(block.ids, begin=False)
        self.values[slots] = block.values.to(self.values.dtype)
        for key, value in state.items():
            self.state[key][slots] = value.to(self.values.dtype)
        self.steps = max(self.steps, block.steps)

    def clear(self) -> None:
        """Drops all rows: they are again as they began."""
        self.steps, self._count, self._index = 0, 0, None

    def _require(self, ids: Tensor) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.spec.rows:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(f"there is no row {bad:,} in the table {self.spec.name!r}, which has {self.spec.rows:,}")

    def _reserved(self) -> Tensor:
        """Reserves addresses for all rows; memory is used where rows are written."""
        if self._index is None:
            spec, dtype = self.spec, getattr(torch, self.spec.dtype)
            self._index = _reserve(spec, (spec.rows,), torch.int32 if spec.rows < 2**31 else torch.int64)
            self._ids = _reserve(spec, (spec.rows,), torch.int64)
            self.values = _reserve(spec, (spec.rows, spec.width), dtype)
            self.state = {key: _reserve(spec, (spec.rows, width), dtype) for key, (width, _) in self._columns.items()}
        return self._index


def _reserve(spec: TableSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    elements = 1
    for length in shape:
        elements *= length
    nbytes = max(1, elements * dtype.itemsize)
    try:
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _RESERVED_ONLY)
    except (OSError, OverflowError) as error:
        raise UnfitMachine(
            f"no addresses for the table {spec.name!r}: {nbytes:,} bytes for {spec.rows:,} rows ({error}); raise the "
            "limit of virtual memory (ulimit -v), or use more servers"
        ) from error
    return torch.frombuffer(region, dtype=dtype, count=elements).view(shape)


def _rebuilt(spec: TableSpec, columns: Mapping[str, tuple[int, float]], block: RowBlock) -> EmbeddingTable:
    table = EmbeddingTable(spec, columns)
    table.load(block)
    return table
