"""A worker's rows: pulled from the servers that have them before they are used, their gradients pushed there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.sparse.messages import Rows, decode_rows, encode_pull, encode_push
from headrace.parameter_server.sparse.placement import RowPlacement, split
from headrace.parameter_server.wire import Kind, Message
from headrace.spec.embedding import TableSpec
from headrace.training.clipping import all_finite
from headrace.training.embeddings.layer import LocalRows, RowSource, SparseEmbedding
from headrace.training.embeddings.pieces import blocks_of, chunks, is_row_piece, to_pieces
from headrace.training.embeddings.table import EmbeddingTable, RowBlock
from headrace.training.optimizer import StatePiece

RowPushes = list[tuple[int, bytes]]
"""By server: the version of the rows that the gradients were computed with, and the message's content."""


class RowClient:
    """Moves the rows of all tables of a model; `moved_bytes` is their payload, both ways."""

    def __init__(self, client: Client, tables: Sequence[TableSpec], placement: RowPlacement) -> None:
        self.moved_bytes = 0
        self._client = client
        self._tables = tables
        self._placement = placement
        self._servers = len(client.servers)
        self._versions: dict[int, int] = {}

    def begin(self) -> None:
        """Begins a step: its staleness is that of the oldest rows which are pulled from now on."""
        self._versions.clear()

    def pull(self, number: int, ids: Tensor) -> Tensor:
        """Returns rows of a table, by its number; `ids` are distinct."""
        spec = self._tables[number]
        places = split(self._placement, spec, ids, self._servers)
        wanted = {server: own for server, own in enumerate(places) if len(own)}
        rows = torch.empty(len(ids), spec.width, dtype=getattr(torch, spec.dtype))
        for server, values in self._pull(number, {each: ids[own] for each, own in wanted.items()}).items():
            rows.index_copy_(0, wanted[server], values)
        return rows

    def pushes(self, gradients: Sequence[Rows]) -> RowPushes:
        """Returns what is pushed to each server; `gradients` are by table."""
        unknown = {server: torch.empty(0, dtype=torch.int64) for server in range(self._servers)}
        self._pull(0, {server: none for server, none in unknown.items() if server not in self._versions})
        by_server: list[list[Rows]] = [[] for _ in range(self._servers)]
        for spec, (ids, gradient) in zip(self._tables, gradients, strict=True):
            for own, place in zip(by_server, split(self._placement, spec, ids, self._servers), strict=True):
                own.append((ids.index_select(0, place), gradient.index_select(0, place)))
        pushed = [(self._versions[server], encode_push(self._tables, own)) for server, own in enumerate(by_server)]
        self.moved_bytes += sum(len(blob) for _, blob in pushed)
        return pushed

    def blocks(self, number: int, servers: Iterable[int] | None = None) -> Iterator[tuple[int, RowBlock]]:
        """Yields the changed rows of a table that some servers have, or all, each with a number of its own."""
        for server in range(self._servers) if servers is None else servers:
            start = 0
            while True:
                blob = self._client.ask(server, Message(Kind.ROWS, number, lease=start))
                pieces = [StatePiece.parse(name, value) for name, value in unpack(blob).items()]
                (block,) = blocks_of(pieces, self._tables[number].name)
                # Also without rows: it has the number of steps.
                yield start * self._servers + server, block
                if not len(block.ids):
                    break
                start += len(block.ids)

    def load(self, number: int, block: RowBlock) -> None:
        """Sends rows to the servers that have them from now on."""
        spec = self._tables[number]
        for server, place in enumerate(split(self._placement, spec, block.ids, self._servers)):
            state = {key: value[place] for key, value in block.state.items()}
            uses = None if block.uses is None else block.uses[place]
            own = RowBlock(block.ids[place], block.values[place], state, block.steps, uses)
            blob = pack({piece.name: piece.value for piece in to_pieces(spec.name, 0, own)})
            self._client.ask(server, Message(Kind.LOAD_ROWS, number), blob)

    def clear(self) -> None:
        """Drops all rows of all servers."""
        for server in range(self._servers):
            self._client.ask(server, Message(Kind.LOAD_ROWS, 0, flag=1))

    def _pull(self, number: int, wanted: dict[int, Tensor]) -> dict[int, Tensor]:
        """Asks several servers at once."""
        spec, servers = self._tables[number], self._client.servers
        for server, ids in wanted.items():
            blob = encode_pull(number, spec, ids)
            servers[server].tell(Message(Kind.PULL_ROWS), blob)
            self.moved_bytes += len(blob)
        found = {}
        for server, ids in wanted.items():
            answer = servers[server].answer()
            version, found[server] = decode_rows(spec, len(ids), answer)
            self._versions[server] = min(version, self._versions.get(server, version))
            self.moved_bytes += len(answer)
        return found


class ServedRows(RowSource):
    """The rows of one table on the servers."""

    def __init__(self, client: RowClient, number: int) -> None:
        self._client = client
        self._number = number

    def pull(self, ids: Tensor) -> Tensor:
        return self._client.pull(self._number, ids)

    def blocks(self) -> Iterator[RowBlock]:
        yield from (block for _, block in self._client.blocks(self._number) if len(block.ids))


class WorkerRows:
    """The sparse embeddings of a worker's model: where their rows and gradients go."""

    def __init__(self, client: RowClient, layers: Sequence[SparseEmbedding]) -> None:
        self._client = client
        self._layers = layers
        self._given: list[EmbeddingTable] = []
        for number, layer in enumerate(layers):
            assert isinstance(layer.source, LocalRows)
            self._given.append(layer.source.table)
            layer.source, layer.collects = ServedRows(client, number), True

    @property
    def moved_bytes(self) -> int:
        """Payload of rows, both ways."""
        return self._client.moved_bytes

    def begin(self) -> None:
        """Begins a step."""
        for layer in self._layers:
            layer.forget()
        self._client.begin()

    def take(self) -> tuple[list[Rows], bool]:
        """Returns the gradients of a step by table, and whether they are finite."""
        gradients = [layer.take() for layer in self._layers]
        return gradients, all_finite([gradient for _, gradient in gradients])

    def pushes(self, gradients: Sequence[Rows]) -> RowPushes:
        """Returns what is pushed to each server."""
        return self._client.pushes(gradients)

    def bring(self, leads: bool) -> None:
        """Lets go of the rows that the model was given with; the worker that leads loads them into the servers."""
        for number, table in enumerate(self._given if leads else ()):
            for start, stop in chunks(len(table), table.spec.row_bytes):
                self._client.load(number, table.block(start, stop))
        self._given.clear()

    def state(self, servers: Sequence[int]) -> Iterator[StatePiece]:
        """Yields the rows that some servers have, with their optimizer's state."""
        for number, layer in enumerate(self._layers):
            for place, block in self._client.blocks(number, servers):
                yield from to_pieces(layer.spec.name, place, block)

    def load(self, pieces: Sequence[StatePiece]) -> None:
        """Loads the rows among some pieces of a checkpoint; without any, those that are there stay."""
        if any(map(is_row_piece, pieces)):
            self._client.clear()
        for number, layer in enumerate(self._layers):
            for block in blocks_of(pieces, layer.spec.name):
                self._client.load(number, block)
