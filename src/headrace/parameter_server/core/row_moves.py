"""One server's part in moving rows to another server while workers push: a state machine without rows and sockets.

    worker that moves    source                       target
    claim ─────────────► from now on it alone moves ► likewise, at all servers
    take ──────────────► they are gone: the new map
             ◄────────── rows, and which leases they have
    install ────────────────────────────────────────► they are here
    map ───────────────► to all servers

A lease's gradient counts once for each row, and a push of the lease may come to the source before the move and to the
target after it, or the other way round. So moved rows know by which leases they differ from the rest of their server:
those that they have `besides`, and those that they `lack`. A push names the map by which it was divided, so that the
target knows whether moved rows could be part of it.

Taking the rows is the moment of the move. The source keeps a copy until all servers know the move: a worker that learns
a map tells it to all servers before anything else, and a server that misses the rows of a move refuses the map until it
is brought the copy. So nothing waits for the worker that moves, and it may be lost at any message.

One worker moves at a time. Its claim is at all servers before it takes anything, and ends at each server with the claim
of another worker. After its claim it learns all moves until then, and so tells them to all servers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from headrace.parameter_server.core.leases import intervals_of, numbers_in


@dataclass(frozen=True, slots=True, order=True)
class RowRange:
    """The rows [start, stop) of a table."""

    table: int
    start: int
    stop: int

    def without(self, other: RowRange) -> list[RowRange]:
        """Returns what is left of it without another one."""
        if self.table != other.table or other.stop <= self.start or self.stop <= other.start:
            return [self]
        left = RowRange(self.table, self.start, other.start), RowRange(self.table, other.stop, self.stop)
        return [part for part in left if part.start < part.stop]

    def within(self, other: RowRange) -> RowRange | None:
        """Returns the rows that both have."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return RowRange(self.table, start, stop) if self.table == other.table and start < stop else None


class _HasRows(Protocol):
    @property
    def rows(self) -> RowRange: ...


_Each = TypeVar("_Each", bound=_HasRows)


def overlapping(placed: Sequence[_Each], rows: RowRange) -> slice:
    """Returns which of some ranges have some of the rows; `placed` do not overlap, and are in the order of their rows.

    For the empty slice, it is where the rows would be put.
    """
    first = bisect_right(placed, (rows.table, rows.start), key=lambda entry: (entry.rows.table, entry.rows.stop))
    return slice(first, bisect_left(placed, (rows.table, rows.stop), first, key=lambda entry: _begin(entry.rows)))


def _begin(rows: RowRange) -> tuple[int, int]:
    return rows.table, rows.start


