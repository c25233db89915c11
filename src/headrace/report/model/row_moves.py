"""Rows of tables that servers were asked for, those that moved between them, and those that workers had near."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.report.model.events import Attempt, of_kind
from headrace.spec.events import HotRow, RowsAsked, RowsMoved, RowsRead

_HOTTEST = 5


@dataclass(frozen=True)
class RowMoveSummary:
    """What servers whose rows may move were asked for, and which rows moved.

    Attributes:
        asked: rows pulled between the last two comparisons of loads, by server.
        first: the same for the first comparison.
        hottest: the rows that were pulled most in the last one.
        moves, rows, bytes: how many moves, the rows that travelled, and their bytes.
        pauses_s: for how long the rows of each move were at no server, ascending.
    """

    asked: Mapping[int, int]
    first: Mapping[int, int]
    hottest: tuple[HotRow, ...]
    moves: int
    rows: int
    bytes: int
    pauses_s: tuple[float, ...]

    def share(self, row: HotRow) -> float:
        """Returns the share of a row in all that was pulled."""
        return row.pulls / max(1, sum(self.asked.values()))


def row_moves_of(attempts: Sequence[Attempt]) -> RowMoveSummary | None:
    """Returns what rows did; None where they cannot move, or loads were not compared yet."""
    asked = [event for attempt in attempts for event in of_kind(RowsAsked, attempt.events)]
    if not asked:
        return None
    moved = [event for attempt in attempts for event in of_kind(RowsMoved, attempt.events)]
    last = {event.rank: event for event in asked}
    pulls: Counter[tuple[str, int]] = Counter()
    for event in last.values():
        for row in event.hottest:
            pulls[row.table, row.row] += row.pulls
    return RowMoveSummary(
        asked={rank: event.rows for rank, event in sorted(last.items())},
        first={event.rank: event.rows for event in sorted(reversed(asked), key=lambda event: event.rank)},
        hottest=tuple(HotRow(table, row, count) for (table, row), count in pulls.most_common(_HOTTEST)),
        moves=len(moved),
        rows=sum(event.rows for event in moved),
        bytes=sum(event.bytes for event in moved),
        pauses_s=tuple(sorted(event.pause_s for event in moved)),
    )


@dataclass(frozen=True)
class RowReadSummary:
    """What the steps of workers that keep rows near have read, of all tables, in all attempts together.

    Attributes:
        asked: how many rows; a row counts once each call of its layer.
        copied: those of them that were read from copies of the hottest rows.
        early: those of them that were pulled during the step before.
        saved_bytes: of the copied rows, which did not travel.
    """

    asked: int
    copied: int
    early: int
    saved_bytes: int


def row_reads_of(attempts: Sequence[Attempt]) -> RowReadSummary | None:
    """Returns what workers have read; None where none keeps rows near, or has written its end."""
    tables = [table for attempt in attempts for event in of_kind(RowsRead, attempt.events) for table in event.tables]
    if not tables:
        return None
    names = ("asked", "copied", "early", "saved_bytes")
    return RowReadSummary(*(sum(getattr(each, name) for each in tables) for name in names))
