"""Which server has a row: the one place that decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.parameter_server.core.row_moves import Placed, RowMap, RowRange, overlapping
from headrace.spec.embedding import TableSpec


class RowPlacement(ABC):
    """Places the rows of tables on servers, from the row alone, so that all workers find it without asking."""

    def range_of(self, table: TableSpec, server: int, servers: int) -> tuple[int, int] | None:
        """Returns the rows [start, stop) that a server has, and no other; None if they are not one range."""
        return None

    @abstractmethod
    def owners(self, table: TableSpec, ids: Tensor, servers: int) -> Tensor:
        """Returns the index of each row's server, int64; `ids` are int64."""


class RangePlacement(RowPlacement):
    """Gives each server one range of rows, all of about the same length."""

    def owners(self, table: TableSpec, ids: Tensor, servers: int) -> Tensor:
        starts = [_start(table, server, servers) for server in range(1, servers)]
        return torch.bucketize(ids, torch.tensor(starts, dtype=torch.int64), right=True)

    def range_of(self, table: TableSpec, server: int, servers: int) -> tuple[int, int] | None:
        return _start(table, server, servers), _start(table, server + 1, servers)


def _start(table: TableSpec, server: int, servers: int) -> int:
    return -(-server * table.rows // servers)


class HashPlacement(RowPlacement):
    """Spreads neighbouring rows over all servers, by a hash of the index (the finalizer of splitmix64)."""

    def owners(self, table: TableSpec, ids: Tensor, servers: int) -> Tensor:
        mixed = ids
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            # Without the sign: torch has no unsigned shift.
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))).remainder(servers)


ROW_PLACEMENTS: Mapping[str, RowPlacement] = {"hash": HashPlacement(), "range": RangePlacement()}


class RowPlaces:
    """Which server has a row: as its placement says, or where it was moved to since.

    Args:
        tables: of the model; tables are named by their number here.
        map: of the moves so far; `adopt` takes over a later one.
    """

    def __init__(self, placement: RowPlacement, tables: Sequence[TableSpec], servers: int) -> None:
        self.placement, self.tables, self.servers = placement, tables, servers
        self.map = RowMap()
        self._moved: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def adopt(self, map_: RowMap) -> bool:
        """Takes over a map, or its changes, if it is later than the one that is here; returns whether it is."""
        if map_.version <= self.map.version:
            return False
        self.map, self._moved = self.map.updated(map_), {}
        by_table: dict[int, list[Placed]] = {}
        for placed in self.map.placed:
            by_table.setdefault(placed.rows.table, []).append(placed)
        for number, entries in by_table.items():
            columns = zip(*((at.rows.start, at.rows.stop, at.server, at.since) for at in entries), strict=True)
            starts, stops, servers, since = (torch.tensor(column) for column in columns)
            self._moved[number] = starts, stops, servers, since
        return True

    def owners(self, number: int, ids: Tensor) -> Tensor:
        """Returns the index of each row's server."""
        owners = self.placement.owners(self.tables[number], ids, self.servers)
        at, moved = self._moved_at(number, ids)
        if at is not None:
            owners[moved] = self._moved[number][2][at[moved]]
        return owners

    def since(self, number: int, ids: Tensor) -> Tensor:
        """Returns the number of the move by which each row came to its server; 0 for rows that were never moved."""
        since = torch.zeros(len(ids), dtype=torch.int64)
        at, moved = self._moved_at(number, ids)
        if at is not None:
            since[moved] = self._moved[number][3][at[moved]]
        return since

    def split(self, number: int, ids: Tensor) -> list[Tensor]:
        """Returns, by server, where in `ids` its rows are."""
        if self.servers == 1:
            return [torch.arange(len(ids))]
        owners = self.owners(number, ids)
        return [(owners == server).nonzero().view(-1) for server in range(self.servers)]

    def has(self, server: int, rows: RowRange) -> bool:
        """Tells whether a server has all rows of a range."""
        return self.owned(server, rows) == [rows]

    def owned(self, server: int, rows: RowRange) -> list[RowRange]:
        """Returns the parts of a range that a server has; with a hash, a single row or none."""
        spec = self.tables[rows.table]
        if rows.stop - rows.start == 1:
            return [rows] if int(self.owners(rows.table, torch.tensor([rows.start]))[0]) == server else []
        whole = self.placement.range_of(spec, server, self.servers)
        base = None if whole is None else rows.within(RowRange(rows.table, *whole))
        parts = [] if base is None else [base]
        moved = self.map.placed[overlapping(self.map.placed, rows)]
        for placed in moved:
            parts = [left for part in parts for left in part.without(placed.rows)]
        here = [placed.rows.within(rows) for placed in moved if placed.server == server]
        return sorted([*parts, *(part for part in here if part is not None)])

    def _moved_at(self, number: int, ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """Returns for each row the last moved range that begins before it, and whether the row is in that range."""
        if number not in self._moved:
            return None, torch.empty(0, dtype=torch.bool)
        starts, stops, _, _ = self._moved[number]
        at = torch.searchsorted(starts, ids, right=True) - 1
        moved = (at >= 0) & (ids < stops[at.clamp(min=0)])
        return at, moved