def _replaced(
    placed: list[_Each], rows: RowRange, by: Sequence[_Each], cut: Callable[[_Each, RowRange], _Each]
) -> None:
    """Replaces the ranges of some rows, in place; `cut` returns an entry for the part of its rows that stays."""
    at = overlapping(placed, rows)
    left = [cut(entry, part) for entry in placed[at] for part in entry.rows.without(rows)]
    placed[at] = sorted([*left, *by], key=lambda entry: _begin(entry.rows))


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows that were moved to a server, by the move `since`."""

    rows: RowRange
    server: int
    since: int


@dataclass(frozen=True)
class RowMap:
    """Where moved rows are, in the order of the rows; all others are where their placement says.

    `version` is the number of the last move. There is one order of moves: of two maps, the later one has all moves of
    the earlier one.
    """

    version: int = 0
    placed: tuple[Placed, ...] = ()

    def after(self, move: Move) -> RowMap:
        """Returns the map after a move."""
        return self.updated(RowMap(move.number, tuple(Placed(rows, move.target, move.number) for rows in move.rows)))

    def changed_since(self, version: int) -> RowMap:
        """Returns what `updated` needs to make this map out of an earlier one of that version."""
        return RowMap(self.version, tuple(entry for entry in self.placed if entry.since > version))

    def updated(self, changes: RowMap) -> RowMap:
        """Returns the map after later moves; `changes` are those since this map, or since an earlier one."""
        if changes.version <= self.version:
            return self
        placed = list(self.placed)
        for change in changes.placed:
            # A row is where its last move brought it; of those that this map has already, nothing changes.
            _replaced(placed, change.rows, [change], lambda old, rows: replace(old, rows=rows))
        return RowMap(changes.version, tuple(placed))

    def of(self, server: int) -> tuple[Placed, ...]:
        """Returns what was moved to a server and is still there."""
        return tuple(entry for entry in self.placed if entry.server == server)


@dataclass(frozen=True, slots=True)
class Move:
    """Ranges of rows that leave a server for another one; no two moves have one number, also of those given up."""

    number: int
    rows: tuple[RowRange, ...]
    source: int
    target: int


@dataclass(slots=True)
class MovedRows:
    """Rows that were moved to this server, and the leases by which they differ from its other rows."""

    rows: RowRange
    since: int
    besides: set[int] = field(default_factory=set)
    lack: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class MovingRows:
    """Rows on their way, and the leases by which they differ from the other rows of the server that they leave."""

    rows: RowRange
    besides: tuple[int, ...] = ()
    lack: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moving:
    """The rows of a move, and the leases of the server `source` that they leave, as intervals.

    `taken_s` is when they left it, in seconds since 1970.
    """

    done: tuple[tuple[int, ...], ...] = ()
    rows: tuple[MovingRows, ...] = ()
    source: int = -1
    taken_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MovesState:
    """The state of `RowMoves` as JSON values; everywhere, the number of the move comes first."""

    map: RowMap
    seen: int
    mover: int
    here: tuple[tuple[int, MovingRows], ...]
    aside: tuple[tuple[int, Moving], ...]
    kept: tuple[tuple[int, Moving], ...]


class RowMoves:
    """The moves of one server's rows; `server` is its number.

    `map` is the latest that it knows: it has all moves from this server. `seen` is the greatest number of a move, or of
    a claim. `mover` is the worker that has claimed it last, -1 for none. `here` are the rows that were moved here, in
    their order; `aside` is what may come, and `gone` what has left, by move.
    """

    def __init__(self, server: int) -> None:
        self.map = RowMap()
        self.seen = 0
        self.mover = -1
        self._server = server
        self.here: list[MovedRows] = []
        self.aside: dict[int, Moving] = {}
        self.gone: dict[int, Moving] = {}

    def state(self) -> MovesState:
        """Returns the state."""
        here = tuple(
            (moved.since, MovingRows(moved.rows, tuple(sorted(moved.besides)), tuple(sorted(moved.lack))))
            for moved in self.here
        )
        return MovesState(self.map, self.seen, self.mover, here, tuple(self.aside.items()), tuple(self.gone.items()))

    def load(self, state: MovesState) -> None:
        """Takes over the state of another server, as its backup does."""
        self.map, self.seen, self.mover = state.map, state.seen, state.mover
        self.here = [MovedRows(part.rows, since, set(part.besides), set(part.lack)) for since, part in state.here]
        self.aside, self.gone = dict(state.aside), dict(state.kept)

    # ----- the move

    def claim(self, number: int, mover: int) -> bool:
        """Lets a worker move rows by this number and by those after it, and no other one any more.

        Returns False if another one has claimed it. A worker claims at all servers before it moves anything, so that
        each of them knows all moves that have been, and there is one order of moves.
        """
        if number <= self.seen:
            return False
        self.seen, self.mover = number, mover
        return True

    def take(self, move: Move, mover: int, done: Iterable[int], now_s: float = 0.0) -> Moving:
        """Moves rows away from here, for a worker; `done` are the leases of this server, `now_s` the time.

        All servers know all moves before it. Raises ValueError if it cannot be done.
        """
        if mover != self.mover:
            raise ValueError(f"move {move.number} by worker {mover}, and worker {self.mover} moves rows")
        if move.source != self._server or move.number < self.seen or move.number <= self.map.version:
            raise ValueError(
                f"move {move.number} from server {move.source} at server {self._server}, after {self.seen}"
            )
        self.seen = move.number
        rows: list[MovingRows] = []
        for wanted in move.rows:
            left = [wanted]
            for moved in self.here[overlapping(self.here, wanted)]:
                if part := wanted.within(moved.rows):
                    rows.append(MovingRows(part, tuple(moved.besides), tuple(moved.lack)))
                    left = [piece for whole in left for piece in whole.without(part)]
            rows += [MovingRows(part) for part in left]
            _replaced(self.here, wanted, [], _cut)
        self.map = self.map.after(move)
        moving = Moving(intervals_of(done), tuple(rows), self._server, now_s)
        self.gone = {move.number: moving}
        return moving

    def install(self, number: int, moving: Moving) -> bool:
        """Keeps aside what may come here; returns False for a move that is known here already."""
        if number <= self.map.version:
            return False
        self.aside[number] = moving
        return True

    def adopt(self, changes: RowMap, done: Iterable[int]) -> tuple[dict[int, Moving], list[int]]:
        """Takes over a later map, or what has changed since this one; `done` are the leases of this server.

        Returns the moves whose rows are here from now on, and the numbers of those whose rows are missing here: if
        there are any, nothing is taken over.
        """
        if changes.version <= self.map.version:
            return {}, []
        map_ = self.map.updated(changes)
        numbers = sorted({placed.since for placed in map_.of(self._server) if placed.since > self.map.version})
        missing = [number for number in numbers if number not in self.aside]
        if missing:
            return {}, missing
        base, came = set(done), {number: self.aside[number] for number in numbers}
        for number, moving in came.items():
            theirs = numbers_in(moving.done)
            more, less = theirs - base, base - theirs
            for part in moving.rows:
                besides, lack = set(part.besides), set(part.lack)
                moved = MovedRows(part.rows, number, (more | besides - base) - lack, (less - besides) | (lack & base))
                self.here.insert(overlapping(self.here, part.rows).start, moved)
        self.map = map_
        self.seen = max(self.seen, map_.version)
        self.aside = {number: moving for number, moving in self.aside.items() if number > map_.version}
        return came, []

    # ----- pushes

    def push(
        self, lease: int, version: int, was_done: bool, is_done: bool
    ) -> tuple[list[RowRange], list[RowRange] | None]:
        """Counts a push of a lease, divided by the map `version`, of which the shard's machine knew before and after.

        Returns the ranges whose rows must not be updated, and the only ones whose rows may be; None for all others.
        """
        if was_done:
            owed = [moved for moved in self.here if lease in moved.lack and version >= moved.since]
            for moved in owed:
                moved.lack.discard(lease)
            return [], [moved.rows for moved in owed]
        skipped: list[RowRange] = []
        for moved in self.here if is_done else ():
            if lease in moved.besides:
                moved.besides.discard(lease)
                skipped.append(moved.rows)
            elif version < moved.since:
                moved.lack.add(lease)
        return skipped, None

    def later_than(self, version: int) -> list[RowRange]:
        """Returns the rows that came here after a map: a push that was divided by it has the rest of them follow.

        It may have gradients for them, if they had been here before, or none, if it sent those to another server.
        """
        return [moved.rows for moved in self.here if moved.since > version]

    def rest(self, lease: int, rows: Sequence[RowRange]) -> list[RowRange]:
        """Counts the rest of a push, whose rows were moved here while it was under way; returns what to update.

        `rows` are the ranges of moved rows here that the rest has gradients for; the push itself has come before.
        """
        owed = [moved for moved in self.here if moved.rows in rows and lease in moved.lack]
        for moved in owed:
            moved.lack.discard(lease)
        return [moved.rows for moved in owed]

    def settle(self) -> None:
        """Forgets leases: all of them are done everywhere."""
        for moved in self.here:
            moved.besides.clear()
            moved.lack.clear()
        self.aside = {number: _settled(moving) for number, moving in self.aside.items()}
        self.gone = {number: _settled(moving) for number, moving in self.gone.items()}


def _settled(moving: Moving) -> Moving:
    return replace(moving, done=(), rows=tuple(MovingRows(part.rows) for part in moving.rows))


def _cut(moved: MovedRows, rows: RowRange) -> MovedRows:
    return MovedRows(rows, moved.since, set(moved.besides), set(moved.lack))
