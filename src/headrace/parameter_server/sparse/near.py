"""Rows that a worker has near: copies of those that it asks for most, and those of its next step.

Copies are read for some steps before they are pulled again:

    step      6         7         8         9         10        11
    row 3     pull ───► copy ───► copy ───► pull ───► copy ───► copy      hot_age=2
    pushes    made with version 41          made with version 55

Rows of the next step are pulled while this one computes:

    step 7    ask: rows of 8 ──► compute ──► push ──► ask: rows of 8 that this push has changed ──►
    step 8                                            both answers are there before forward reads them

So all that these lack are other workers' pushes of this time. A push says the oldest version of all rows that it was
made with, so that its staleness counts what they lack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.core.row_moves import RowMap
from headrace.parameter_server.sparse.client import RowClient
from headrace.parameter_server.sparse.messages import decode_rows, encode_pull, moved_to
from headrace.parameter_server.sparse.moves import from_json
from headrace.parameter_server.wire import Kind, Message
from headrace.spec.embedding import TableSpec

_FIRST, _EVERY = (3, 5, 9), 16
"""Steps at which the hottest rows are chosen: soon, and then regularly."""
_WINDOW = 1 << 17
"""Ids of a table that are remembered at most, to count them."""


class NearRows:
    """Rows of one table in this process, with the servers that they came from and the versions that these had.

    `ids` are distinct and ascending. A row with version -1 has a place, and is not here.
    """

    def __init__(self, spec: TableSpec, ids: Tensor | None = None) -> None:
        self.ids = torch.empty(0, dtype=torch.int64) if ids is None else ids
        self.rows = torch.empty(len(self.ids), spec.width, dtype=getattr(torch, spec.dtype))
        self.servers = torch.zeros(len(self.ids), dtype=torch.int64)
        self.versions = torch.full((len(self.ids),), -1)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where in `ids` rows are that are here, and where they are here."""
        where, at = self._places(ids)
        here = self.versions[at] >= 0
        return where[here], at[here]

    def put(self, ids: Tensor, rows: Tensor, servers: int | Tensor, versions: int | Tensor) -> Tensor:
        """Takes over those of some rows that have a place; returns the places."""
        where, at = self._places(ids)
        self.rows[at] = rows[where]
        self.servers[at] = servers if isinstance(servers, int) else servers[where]
        self.versions[at] = versions if isinstance(versions, int) else versions[where]
        return at

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if not len(self.ids):
            return self.ids, self.ids
        at = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        where = (self.ids[at] == ids).nonzero().view(-1)
        return where, at[where]


class RowCopies:
    """Copies of the rows of one table that a worker asks for most.

    Args:
        most: how many are kept.
        age: steps after that of its pull in which a copy is read.

    Attributes:
        held: the copies, also those that are too old.
    """

    def __init__(self, spec: TableSpec, most: int, age: int) -> None:
        self._spec, self._most, self._age = spec, most, age
        self._step = 0
        self._window: deque[Tensor] = deque()
        self._length = 0
        self.held = NearRows(spec)
        self._pulled = torch.empty(0, dtype=torch.int64)

    def begin(self) -> None:
        """Begins a step; now and then it chooses the hottest rows anew."""
        self._step += 1
        if self._window and (self._step in _FIRST or self._step % _EVERY == 0):
            ids, counts = torch.unique(torch.cat(tuple(self._window)), return_counts=True)
            # What was asked for once is not worth a copy.
            often = (counts > 1).nonzero().view(-1)
            hottest = often[counts[often].topk(min(self._most, len(often))).indices]
            before, pulled = self.held, self._pulled
            self.held = NearRows(self._spec, ids[hottest].sort().values)
            self._pulled = torch.zeros(len(self.held.ids), dtype=torch.int64)
            where, at = before.find(self.held.ids)
            self.held.put(before.ids[at], before.rows[at], before.servers[at], before.versions[at])
            self._pulled[where] = pulled[at]

    def count(self, ids: Tensor) -> None:
        """Counts one request for distinct rows."""
        self._window.append(ids)
        self._length += len(ids)
        while self._length > _WINDOW and len(self._window) > 1:
            self._length -= len(self._window.popleft())

    def find(self, ids: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor]:
        """Returns where in `ids` rows are that may be read here, in this step or so many later, and where in `held`."""
        where, at = self.held.find(ids)
        fresh = self._step + ahead - self._pulled[at] <= self._age
        return where[fresh], at[fresh]

    def keep(self, ids: Tensor, rows: Tensor, servers: int | Tensor, versions: int | Tensor, before: int = 0) -> None:
        """Copies what of some rows is hot; they were pulled in this step, or so many before."""
        self._pulled[self.held.put(ids, rows, servers, versions)] = self._step - before

    def forget(self) -> None:
        """Drops all copies."""
        self.held.versions.fill_(-1)


