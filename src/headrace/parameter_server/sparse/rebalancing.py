"""The worker's side of moving rows: it asks the servers for their loads, and moves what makes them more equal.

Any worker does it, when it gets a lease that says so; the servers see to it that only one does at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from headrace.parameter_server.core.row_moves import Move, RowMap, RowRange
from headrace.parameter_server.sparse.client import RowClient
from headrace.parameter_server.sparse.moves import TAKEN, MoveAnswer, MoveKind, from_json, to_json
from headrace.policies.row_balance import EVEN, LoadPiece, ServerLoad, choose_moves, unevenness
from headrace.spec.embedding import TableSpec

_ROWS_AT_ONCE, _BYTES_AT_ONCE, _RANGES_AT_ONCE = 2_000, 256 << 10, 32
"""Changed rows of one move at most, with their state: pushes of these rows wait while they are copied."""
_FIRST, _EVERY = (4, 16), 32
"""Rounds at which loads are compared: soon, and then regularly."""


class RowMover:
    """Moves rows by what the servers were asked for; `parts` are the leases of a round."""

    def __init__(self, client: RowClient, tables: Sequence[TableSpec], parts: int) -> None:
        self._client, self._parts = client, parts
        self._most = [max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // table.bytes_of(1))) for table in tables]
        self._seen = 0

    def turn(self, lease: int) -> None:
        """Moves rows, if a lease says so; called before its rows are pulled."""
        round_, part = divmod(lease, self._parts)
        if not part and (round_ in _FIRST or (round_ and round_ % _EVERY == 0)):
            self.rebalance()

    def rebalance(self) -> int:
        """Compares the loads since the last time, and moves rows; returns how many moves there were."""
        loads: list[ServerLoad] = [from_json(ServerLoad, answer) for answer in self._client.ask_move(MoveKind.LOAD)]
        if unevenness([server.load for server in loads]) <= EVEN or not self._claim():
            return 0
        moves = 0
        for rows, source, target in grouped(choose_moves(loads), self._most):
            if not self._move(rows, source, target):
                break
            moves += 1
        return moves

    def _claim(self) -> bool:
        """Makes this worker the one that moves rows; False if another one is quicker."""
        self._seen = max(self._seen, self._client.gather_map()) + 1
        answers = self._client.ask_move(MoveKind.CLAIM, self._seen)
        if not all(from_json(MoveAnswer, answer).done for answer in answers):
            return False
        # From now on there are no moves but this worker's; those of others until now must be known everywhere.
        self._client.gather_map()
        return True

    def _move(self, rows: Sequence[RowRange], source: int, target: int) -> bool:
        client, number = self._client, self._seen
        self._seen += 1
        move = Move(number, tuple(sorted(rows)), source, target)
        # All servers know what this worker knows.
        before = (client.places.map.version,)
        (taken,) = client.ask_move(MoveKind.TAKE, number, to_json(move), [source])
        if not taken.startswith(TAKEN):
            return False
        client.ask_move(MoveKind.INSTALL, number, taken[len(TAKEN) :], [target], numbers=before)
        client.adopt(RowMap().after(move))
        return True


def grouped(
    chosen: Sequence[tuple[LoadPiece, int, int]], most: Sequence[int]
) -> Iterator[tuple[list[RowRange], int, int]]:
    """Yields moves of not too many changed rows each, `most` by table."""
    together: dict[tuple[int, int, int], list[LoadPiece]] = defaultdict(list)
    for piece, source, target in chosen:
        together[source, target, piece.table] += _cut(piece, most[piece.table])
    for (source, target, table), pieces in together.items():
        rows: list[RowRange] = []
        held = 0
        for piece in pieces:
            if rows and (held + piece.held > most[table] or len(rows) == _RANGES_AT_ONCE):
                yield rows, source, target
                rows, held = [], 0
            rows.append(RowRange(piece.table, piece.start, piece.stop))
            held += piece.held
        yield rows, source, target


def _cut(piece: LoadPiece, most: int) -> list[LoadPiece]:
    """Cuts a piece with too many changed rows for one move."""
    parts = min(-(-piece.held // most), piece.stop - piece.start)
    if parts < 2:
        return [piece]
    cuts = [piece.start + (piece.stop - piece.start) * part // parts for part in range(parts + 1)]
    return [
        LoadPiece(piece.table, start, stop, piece.load // parts, piece.held // parts) for start, stop in pairwise(cuts)
    ]
