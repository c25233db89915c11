"""Which rows a server is asked for: a window of the last requests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.parameter_server.core.row_moves import RowRange
from headrace.parameter_server.sparse.placement import RowPlaces
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.policies.row_balance import LoadPiece, ServerLoad

_WINDOW = 1 << 16
"""Ids of a table that are remembered at most: enough for the shares of the hottest rows, in 0.5 MB."""
_PIECES = 64


class RowTraffic:
    """Counts the rows that are asked for, by table."""

    def __init__(self, places: RowPlaces, server: int, tables: ServedTables) -> None:
        self._places, self._server, self._tables = places, server, tables
        self._asked = [0] * len(places.tables)
        self._window: list[list[Tensor]] = [[] for _ in places.tables]
        self._length = [0] * len(places.tables)

    def count(self, number: int, ids: Tensor) -> None:
        """Counts one request for distinct rows."""
        self._asked[number] += len(ids)
        self._window[number].append(ids)
        self._length[number] += len(ids)
        while self._length[number] > _WINDOW and len(self._window[number]) > 1:
            self._length[number] -= len(self._window[number].pop(0))

    def take(self) -> ServerLoad:
        """Returns the load since the last call, and begins anew."""
        pieces = [piece for number in range(len(self._asked)) for piece in self._pieces(number)]
        load = sum(self._asked)
        self._asked = [0] * len(self._asked)
        self._window = [[] for _ in self._asked]
        self._length = [0] * len(self._asked)
        return ServerLoad(load, tuple(sorted(pieces, key=lambda piece: -piece.load)[: 2 * _PIECES]))

    def _pieces(self, number: int) -> Iterator[LoadPiece]:
        """Yields the hottest rows, and where neighbours are on one server, ranges with about equal loads, too."""
        if not self._length[number]:
            return
        ids, counts = torch.unique(torch.cat(self._window[number]), return_counts=True)
        scale = self._asked[number] / self._length[number]
        portion = int(counts.sum()) / _PIECES
        spec = self._places.tables[number]
        if self._places.placement.range_of(spec, self._server, self._places.servers) is None:
            hottest = counts.topk(min(_PIECES, len(counts))).indices
            rows = [(int(ids[at]), int(ids[at]) + 1, int(counts[at])) for at in hottest]
        else:
            # A row that is hot enough ends the piece before it and is one by itself.
            rows, start, load = [], int(ids[0]), 0
            for row, count in zip(ids.tolist(), counts.tolist(), strict=True):
                if load and (load + count > portion):
                    rows.append((start, row, load))
                    start, load = row, 0
                load += count
            rows.append((start, int(ids[-1]) + 1, load))
        for first, stop, load in rows:
            parts = self._places.owned(self._server, RowRange(number, first, stop))
            whole = sum(part.stop - part.start for part in parts)
            for part in parts:
                share = load * (part.stop - part.start) / whole
                single = part.stop - part.start == 1
                held = 1 if single else self._tables.tables[number].held(part.start, part.stop)
                yield LoadPiece(number, part.start, part.stop, round(share * scale), held)
