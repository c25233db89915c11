"""A worker's sparse embeddings: what its forward reads, from servers or from copies near by, and what it pushes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.parameter_server.sparse.client import RowClient, RowPushes
from headrace.parameter_server.sparse.messages import Rows
from headrace.parameter_server.sparse.near import NearRows, RowCopies, RowsAhead
from headrace.parameter_server.sparse.planning import RowOptions
from headrace.parameter_server.sparse.rebalancing import RowMover
from headrace.spec.events import TableReads
from headrace.training.clipping import all_finite
from headrace.training.embeddings.foresight import Foresight
from headrace.training.embeddings.layer import RowSource, SparseEmbedding
from headrace.training.embeddings.local import LocalRows
from headrace.training.embeddings.pieces import RowBlock, blocks_of, chunks, is_row_piece, to_pieces
from headrace.training.embeddings.table import EmbeddingTable
from headrace.training.optimizer import StatePiece


class RowReader:
    """Reads the rows of all tables for one worker.

    Rows that are near are read in a training step alone: an evaluation gets those that the servers have. `ahead` pulls
    them for the next step; None without prefetch.

    Attributes:
        missed: tables of which this step has read rows that were not pulled ahead, though others were.
    """

    def __init__(self, client: RowClient, options: RowOptions, ahead: RowsAhead | None = None) -> None:
        self._client, self._options, self._ahead = client, options, ahead
        self._tables = client.places.tables
        self._copies = [RowCopies(spec, options.hot, options.hot_age) for spec in self._tables if options.hot]
        self._map = client.places.map.version
        self._trains = False
        self._landed: list[NearRows] = []
        self.missed: set[int] = set()
        self._asked = [0] * len(self._tables)
        self._copied = [0] * len(self._tables)
        self._early = [0] * len(self._tables)

    def begin(self, lease: int) -> None:
        """Begins the step of a lease, -1 for none; its staleness is that of the oldest rows which it reads."""
        self._client.versions.clear()
        self._trains = lease >= 0
        self.missed.clear()
        if not self._trains:
            return
        self._landed = (self._ahead.land(lease) if self._ahead is not None else None) or []
        self._require_places()
        for number, copies in enumerate(self._copies):
            copies.begin()
            if self._landed:
                landed = self._landed[number]
                here = landed.versions >= 0
                rows, servers, versions = landed.rows[here], landed.servers[here], landed.versions[here]
                copies.keep(landed.ids[here], rows, servers, versions, before=1)

    def foresee(self, lease: int, ids: Sequence[Tensor]) -> None:
        """Asks for the rows of the step after the one that begins next, by table: distinct and ascending."""
        if self._ahead is None:
            return
        wanted = list(ids)
        for number, copies in enumerate(self._copies):
            left = torch.ones(len(wanted[number]), dtype=torch.bool)
            left[copies.find(wanted[number], ahead=2)[0]] = False
            wanted[number] = wanted[number][left]
        self._ahead.ask(lease, wanted)

    def pushed(self, ids: Sequence[Tensor], applied: bool) -> None:
        """Takes notice of this worker's own push, which is answered; `applied` if it was a step."""
        if self._ahead is not None:
            self._ahead.pushed(ids, applied)

    def end(self) -> None:
        """Ends the part of a step that reads rows."""
        self._trains = False

    def pull(self, number: int, ids: Tensor) -> Tensor:
        """Returns rows of a table, by its number; `ids` are distinct and ascending."""
        spec = self._tables[number]
        if self._client.places.servers == 1 and len(ids) and not (self._trains and self._options.near):
            # They come in the order in which they were asked for.
            ((_, _, _, rows),) = self._client.pull(number, ids)
            return rows
        rows = torch.empty(len(ids), spec.width, dtype=getattr(torch, spec.dtype))
        left = self._read_near(number, ids, rows) if self._trains else torch.arange(len(ids))
        for server, places, version, values in self._client.pull(number, ids[left]):
            places = left[places]
            rows.index_copy_(0, places, values)
            if self._trains and self._copies:
                self._copies[number].keep(ids[places], values, server, version)
        return rows

    @property
    def reads(self) -> tuple[TableReads, ...]:
        """How many rows the steps so far have read, by table."""
        columns = zip(self._tables, self._asked, self._copied, self._early, strict=True)
        return tuple(
            TableReads(spec.name, asked, copied, early, copied * spec.row_bytes)
            for spec, asked, copied, early in columns
        )

    def _require_places(self) -> None:
        """Drops all rows that are near if some have moved: a version is that of the server where the row was."""
        if self._map != self._client.places.map.version:
            self._map, self._landed = self._client.places.map.version, []
            for copy in self._copies:
                copy.forget()

    def _read_near(self, number: int, ids: Tensor, rows: Tensor) -> Tensor:
        """Reads what is near; returns where in `ids` the other rows are."""
        self._require_places()
        self._asked[number] += len(ids)
        left = torch.ones(len(ids), dtype=torch.bool)
        if self._landed:
            where, at = self._landed[number].find(ids)
            self._take(self._landed[number], where, at, rows)
            self._early[number] += len(where)
            left[where] = False
        if self._copies:
            copies = self._copies[number]
            copies.count(ids)
            places = left.nonzero().view(-1)
            where, at = copies.find(ids[places])
            self._take(copies.held, places[where], at, rows)
            self._copied[number] += len(where)
            left[places[where]] = False
        if self._landed and left.any():
            self.missed.add(number)
        return left.nonzero().view(-1)

    def _take(self, near: NearRows, where: Tensor, at: Tensor, rows: Tensor) -> None:
        rows.index_copy_(0, where, near.rows[at])
        servers, versions = near.servers[at], near.versions[at]
        for server in servers.unique().tolist():
            self._client.note(server, int(versions[servers == server].min()))


