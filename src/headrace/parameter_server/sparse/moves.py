"""A server's part in moving rows: the requests of the worker that moves them, and pushes that meet a move.

The state machine is `RowMoves`; here are the rows themselves, and the messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from time import time
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.core.row_moves import Move, MovesState, Moving, Placed, RowMap, RowMoves, RowRange
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.sparse.messages import Rows
from headrace.parameter_server.sparse.placement import RowPlaces
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.sparse.traffic import RowTraffic
from headrace.parameter_server.wire import Message
from headrace.spec.events import HotRow, RowsAsked, RowsMoved
from headrace.spec.plain import from_plain, to_plain
from headrace.training.embeddings.pieces import RowBlock, blocks_of, to_pieces
from headrace.training.optimizer import StatePiece

_ROWS = "moving"
_STATE, _BLOCK = "moves/state", "moves/rows/"
_HOTTEST = 8
TAKEN = b"rows"
"""Before the rows of a move."""


class MoveKind(IntEnum):
    """What a MOVE_ROWS message asks for, in its `flag`; the number of the move is in its `lease`.

    Of MAP, `lease` is the version of the map that the changes follow: those that it brings, or is answered with. An
    INSTALL of the worker that moves has in `numbers` the version before the move, so that the rows are here at once;
    that of another worker is followed by a MAP. KEPT asks for what a TAKE was answered with.
    """

    CLAIM = 1
    TAKE = 2
    INSTALL = 3
    KEPT = 4
    MAP = 5
    LOAD = 6


@dataclass(frozen=True, slots=True)
class MoveAnswer:
    """What a server says to a worker that moves rows: whether it has done so, and the greatest number seen.

    `changes` of the map are those that a MAP asks for; `missing` are the moves whose rows must be brought first.
    """

    done: bool
    changes: RowMap
    seen: int
    missing: tuple[int, ...] = ()


def to_json(value: Any) -> bytes:
    """Returns a dataclass as JSON."""
    return json.dumps(to_plain(value), separators=(",", ":")).encode()


def from_json(kind: type[Any], blob: bytes | memoryview) -> Any:
    """Returns the dataclass that `to_json` was given; raises ValueError if it is none of this kind."""
    try:
        return from_plain(kind, json.loads(bytes(blob)))
    except (TypeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"no {kind.__name__}: {error}") from error


class ServedMoves:
    """The rows that come and go while workers push.

    Args:
        server: its index.
        shard: the machine of the tables, which knows the leases that are done.
    """

    def __init__(
        self, server: int, places: RowPlaces, tables: ServedTables, shard: Shard, counters: ServerCounters
    ) -> None:
        self._counters = counters
        self.machine = RowMoves(server)
        self.traffic = RowTraffic(places, server, tables)
        self._server, self._places, self._tables, self._shard = server, places, tables, shard
        self._blocks: dict[int, tuple[int, RowBlock]] = {}

    # ----- the worker that moves

    def answer(self, worker: int, message: Message, blob: memoryview) -> bytes:
        """Handles a MOVE_ROWS message; raises ValueError if it is none."""
        kind, number = MoveKind(message.flag), message.lease
        if kind == MoveKind.LOAD:
            return self._load()
        if kind == MoveKind.KEPT:
            moving = self.machine.gone.get(number)
            return b"" if moving is None else self._packed(moving, *self._blocks[number])
        done, changes, missing = True, RowMap(), list[int]()
        if kind == MoveKind.MAP and len(blob):
            missing = self._adopt(number, from_json(RowMap, blob))
        elif kind == MoveKind.MAP:
            changes = self.machine.map.changed_since(number)
        elif kind == MoveKind.CLAIM:
            done = self.machine.claim(number, worker)
        elif kind == MoveKind.TAKE:
            move = from_json(Move, blob)
            if self._may_leave(move, worker):
                return TAKEN + self._take(move, worker)
            done = False
        else:
            done = self._install(number, bytes(blob), message.numbers)
        return to_json(MoveAnswer(done, changes, self.machine.seen, tuple(missing)))

    def lost(self, worker: int) -> None:
        """Ends the claim of a worker that is not there any more, or comes back."""
        if self.machine.mover == worker:
            self.machine.mover = -1

    def _load(self) -> bytes:
        load = self.traffic.take()
        names = [spec.name for spec in self._tables.specs]
        hottest = tuple(
            HotRow(names[piece.table], piece.start, piece.load)
            for piece in load.pieces
            if piece.stop - piece.start == 1
        )[:_HOTTEST]
        self._counters.events.append(lambda rank, time_s: RowsAsked(rank, time_s, load.load, hottest))
        return to_json(load)

    def _may_leave(self, move: Move, worker: int) -> bool:
        tables = self._places.tables
        for rows in move.rows:
            if not (0 <= rows.table < len(tables) and 0 <= rows.start < rows.stop <= tables[rows.table].rows):
                raise ValueError(f"there are no rows {rows.start:,} to {rows.stop:,} of table {rows.table}")
        if not move.rows or len({rows.table for rows in move.rows}) > 1 or not 0 <= move.target < self._places.servers:
            raise ValueError(f"move {move.number} is of no table, of several, or to server {move.target}")
        machine = self.machine
        mine = machine.mover == worker and move.source == self._server != move.target
        later = move.number >= machine.seen and move.number > machine.map.version
        return mine and later and all(self._places.has(self._server, rows) for rows in move.rows)

    def _take(self, move: Move, worker: int) -> bytes:
        moving = self.machine.take(move, worker, self._shard.done, _now())
        table = move.rows[0].table
        block = self._tables.tables[table].within([(rows.start, rows.stop) for rows in move.rows], remove=True)
        self._blocks[move.number] = table, block
        self._forget_blocks()
        self._places.adopt(self.machine.map.changed_since(self._places.map.version))
        return self._packed(moving, table, block)

    def _install(self, number: int, blob: bytes, before: Sequence[int]) -> bool:
        moving, table, block = self._unpacked(blob)
        done = self.machine.install(number, moving)
        if done:
            self._blocks[number] = table, block
            if before:
                placed = tuple(Placed(part.rows, self._server, number) for part in moving.rows)
                self._adopt(before[0], RowMap(number, tuple(sorted(placed, key=lambda entry: entry.rows))))
        return done

    def _packed(self, moving: Moving, table: int, block: RowBlock) -> bytes:
        listed = torch.frombuffer(bytearray(to_json(moving)), dtype=torch.uint8)
        pieces = {piece.name: piece.value for piece in to_pieces(self._tables.specs[table].name, table, block)}
        return pack({_ROWS: listed, **pieces})

    def _unpacked(self, blob: bytes) -> tuple[Moving, int, RowBlock]:
        try:
            tensors = unpack(blob)
            moving: Moving = from_json(Moving, tensors.pop(_ROWS).numpy().tobytes())
            table = moving.rows[0].rows.table
            pieces = [StatePiece.parse(name, value) for name, value in tensors.items()]
            (block,) = blocks_of(pieces, self._tables.specs[table].name)
        except Exception as error:
            raise ValueError(f"no rows that move: {error}") from error
        return moving, table, block

    def _adopt(self, version: int, changes: RowMap) -> list[int]:
        """Takes over changes of the map after a version; returns the moves whose rows are missing."""
        if version > self.machine.map.version:
            raise ValueError(
                f"moves after {version} at server {self._server}, which knows those until {self.machine.map.version}"
            )
        came, missing = self.machine.adopt(changes, self._shard.done)
        for number, moving in came.items():
            table, block = self._blocks[number]
            self._tables.tables[table].load(block)
            self._tell(number, moving, self._tables.tables[table].row_bytes * len(block.ids), len(block.ids), table)
        self._forget_blocks()
        self._places.adopt(self.machine.map.changed_since(self._places.map.version))
        return missing

    def _tell(self, number: int, moving: Moving, nbytes: int, count: int, table: int) -> None:
        pause_s, shift = max(0.0, _now() - moving.taken_s), moving.source - self._server
        name, ranges = self._tables.specs[table].name, len(moving.rows)
        self._counters.events.append(
            lambda rank, time_s: RowsMoved(rank + shift, time_s, number, name, ranges, count, nbytes, rank, pause_s)
        )

    def _forget_blocks(self) -> None:
        live = self.machine.aside.keys() | self.machine.gone.keys()
        self._blocks = {number: block for number, block in self._blocks.items() if number in live}

    # ----- the state, for a backup

    def state(self) -> dict[str, Tensor]:
        """Returns the state, with rows that may come here and copies of those that have left, as tensors."""
        every = self.machine.aside | self.machine.gone
        blobs = {f"{_BLOCK}{number}": self._packed(every[number], *rows) for number, rows in self._blocks.items()}
        blobs[_STATE] = to_json(self.machine.state())
        return {name: torch.frombuffer(bytearray(blob), dtype=torch.uint8) for name, blob in blobs.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what `state` returned; raises ValueError or KeyError if it is none."""
        state: MovesState = from_json(MovesState, tensors[_STATE].numpy().tobytes())
        self.machine.load(state)
        numbers = [number for number, _ in (*state.aside, *state.kept)]
        self._blocks = {
            number: self._unpacked(tensors[f"{_BLOCK}{number}"].numpy().tobytes())[1:] for number in numbers
        }
        self._places.adopt(self.machine.map)

    # ----- requests for rows

    @property
    def map(self) -> RowMap:
        """The latest map here."""
        return self.machine.map

    def has(self, number: int, ids: Tensor) -> bool:
        """Tells whether all rows are here."""
        return bool((self._places.owners(number, ids) == self._server).all())

    def count(
        self, lease: int, version: int, rows: Mapping[int, Rows], was_done: bool
    ) -> tuple[dict[int, Rows], dict[int, Rows]]:
        """Counts a push; returns what to update with it, and what with the rest of a push that was done before."""
        later = self.machine.later_than(version)
        skipped, only = self.machine.push(lease, version, was_done, True)
        here = self._chosen(rows, (*later, *skipped), without=True)
        return (here, {}) if only is None else ({}, self._chosen(here, only))

    def rest(self, lease: int, rows: Mapping[int, Rows]) -> dict[int, Rows]:
        """Counts the rest of a push; returns what to update."""
        here = self._chosen(rows, (), without=True)
        touched = [
            moved.rows
            for moved in self.machine.here
            if lease in moved.lack
            and moved.rows.table in here
            and bool(_within(here[moved.rows.table][0], moved.rows.table, [moved.rows]).any())
        ]
        return self._chosen(here, self.machine.rest(lease, touched))

    def _chosen(self, rows: Mapping[int, Rows], ranges: Iterable[RowRange], without: bool = False) -> dict[int, Rows]:
        """Returns the gradients of rows that are here: those in some ranges, or `without` those."""
        ranges = list(ranges)
        chosen: dict[int, Rows] = {}
        for number, (ids, gradient) in rows.items():
            mask = self._places.owners(number, ids) == self._server
            mask &= _within(ids, number, ranges) ^ without
            chosen[number] = (ids, gradient) if bool(mask.all()) else (ids[mask], gradient[mask])
        return chosen


def _now() -> float:
    """Returns the time in seconds since 1970: servers on several hosts have no other clock in common.

    The length of a pause is told by it, and nothing is decided.
    """
    return time()


def _within(ids: Tensor, number: int, ranges: Sequence[RowRange]) -> Tensor:
    """Tells of each row whether it is in one of some ranges, which do not overlap."""
    spans = sorted((part.start, part.stop) for part in ranges if part.table == number)
    if not spans:
        return torch.zeros(len(ids), dtype=torch.bool)
    starts, stops = torch.tensor(spans).T.contiguous()
    at = torch.searchsorted(starts, ids, right=True) - 1
    within: Tensor = (at >= 0) & (ids < stops[at.clamp(min=0)])
    return within
