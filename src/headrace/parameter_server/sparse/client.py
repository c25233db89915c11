"""A worker's rows: pulled from the servers that have them before they are used, their gradients pushed there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.core.row_moves import RowMap
from headrace.parameter_server.sparse.messages import Rows, decode_rows, encode_pull, encode_push, moved_to
from headrace.parameter_server.sparse.moves import MoveAnswer, MoveKind, from_json, to_json
from headrace.parameter_server.sparse.placement import RowPlaces
from headrace.parameter_server.wire import Kind, Message
from headrace.training.clipping import all_finite
from headrace.training.embeddings.layer import LocalRows, RowSource, SparseEmbedding
from headrace.training.embeddings.pieces import blocks_of, chunks, is_row_piece, to_pieces
from headrace.training.embeddings.table import EmbeddingTable, RowBlock
from headrace.training.optimizer import StatePiece

_Sent = tuple[Tensor, Tensor, Tensor]
"""Ids, gradients, and the servers that they were sent to."""

RowPushes = list[tuple[tuple[int, ...], bytes]]
"""By server: the numbers of PUSH_ROWS, and the message's content."""


class RowClient:
    """Moves the rows of all tables of a model; `moved_bytes` is their payload, both ways.

    Args:
        places: where rows are.
        moves: whether they may move to other servers meanwhile.
    """

    def __init__(self, client: Client, places: RowPlaces, moves: bool = False) -> None:
        self.moved_bytes = 0
        self._client = client
        self._tables = places.tables
        self._places = places
        self._moves = moves
        self._servers = len(client.servers)
        self._versions: dict[int, int] = {}
        self._sent: list[_Sent] = []

    def begin(self) -> None:
        """Begins a step: its staleness is that of the oldest rows which are pulled from now on."""
        self._versions.clear()

    def pull(self, number: int, ids: Tensor) -> Tensor:
        """Returns rows of a table, by its number; `ids` are distinct."""
        spec = self._tables[number]
        rows = torch.empty(len(ids), spec.width, dtype=getattr(torch, spec.dtype))
        missing = [torch.arange(len(ids))]
        while missing:
            # Those again that were moved meanwhile.
            asked = torch.cat(missing)
            places = [asked[own] for own in self._places.split(number, ids[asked])]
            found = self._pull(number, {server: ids[own] for server, own in enumerate(places) if len(own)})
            for server, values in found.items():
                rows.index_copy_(0, places[server], values)
            missing = [own for server, own in enumerate(places) if len(own) and server not in found]
        return rows

    def pushes(self, gradients: Sequence[Rows]) -> RowPushes:
        """Returns what is pushed to each server; `gradients` are by table."""
        unknown = {server: torch.empty(0, dtype=torch.int64) for server in range(self._servers)}
        self._pull(0, {server: none for server, none in unknown.items() if server not in self._versions})
        by_server: list[list[Rows]] = [[] for _ in range(self._servers)]
        self._sent = []
        for number, (ids, gradient) in enumerate(gradients):
            for own, place in zip(by_server, self._places.split(number, ids), strict=True):
                own.append((ids.index_select(0, place), gradient.index_select(0, place)))
            if self._moves:
                self._sent.append((ids, gradient, self._places.owners(number, ids)))
        divided = (self._places.map.version,) if self._moves else ()
        pushed = [
            ((self._versions[server], *divided), encode_push(self._tables, own)) for server, own in enumerate(by_server)
        ]
        self.moved_bytes += sum(len(blob) for _, blob in pushed)
        return pushed

    def finish(self, lease: int, weight: float, share: float) -> None:
        """Sends the rest of a push, which is answered: the gradients of rows that were moved while it was under way."""
        servers, sent = self._client.servers, self._sent
        while moved := [server for server, each in enumerate(servers) if each.moved]:
            before = self._places.map.version
            for server in moved:
                servers[server].moved = False
                (answer,) = self.ask_move(MoveKind.MAP, self._places.map.version, servers=[server])
                self.adopt(from_json(MoveAnswer, answer).changes)
            sent = [self._left(number, each, moved, before) for number, each in enumerate(sent)]
            head = Message(Kind.PUSH_ROWS, 0, 1, lease, weight, share)
            rested = []
            for server, each in enumerate(servers):
                rows = [(ids[owners == server], gradient[owners == server]) for ids, gradient, owners in sent]
                if any(len(ids) for ids, _ in rows):
                    blob = encode_push(self._tables, rows)
                    self.moved_bytes += len(blob)
                    each.push_rows(head, (0, self._places.map.version, 1), blob)
                    rested.append(each)
            for each in rested:
                each.finish(pulls=False)

    def _left(self, number: int, sent: _Sent, moved: Sequence[int], before: int) -> _Sent:
        """Returns what of a push the servers that had a later map have not taken, and where it is now."""
        ids, gradient, owners = sent
        now = self._places.owners(number, ids)
        left = torch.isin(owners, torch.tensor(moved)) & ((now != owners) | (self._places.since(number, ids) > before))
        return ids[left], gradient[left], now[left]

    # ----- moves

    def ask_move(
        self, kind: MoveKind, number: int = -1, blob: bytes = b"", servers: Sequence[int] | None = None
    ) -> list[bytes]:
        """Sends all servers, or some, a MOVE_ROWS message, and returns their answers."""
        asked = self._client.servers if servers is None else [self._client.servers[server] for server in servers]
        for server in asked:
            server.tell(Message(Kind.MOVE_ROWS, flag=kind, lease=number), blob)
        return [bytes(server.answer()) for server in asked]

    def adopt(self, changes: RowMap) -> None:
        """Takes over changes of the map; if there are some, tells all servers before anything else.

        So the servers know what this worker knows, and of any later map they need the changes alone.
        """
        before = self._places.map.version
        if self._places.adopt(changes):
            self.ask_move(MoveKind.MAP, before, to_json(self._places.map.changed_since(before)))

    def gather_map(self) -> int:
        """Makes sure that all servers know all moves that have been; returns the greatest number of a move."""
        if not self._moves:
            return 0
        asked = self.ask_move(MoveKind.MAP, self._places.map.version)
        answers: list[MoveAnswer] = [from_json(MoveAnswer, each) for each in asked]
        self.adopt(max((each.changes for each in answers), key=lambda each: each.version))
        return max(each.seen for each in answers)

    # ----- all rows

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
        for server, place in enumerate(self._places.split(number, block.ids)):
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
        """Asks several servers at once; of a server that has not all of the rows any more, there is no answer."""
        spec, servers = self._tables[number], self._client.servers
        for server, ids in wanted.items():
            blob = encode_pull(number, spec, ids)
            servers[server].tell(Message(Kind.PULL_ROWS, lease=self._places.map.version), blob)
            self.moved_bytes += len(blob)
        found, maps = {}, []
        for server, ids in wanted.items():
            answer = servers[server].answer()
            if self._moves and (map_ := moved_to(answer)) is not None:
                maps.append(from_json(RowMap, map_))
                continue
            version, found[server] = decode_rows(spec, len(ids), answer)
            self._versions[server] = min(version, self._versions.get(server, version))
            self.moved_bytes += len(answer)
        for each in maps:
            self.adopt(each)
        return found


class ServedRows(RowSource):
    """The rows of one table on the servers."""

    def __init__(self, client: RowClient, number: int) -> None:
        self._client = client
        self._number = number

    def pull(self, ids: Tensor) -> Tensor:
        return self._client.pull(self._number, ids)

    def blocks(self) -> Iterator[RowBlock]:
        self._client.gather_map()
        yield from (block for _, block in self._client.blocks(self._number) if len(block.ids))


class RowTurns(Protocol):
    """Moves rows to other servers now and then."""

    def turn(self, lease: int) -> None:
        """Called before the rows of a lease are pulled."""


class WorkerRows:
    """The sparse embeddings of a worker's model: where their rows and gradients go."""

    def __init__(self, client: RowClient, layers: Sequence[SparseEmbedding], mover: RowTurns | None = None) -> None:
        self._client, self._mover = client, mover
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

    def begin(self, lease: int = -1) -> None:
        """Begins a step, that of a lease."""
        if self._mover is not None and lease >= 0:
            self._mover.turn(lease)
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

    def finish(self, lease: int, weight: float, share: float) -> None:
        """Sends the rest of a push that is answered."""
        self._client.finish(lease, weight, share)

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