class ServedRows(RowSource):
    """The rows of one table on the servers."""

    def __init__(self, reader: RowReader, client: RowClient, number: int) -> None:
        self._reader, self._client = reader, client
        self._number = number

    def pull(self, ids: Tensor) -> Tensor:
        return self._reader.pull(self._number, ids)

    def blocks(self) -> Iterator[RowBlock]:
        self._client.gather_map()
        yield from (block for _, block in self._client.blocks(self._number) if len(block.ids))


class WorkerRows:
    """The sparse embeddings of a worker's model: where their rows and gradients go."""

    def __init__(
        self,
        client: RowClient,
        layers: Sequence[SparseEmbedding],
        mover: RowMover | None,
        options: RowOptions,
        ahead: RowsAhead | None,
    ) -> None:
        self._client, self._mover = client, mover
        self._options = options
        self._reader = RowReader(client, options, ahead)
        self._foresight = None if ahead is None else Foresight(layers)
        self._lease = -1
        self._batches: dict[int, Any] = {}
        self._pushed: list[Tensor] = []
        self._layers = layers
        self._given: list[EmbeddingTable] = []
        for number, layer in enumerate(layers):
            assert isinstance(layer.source, LocalRows)
            self._given.append(layer.source.table)
            layer.source, layer.collects = ServedRows(self._reader, client, number), True

    @property
    def moved_bytes(self) -> int:
        """Payload of rows, both ways."""
        return self._client.moved_bytes

    @property
    def reads(self) -> tuple[TableReads, ...]:
        """How many rows the steps so far have read, by table; () if none is near."""
        reads, foresight = self._reader.reads if self._options.near else (), self._foresight
        if foresight is None:
            return reads
        return tuple(replace(read, unforeseen=foresight.unknown(number)) for number, read in enumerate(reads))

    def begin(self, lease: int = -1) -> None:
        """Begins a step, that of a lease."""
        if self._mover is not None and lease >= 0:
            self._mover.turn(lease)
        for layer in self._layers:
            layer.forget()
        self._reader.begin(lease)
        self._lease = lease

    def foresee(self, lease: int, batch: Any) -> None:
        """Pulls the rows of a batch for the step after the one that begins next; with prefetch alone."""
        if self._foresight is not None:
            self._batches[lease] = batch
            self._reader.foresee(lease, self._foresight.ids(batch))

    def take(self) -> tuple[list[Rows], bool]:
        """Returns the gradients of a step by table, and whether they are finite."""
        self._reader.end()
        if self._foresight is not None and self._lease in self._batches:
            self._foresight.learn(self._batches.pop(self._lease), self._reader.missed)
        gradients = [layer.take() for layer in self._layers]
        return gradients, all_finite([gradient for _, gradient in gradients])

    def pushes(self, gradients: Sequence[Rows]) -> RowPushes:
        """Returns what is pushed to each server."""
        self._pushed = [ids for ids, _ in gradients]
        return self._client.pushes(gradients)

    def finish(self, lease: int, weight: float, share: float, applied: bool) -> None:
        """Sends the rest of a push that is answered; `applied` if it was a step of all servers."""
        self._client.finish(lease, weight, share)
        self._reader.pushed(self._pushed, applied)

    def bring(self, leads: bool) -> None:
        """Lets go of the rows that the model was given with; the worker that leads loads them into the servers."""
        for number, table in enumerate(self._given if leads else ()):
            for start, stop in chunks(len(table), table.spec.row_bytes):
                self._client.load(number, table.block(start, stop))
        self._given.clear()

    def state(self, servers: Sequence[int]) -> Iterator[StatePiece]:
        """Yields the rows that some servers have, with their optimizer's state."""
        self._client.gather_map()
        for number, layer in enumerate(self._layers):
            for place, block in self._client.blocks(number, servers):
                yield from to_pieces(layer.spec.name, place, block)

    def load(self, pieces: Sequence[StatePiece]) -> None:
        """Loads the rows among some pieces of a checkpoint; without any, those that are there stay."""
        self._client.gather_map()
        if any(map(is_row_piece, pieces)):
            self._client.clear()
        for number, layer in enumerate(self._layers):
            for block in blocks_of(pieces, layer.spec.name):
                self._client.load(number, block)
