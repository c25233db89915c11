"""A server's part in moving rows: the requests of the worker that moves them, and pushes that meet a move.

The state machine is `RowMoves`; here are the rows themselves, and the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.core.row_moves import Move, Moving, RowMap, RowMoves, RowRange
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.sparse.messages import Rows
from headrace.parameter_server.sparse.placement import RowPlaces
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.sparse.traffic import RowTraffic
from headrace.parameter_server.wire import Message
from headrace.spec.events import HotRow, RowsAsked, RowsMoved
from headrace.spec.plain import from_plain, to_plain
from headrace.training.embeddings.pieces import blocks_of, to_pieces
from headrace.training.embeddings.table import RowBlock
from headrace.training.optimizer import StatePiece

_ROWS = "moving"
_HOTTEST = 8
FROZEN = b"rows"
"""Before the rows of a move that has begun."""


class MoveKind(IntEnum):
    """What a MOVE_ROWS message asks for, in its `flag`; the number of the move is in its `lease`.

    Of MAP, `lease` is the version of the map that the changes follow: those that it brings, or is answered with.
    """

    CLAIM = 1
    FREEZE = 2
    INSTALL = 3
    RELEASE = 4
    STAY = 5
    MAP = 6
    LOAD = 7


@dataclass(frozen=True, slots=True)
class MoveAnswer:
    """What a server says to a worker that moves rows: whether it has done so, and the greatest number seen.

    `changes` of the map are those that a MAP asks for, or those of the move that is released.
    """

    done: bool
    changes: RowMap
    seen: int


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
        self.resume: Callable[[], None] = lambda: None
        self._server, self._places, self._tables, self._shard = server, places, tables, shard
        self._aside: dict[int, tuple[int, RowBlock]] = {}
        self._frozen: tuple[float, int, int] = 0.0, 0, 0

    # ----- the worker that moves

    def answer(self, worker: int, message: Message, blob: memoryview) -> bytes:
        """Handles a MOVE_ROWS message; raises ValueError if it is none."""
        kind, number = MoveKind(message.flag), message.lease
        if kind == MoveKind.LOAD:
            load = self.traffic.take()
            names = [spec.name for spec in self._tables.specs]
            hottest = tuple(
                HotRow(names[piece.table], piece.start, piece.load)
                for piece in load.pieces
                if piece.stop - piece.start == 1
            )[:_HOTTEST]
            self._counters.events.append(lambda rank, time_s: RowsAsked(rank, time_s, load.load, hottest))
            return to_json(load)
        done, changes = True, RowMap()
        if kind == MoveKind.MAP:
            if len(blob):
                self._adopt(number, from_json(RowMap, blob))
            else:
                changes = self.machine.map.changed_since(number)
        elif kind == MoveKind.CLAIM:
            done = self.machine.claim(number, worker)
            if done:
                # A move of another worker is over.
                self.resume()
        elif kind == MoveKind.STAY:
            if self.machine.leaving is not None and self.machine.leaving.number == number:
                self.give_up()
        elif kind == MoveKind.FREEZE:
            move = from_json(Move, blob)
            if self._may_leave(move, worker):
                return self._freeze(move, worker)
            done = False
        elif kind == MoveKind.INSTALL:
            done = self._install(number, bytes(blob))
        else:
            done = self._release(number)
            # The worker knows all moves before it: none can have come between since it has claimed this server.
            changes = self.machine.map.changed_since(number - 1) if done else changes
        return to_json(MoveAnswer(done, changes, self.machine.seen))

    def lost(self, worker: int) -> None:
        """Gives up the move of a worker that is not there any more, or comes back."""
        if self.machine.mover == worker:
            self.give_up(for_good=True)

    def give_up(self, for_good: bool = False) -> None:
        """Lets the rows of an open move stay."""
        self.machine.give_up(for_good)
        self.resume()

    def _may_leave(self, move: Move, worker: int) -> bool:
        tables = self._places.tables
        for rows in move.rows:
            if not (0 <= rows.table < len(tables) and 0 <= rows.start < rows.stop <= tables[rows.table].rows):
                raise ValueError(f"there are no rows {rows.start:,} to {rows.stop:,} of table {rows.table}")
        if not move.rows or len({rows.table for rows in move.rows}) > 1 or not 0 <= move.target < self._places.servers:
            raise ValueError(f"move {move.number} is of no table, of several, or to server {move.target}")
        mine = self.machine.mover == worker and move.source == self._server and move.number >= self.machine.seen
        return mine and self.machine.leaving is None and all(self._places.has(self._server, rows) for rows in move.rows)

    def _freeze(self, move: Move, worker: int) -> bytes:
        began = perf_counter()
        moving = self.machine.freeze(move, worker, self._shard.done)
        table = move.rows[0].table
        block = self._tables.tables[table].within(_ids_of(move))
        blob = self._packed(moving, table, block)
        self._frozen = began, len(block.ids), len(blob)
        return FROZEN + blob

    def _install(self, number: int, blob: bytes) -> bool:
        if number < self.machine.seen or number <= self.machine.map.version:
            return False
        moving, table, block = self._unpacked(blob)
        self.machine.install(number, moving)
        self._aside = {number: (table, block)}
        return True

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

    def _release(self, number: int) -> bool:
        move = self.machine.leaving
        if move is None or move.number != number:
            return False
        self._places.adopt(self.machine.release(number).changed_since(number - 1))
        table = self._tables.tables[move.rows[0].table]
        table.within(_ids_of(move), remove=True)
        began, count, nbytes = self._frozen
        pause_s = perf_counter() - began
        shift, counts = move.target - move.source, (len(move.rows), count, nbytes)
        self._counters.events.append(
            lambda rank, time_s: RowsMoved(rank, time_s, number, table.spec.name, *counts, rank + shift, pause_s)
        )
        self.resume()
        return True

    def _adopt(self, version: int, changes: RowMap) -> None:
        if version > self.machine.map.version:
            raise ValueError(
                f"moves after {version} at server {self._server}, which knows those until {self.machine.map.version}"
            )
        came, gone = self.machine.adopt(changes, self._shard.done)
        for number in came:
            table, block = self._aside.pop(number)
            self._tables.tables[table].load(block)
        for number in gone:
            del self._aside[number]
        self._places.adopt(self.machine.map.changed_since(self._places.map.version))

    # ----- the state, for a backup

    def kept_aside(self) -> dict[int, bytes]:
        """Returns the rows that may come here, by move."""
        return {number: self._packed(self.machine.aside[number], *rows) for number, rows in self._aside.items()}

    def load(self, aside: Mapping[int, bytes]) -> None:
        """Takes over what `kept_aside` returned, when the machine's state is there."""
        self._aside = {number: self._unpacked(blob)[1:] for number, blob in aside.items()}
        self._places.adopt(self.machine.map)
        self._frozen = perf_counter(), 0, 0

    # ----- requests for rows

    @property
    def map(self) -> RowMap:
        """The latest map here."""
        return self.machine.map

    def has(self, number: int, ids: Tensor) -> bool:
        """Tells whether all rows are here."""
        return bool((self._places.owners(number, ids) == self._server).all())

    def waits(self, rows: Mapping[int, Rows]) -> bool:
        """Tells whether a push must wait for a move to be over, which takes some of its rows away."""
        move = self.machine.leaving
        return move is not None and any(
            bool(_within(ids, number, move.rows).any()) for number, (ids, _) in rows.items()
        )

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
            each.rows
            for each in self.machine.here
            if lease in each.lack
            and each.rows.table in here
            and bool(_within(here[each.rows.table][0], each.rows.table, [each.rows]).any())
        ]
        return self._chosen(here, self.machine.rest(lease, touched))

    def _chosen(self, rows: Mapping[int, Rows], ranges: Iterable[RowRange], without: bool = False) -> dict[int, Rows]:
        """Returns the gradients of rows that are here: those in some ranges, or `without` those."""
        ranges = list(ranges)
        found: dict[int, Rows] = {}
        for number, (ids, gradient) in rows.items():
            mask = self._places.owners(number, ids) == self._server
            mask &= _within(ids, number, ranges) ^ without
            found[number] = (ids, gradient) if bool(mask.all()) else (ids[mask], gradient[mask])
        return found


def _ids_of(move: Move) -> list[tuple[int, int]]:
    return [(rows.start, rows.stop) for rows in move.rows]


def _within(ids: Tensor, number: int, ranges: Sequence[RowRange]) -> Tensor:
    """Tells of each row whether it is in one of some ranges, which do not overlap."""
    own = sorted((each.start, each.stop) for each in ranges if each.table == number)
    if not own:
        return torch.zeros(len(ids), dtype=torch.bool)
    starts, stops = torch.tensor(own).T.contiguous()
    at = torch.searchsorted(starts, ids, right=True) - 1
    within: Tensor = (at >= 0) & (ids < stops[at.clamp(min=0)])
    return within
