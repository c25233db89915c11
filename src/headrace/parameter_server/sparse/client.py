"""A worker's rows: pulled from the servers that have them before they are used, their gradients pushed there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.errors import ServerRefused
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.core.row_moves import RowMap
from headrace.parameter_server.sparse.messages import Rows, decode_rows, encode_pull, encode_push, moved_to
from headrace.parameter_server.sparse.moves import MoveAnswer, MoveKind, from_json, to_json
from headrace.parameter_server.sparse.placement import RowPlaces
from headrace.parameter_server.wire import Kind, Message
from headrace.training.embeddings.pieces import RowBlock, blocks_of, to_pieces
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

    Attributes:
        versions: by server, that of the oldest rows which were read from it since this was cleared.
    """

    def __init__(self, client: Client, places: RowPlaces, moves: bool = False) -> None:
        self.moved_bytes = 0
        self._client = client
        self._tables = places.tables
        self.places = places
        self.versions: dict[int, int] = {}
        self._moves = moves
        self._servers = len(client.servers)
        self._sent: list[_Sent] = []

    def pull(self, number: int, ids: Tensor) -> Iterator[tuple[int, Tensor, int, Tensor]]:
        """Pulls distinct rows of a table: yields for each server where in `ids` its rows are, its version, the rows."""
        missing = [torch.arange(len(ids))]
        while missing:
            # Those again that were moved meanwhile.
            asked = torch.cat(missing)
            places = [asked[place] for place in self.places.split(number, ids[asked])]
            pulled = self._pull(number, {server: ids[place] for server, place in enumerate(places) if len(place)})
            for server, (version, values) in pulled.items():
                yield server, places[server], version, values
            missing = [place for server, place in enumerate(places) if len(place) and server not in pulled]

    def note(self, server: int, version: int) -> None:
        """Notes that rows of a server were read, which it had with this version."""
        self.versions[server] = min(version, self.versions.get(server, version))

    def pushes(self, gradients: Sequence[Rows]) -> RowPushes:
        """Returns what is pushed to each server; `gradients` are by table."""
        unknown = {server: torch.empty(0, dtype=torch.int64) for server in range(self._servers)}
        self._pull(0, {server: none for server, none in unknown.items() if server not in self.versions})
        by_server: list[list[Rows]] = [[] for _ in range(self._servers)]
        self._sent = []
        for number, (ids, gradient) in enumerate(gradients):
            if self._servers == 1:
                by_server[0].append((ids, gradient))
            else:
                for rows, place in zip(by_server, self.places.split(number, ids), strict=True):
                    rows.append((ids.index_select(0, place), gradient.index_select(0, place)))
            if self._moves:
                self._sent.append((ids, gradient, self.places.owners(number, ids)))
        divided = (self.places.map.version,) if self._moves else ()
        pushed = [((self.versions[at], *divided), encode_push(self._tables, rows)) for at, rows in enumerate(by_server)]
        self.moved_bytes += sum(len(blob) for _, blob in pushed)
        return pushed

    def finish(self, lease: int, weight: float, share: float) -> None:
        """Sends the rest of a push, which is answered: the gradients of rows that were moved while it was under way."""
        servers, sent = self._client.servers, self._sent
        while moved := [server for server, link in enumerate(servers) if link.moved]:
            before = self.places.map.version
            for server in moved:
                servers[server].moved = False
                (answer,) = self.ask_move(MoveKind.MAP, self.places.map.version, servers=[server])
                self.adopt(from_json(MoveAnswer, answer).changes)
            sent = [self._left(number, rows, moved, before) for number, rows in enumerate(sent)]
            head = Message(Kind.PUSH_ROWS, 0, 1, lease, weight, share)
            rested = []
            for server, link in enumerate(servers):
                rows = [(ids[owners == server], gradient[owners == server]) for ids, gradient, owners in sent]
                if any(len(ids) for ids, _ in rows):
                    blob = encode_push(self._tables, rows)
                    self.moved_bytes += len(blob)
                    link.push_rows(head, (0, self.places.map.version, 1), blob)
                    rested.append(link)
            for link in rested:
                link.finish(pulls=False)

    def _left(self, number: int, sent: _Sent, moved: Sequence[int], before: int) -> _Sent:
        """Returns what of a push the servers that had a later map have not taken, and where it is now."""
        ids, gradient, owners = sent
        now = self.places.owners(number, ids)
        left = torch.isin(owners, torch.tensor(moved)) & ((now != owners) | (self.places.since(number, ids) > before))
        return ids[left], gradient[left], now[left]

    # ----- moves

    def ask_move(
        self,
        kind: MoveKind,
        number: int = -1,
        blob: bytes = b"",
        servers: Sequence[int] | None = None,
        numbers: tuple[int, ...] = (),
    ) -> list[bytes]:
        """Sends all servers, or some, a MOVE_ROWS message, and returns their answers."""
        return self._client.ask_all(Message(Kind.MOVE_ROWS, flag=kind, lease=number, numbers=numbers), blob, servers)

    def adopt(self, changes: RowMap) -> None:
        """Takes over changes of the map; if there are some, tells all servers before anything else.

        So the servers know what this worker knows, and of any later map they need the changes alone.
        """
        before = self.places.map.version
        if not self.places.adopt(changes):
            return
        described, servers = to_json(self.places.map.changed_since(before)), list(range(self._servers))
        brought: set[tuple[int, int]] = set()
        while servers:
            asked = self.ask_move(MoveKind.MAP, before, described, servers)
            answers: list[MoveAnswer] = [from_json(MoveAnswer, answer) for answer in asked]
            missing = [(to, answer.missing) for to, answer in zip(servers, answers, strict=True) if answer.missing]
            for server, moves in missing:
                for number in moves:
                    self._bring(number, server, brought)
            servers = [server for server, _ in missing]

    def _bring(self, number: int, server: int, brought: set[tuple[int, int]]) -> None:
        """Brings a server the rows of a move, whose worker has not yet done so."""
        copies = [copy for copy in self.ask_move(MoveKind.KEPT, number) if copy]
        if copies:
            self.ask_move(MoveKind.INSTALL, number, copies[0], [server])
        elif (number, server) in brought:
            raise ServerRefused(f"the rows of move {number} are at no server, and server {server} should have them")
        # Without a copy, another worker has brought them meanwhile.
        brought.add((number, server))

    def gather_map(self) -> int:
        """Makes sure that all servers know all moves that have been; returns the greatest number of a move."""
        if not self._moves:
            return 0
        asked = self.ask_move(MoveKind.MAP, self.places.map.version)
        answers: list[MoveAnswer] = [from_json(MoveAnswer, answer) for answer in asked]
        self.adopt(max((answer.changes for answer in answers), key=lambda answer: answer.version))
        return max(answer.seen for answer in answers)

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
        for server, place in enumerate(self.places.split(number, block.ids)):
            state = {key: value[place] for key, value in block.state.items()}
            uses = None if block.uses is None else block.uses[place]
            part = RowBlock(block.ids[place], block.values[place], state, block.steps, uses)
            blob = pack({piece.name: piece.value for piece in to_pieces(spec.name, 0, part)})
            self._client.ask(server, Message(Kind.LOAD_ROWS, number), blob)

    def clear(self) -> None:
        """Drops all rows of all servers."""
        self._client.ask_all(Message(Kind.LOAD_ROWS, 0, flag=1))

    def _pull(self, number: int, wanted: dict[int, Tensor]) -> dict[int, tuple[int, Tensor]]:
        """Asks several servers at once; of a server that has not all of the rows any more, there is no answer."""
        spec, servers = self._tables[number], self._client.servers
        for server, ids in wanted.items():
            blob = encode_pull(number, spec, ids)
            servers[server].tell(Message(Kind.PULL_ROWS, lease=self.places.map.version), blob)
            self.moved_bytes += len(blob)
        pulled, maps = {}, []
        for server, ids in wanted.items():
            answer = servers[server].answer()
            if self._moves and (map_ := moved_to(answer)) is not None:
                maps.append(from_json(RowMap, map_))
                continue
            pulled[server] = decode_rows(spec, len(ids), answer)
            self.note(server, pulled[server][0])
            self.moved_bytes += len(answer)
        for changes in maps:
            self.adopt(changes)
        return pulled
