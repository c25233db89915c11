"""A table that holds the rows which were changed; all others are as the generator makes them, and take no memory.

ids  ──► index ──► slots ──► values, state          a changed row
             └──► generator                         any other

A table with a limit drops rows before there are more; these are then as the generator makes them again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UnfitMachine, UsageError
from headrace.spec.embedding import FLOAT_BYTES, TableSpec
from headrace.spec.events import TableStats
from headrace.training.embeddings.generator import first_rows
from headrace.training.embeddings.pieces import RowBlock
from headrace.training.embeddings.vocabulary.index import DirectIndex, HashIndex, RowIndex, how_many, least_used

_RESERVED_ONLY = getattr(mmap, "MAP_NORESERVE", 0x4000)
_USES_BYTES = 16


class EmbeddingTable:
    """The changed rows of a table, in slots from 0 on without gaps.

    Args:
        columns: of the state: by key, how many numbers a row has, and what they begin with.

    `steps` counts the updates of the table, also those without rows; `evicted` the rows that were dropped because the
    table has a limit.
    """

    def __init__(self, spec: TableSpec, columns: Mapping[str, tuple[int, float]] | None = None) -> None:
        self.spec = spec
        self.steps = self.evicted = 0
        self._columns = dict(columns or {})
        self._count = 0
        self._index: RowIndex | None = None

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        # Memory is only reserved for most of the tensors, so that they must not be copied.
        return _rebuilt, (self.spec, self._columns, self.block(0, self._count))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its state."""
        numbers = self.spec.width + sum(width for width, _ in self._columns.values())
        return numbers * FLOAT_BYTES[self.spec.dtype] + (_USES_BYTES if self.spec.limit else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that it holds, with their state."""
        return self._count * self.row_bytes

    def stats(self) -> TableStats:
        """Returns how many rows it holds, and has dropped."""
        return TableStats(self.spec.name, self._count, self.spec.most_rows if self.spec.limit else 0, self.evicted)

    def read(self, ids: Tensor) -> Tensor:
        """Returns the rows `ids`, distinct int64, as `(ids, width)`; changes nothing.

        Raises:
            ValueError: the table has no such row.
        """
        self._require(ids)
        if not self._count:
            return first_rows(self.spec, ids)
        slots = self._reserved().find(ids)
        unseen = (slots < 0).nonzero().view(-1)
        # Several times as fast as indexing by a tensor.
        rows = self.values.index_select(0, slots.clamp_(min=0))
        if len(unseen):
            rows[unseen] = first_rows(self.spec, ids[unseen])
        return rows

    def slots(self, ids: Tensor) -> Tensor:
        """Returns where distinct rows, which are updated now, are in `values` and `state`; makes those that are not.

        Raises:
            UsageError: these alone are more rows than the table may hold.
        """
        self._require(ids)
        index, limit = self._reserved(), self.spec.limit
        slots = index.find(ids)
        if limit is not None:
            new = int((slots < 0).sum())
            most = self.spec.most_rows
            if len(ids) > most:
                raise UsageError(
                    f"one update changes {len(ids):,} rows of the table {self.spec.name!r}, and {most:,} may be held "
                    "here; raise max_rows (each of several servers has an equal part of it), or use a smaller batch"
                )
            count = how_many(self._count, new, limit.rows)
            if count:
                self._evict(slots[slots >= 0], min(count, self._count - len(ids) + new))
        slots = self._place(ids, begin=True)
        if limit is not None:
            self.uses[slots, 0] = self.steps
            self.uses[slots, 1] += 1
        return slots

    def _place(self, ids: Tensor, begin: bool) -> Tensor:
        """Returns the slots of rows; if not `begin`, the caller writes the values of all of them."""
        index = self._reserved()
        slots = index.find(ids)
        new = (slots < 0).nonzero().view(-1)
        if len(new):
            unseen, start, stop = ids[new], self._count, self._count + len(new)
            if begin:
                self.values[start:stop] = first_rows(self.spec, unseen)
            for key, (_, first) in self._columns.items():
                self.state[key][start:stop] = first
            if self.spec.limit is not None:
                self.uses[start:stop] = 0
            self._ids[start:stop] = unseen
            slots[new] = made = torch.arange(start, stop)
            index.put(unseen, made)
            self._count = stop
        return slots

    def _evict(self, kept: Tensor, count: int) -> None:
        """Drops `count` rows, but none of the slots `kept`."""
        assert self.spec.limit is not None
        may_go = torch.ones(self._count, dtype=torch.bool)
        may_go[kept] = False
        others = may_go.nonzero().view(-1)
        self._drop(others[least_used(self.uses[others], self._ids[others], count, self.spec.limit.evict)])
        self.evicted += count

    def _drop(self, slots: Tensor) -> None:
        """Drops the rows in some slots, ascending; the last rows take these slots."""
        index = self._reserved()
        index.drop(self._ids[slots])
        self._count -= len(slots)
        behind = torch.ones(len(slots), dtype=torch.bool)
        behind[slots[slots >= self._count] - self._count] = False
        movers, holes = behind.nonzero().view(-1) + self._count, slots[slots < self._count]
        moved = self._ids[movers]
        index.drop(moved)
        index.put(moved, holes)
        uses = [] if self.spec.limit is None else [self.uses]
        for tensor in (self._ids, *uses, self.values, *self.state.values()):
            tensor[holes] = tensor[movers]

    def block(self, start: int, stop: int) -> RowBlock:
        """Returns copies of the changed rows `[start, stop)`, or of as many as there are."""
        stop = min(stop, self._count)
        if start >= stop:
            width, dtype = self.spec.width, getattr(torch, self.spec.dtype)
            none = {key: torch.empty(0, each, dtype=dtype) for key, (each, _) in self._columns.items()}
            return RowBlock(torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=dtype), none, self.steps)
        state = {key: tensor[start:stop].clone() for key, tensor in self.state.items()}
        uses = None if self.spec.limit is None else self.uses[start:stop].clone()
        return RowBlock(self._ids[start:stop].clone(), self.values[start:stop].clone(), state, self.steps, uses)

    def held(self, start: int, stop: int) -> int:
        """Returns how many rows of [start, stop) have been changed."""
        return len(self._slots_within([(start, stop)]))

    def within(self, ranges: Sequence[tuple[int, int]], remove: bool = False) -> RowBlock:
        """Returns copies of the changed rows whose ids are in some ranges [start, stop), which do not overlap.

        With `remove`, drops them here.
        """
        if not self._count:
            return self.block(0, 0)
        slots = self._slots_within(ranges)
        state = {key: tensor[slots] for key, tensor in self.state.items()}
        uses = None if self.spec.limit is None else self.uses[slots]
        block = RowBlock(self._ids[slots], self.values[slots], state, self.steps, uses)
        if remove:
            self._drop(slots)
        return block

    def _slots_within(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the slots of the changed rows in some ranges, ascending."""
        if not self._count:
            return torch.empty(0, dtype=torch.int64)
        if sum(stop - start for start, stop in ranges) <= self._count:
            slots = self._reserved().find(torch.cat([torch.arange(*each) for each in ranges]))
            found: Tensor = slots[slots >= 0].sort().values
            return found
        ids = self._ids[: self._count]
        starts, stops = torch.tensor(sorted(ranges)).T.contiguous()
        at = torch.searchsorted(starts, ids, right=True) - 1
        within: Tensor = (at >= 0) & (ids < stops[at.clamp(min=0)])
        return within.nonzero().view(-1)

    def load(self, block: RowBlock) -> None:
        """Takes over rows; state and uses that the block lacks begin anew.

        Where these would be more than the table may hold, rows are dropped, of those that are here or of the block.

        Raises:
            ValueError: the rows are of another table.
        """
        self._check(block)
        self.steps = max(self.steps, block.steps)
        uses = block.uses
        if self.spec.limit is not None:
            uses = torch.zeros(len(block.ids), 2, dtype=torch.int64) if uses is None else uses
            block, uses = self._with_room(block, uses)
        slots = self._place(block.ids, begin=False)
        self.values[slots] = block.values.to(self.values.dtype)
        for key in self._columns.keys() & block.state.keys():
            self.state[key][slots] = block.state[key].to(self.values.dtype)
        if self.spec.limit is not None and uses is not None:
            self.uses[slots] = uses

    def _check(self, block: RowBlock) -> None:
        self._require(block.ids)
        count = len(block.ids)
        if block.values.shape != (count, self.spec.width):
            raise ValueError(f"{tuple(block.values.shape)} are not {count} rows of {self.spec.width} numbers")
        if len(torch.unique(block.ids)) != count:
            raise ValueError(f"of {count} rows of the table {self.spec.name!r}, some are there twice")
        for key in self._columns.keys() & block.state.keys():
            if block.state[key].shape != (count, self._columns[key][0]):
                raise ValueError(f"the state {key!r} of {count} rows is {tuple(block.state[key].shape)}")
        if block.uses is not None and (block.uses.shape != (count, 2) or block.uses.dtype != torch.int64):
            raise ValueError(f"the uses of {count} rows are {tuple(block.uses.shape)} of {block.uses.dtype}")

    def _with_room(self, block: RowBlock, uses: Tensor) -> tuple[RowBlock, Tensor]:
        """Makes room for a block that is loaded; returns what is left of it."""
        limit, slots = self.spec.limit, self._reserved().find(block.ids)
        assert limit is not None
        over = self._count + int((slots < 0).sum()) - limit.rows
        if over <= 0:
            return block, uses
        held = torch.ones(self._count, dtype=torch.bool)
        held[slots[slots >= 0]] = False
        others = held.nonzero().view(-1)
        every = torch.cat([self.uses[others], uses]), torch.cat([self._ids[others], block.ids])
        gone = least_used(*every, over, limit.evict)
        self._drop(others[gone[gone < len(others)]])
        kept = torch.ones(len(block.ids), dtype=torch.bool)
        kept[gone[gone >= len(others)] - len(others)] = False
        self.evicted += len(gone)
        state = {key: value[kept] for key, value in block.state.items()}
        return RowBlock(block.ids[kept], block.values[kept], state, block.steps), uses[kept]

    def clear(self) -> None:
        """Drops all rows: they are again as they began."""
        self.steps, self._count, self._index = 0, 0, None

    def _require(self, ids: Tensor) -> None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.spec.rows:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(f"there is no row {bad:,} in the table {self.spec.name!r}, which has {self.spec.rows:,}")

    def _reserved(self) -> RowIndex:
        """Reserves addresses for all rows that may be held; memory is used where rows are written."""
        if self._index is None:
            spec, dtype, most = self.spec, getattr(torch, self.spec.dtype), self.spec.most_rows
            self._ids = _reserve(spec, (most,), torch.int64)
            self.values = _reserve(spec, (most, spec.width), dtype)
            self.state = {key: _reserve(spec, (most, width), dtype) for key, (width, _) in self._columns.items()}
            if spec.limit is not None:
                self.uses = _reserve(spec, (most, 2), torch.int64)
                self._index = HashIndex()
            else:
                self._index = DirectIndex(_reserve(spec, (most,), torch.int32 if most < 2**31 else torch.int64))
        return self._index


def _reserve(spec: TableSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    elements = math.prod(shape)
    nbytes = max(1, elements * dtype.itemsize)
    try:
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _RESERVED_ONLY)
    except (OSError, OverflowError) as error:
        raise UnfitMachine(
            f"no addresses for the table {spec.name!r}: {nbytes:,} bytes for {spec.most_rows:,} rows ({error}); raise "
            "the limit of virtual memory (ulimit -v), use more servers, or hold fewer rows (hr.limit_rows)"
        ) from error
    return torch.frombuffer(region, dtype=dtype, count=elements).view(shape)


def _rebuilt(spec: TableSpec, columns: Mapping[str, tuple[int, float]], block: RowBlock) -> EmbeddingTable:
    table = EmbeddingTable(spec, columns)
    table.load(block)
    return table