@dataclass(frozen=True)
class _Asked:
    """One request; `steps` of this worker were applied before it since the first of its flight."""

    server: int
    table: int
    ids: Tensor
    request: int
    steps: int


@dataclass
class _Flight:
    """Requests for the rows `ids`, by table, of one lease, made while rows were where the map `version` says."""

    version: int
    ids: Sequence[Tensor]
    asked: list[_Asked]
    steps: int = 0


class RowsAhead:
    """Pulls of rows that are under way, by lease."""

    def __init__(self, client: Client, rows: RowClient) -> None:
        self._client, self._rows = client, rows
        self._tables = rows.places.tables
        self._flights: dict[int, _Flight] = {}

    def ask(self, lease: int, ids: Sequence[Tensor]) -> None:
        """Asks for the rows of a lease: distinct and ascending, by table."""
        flight = _Flight(self._rows.places.map.version, ids, [])
        for number, wanted in enumerate(ids):
            self._ask(flight, number, wanted)
        self._flights[lease] = flight

    def pushed(self, ids: Sequence[Tensor], applied: bool) -> None:
        """Asks again for the rows that this worker has pushed itself, by table; `applied` if it was a step."""
        for flight in self._flights.values():
            if flight.version == self._rows.places.map.version:
                # All other rows are as they were: this step changes nothing of them.
                flight.steps += applied
                for number, (asked, changed) in enumerate(zip(flight.ids, ids, strict=True)):
                    self._ask(flight, number, asked[torch.isin(asked, changed, assume_unique=True)])

    def land(self, lease: int) -> list[NearRows] | None:
        """Waits for the rows of a lease; None if none were asked for, or rows have moved since."""
        flight = self._flights.pop(lease, None)
        if flight is None:
            return None
        near = [NearRows(spec, ids) for spec, ids in zip(self._tables, flight.ids, strict=True)]
        maps: list[RowMap] = []
        for asked in flight.asked:
            answer = self._client.servers[asked.server].answer(asked.request)
            self._rows.moved_bytes += len(answer)
            if (map_ := moved_to(answer)) is not None:
                maps.append(from_json(RowMap, map_))
                continue
            version, rows = decode_rows(self._tables[asked.table], len(asked.ids), answer)
            near[asked.table].put(asked.ids, rows, asked.server, version + flight.steps - asked.steps)
        for changes in maps:
            self._rows.adopt(changes)
        return near if flight.version == self._rows.places.map.version else None

    def _ask(self, flight: _Flight, number: int, ids: Tensor) -> None:
        for server, place in enumerate(self._rows.places.split(number, ids)):
            if len(place):
                blob = encode_pull(number, self._tables[number], ids[place])
                asks = Message(Kind.PULL_ROWS, lease=self._rows.places.map.version)
                request = self._client.servers[server].tell(asks, blob, early=True)
                self._rows.moved_bytes += len(blob)
                flight.asked.append(_Asked(server, number, ids[place], request, flight.steps))
