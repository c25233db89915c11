"""Rows that are moved while workers push: each lease counts once for each of its rows, whichever process dies."""

from __future__ import annotations

import pytest

from headrace.parameter_server.core import row_moves as module
from headrace.parameter_server.core.row_moves import Move, MovingRows, Placed, RowMap, RowMoves, RowRange
from parameter_server.moving import Moving
from parameter_server.worlds import mutated


def wrong(histories: int, machine: type[RowMoves]) -> list[str]:
    """Returns what is wrong with the first of so many histories that fails."""
    for seed in range(histories):
        try:
            if found := Moving(seed, machine).run():
                return found
        except (AssertionError, LookupError, ValueError) as error:
            return [repr(error)]
    return []


def test_no_lease_is_lost_or_counted_twice_for_a_row(request: pytest.FixtureRequest) -> None:
    worlds = [Moving(seed) for seed in range(10_000 if request.config.getoption("--full") else 200)]
    assert [found for world in worlds if (found := world.run())] == []
    # With those that lost workers had begun.
    assert sum(world.moved for world in worlds) > 1_000
    assert sum(world.failed_over for world in worlds) > 300


PLANTED = {
    "what the target has not is forgotten": ("(less - besides) | (lack & base)", "set()"),
    "what the source had is forgotten": ("(more | besides - base) - lack", "set()"),
    "both count": ("                skipped.append(moved.rows)\n", ""),
    "an old push covers what came later": ("elif version < moved.since:", "elif False:"),
    "an old push is the moved rows' one": ("lease in moved.lack and version >= moved.since", "lease in moved.lack"),
    "a rest counts twice": (
        "in moved.lack]\n        for moved in owed:\n            moved.lack.discard(lease)\n",
        "in moved.lack]\n",
    ),
    "any rest counts": ("moved.rows in rows and lease in moved.lack", "moved.rows in rows"),
    "a split forgets": ("moved.since, set(moved.besides), set(moved.lack))", "moved.since, set(), set())"),
    "a backup forgets": (".rows, since, set(part.besides), set(part.lack))", ".rows, since, set(), set())"),
    "moved twice as if once": ("part, tuple(moved.besides), tuple(moved.lack)", "part"),
    "any claim counts": ("        if number <= self.seen:", "        if False:"),
    "a claim is for ever": ("        if mover != self.mover:", "        if False:"),
    "rows stay where they were": ("            _replaced(self.here, wanted, [], _cut)\n", ""),
    "no copy is kept": ("self.gone = {move.number: moving}", "self.gone = {}"),
    "missing rows do not matter": (
        "number for number in numbers if number not in self.aside]",
        "number for number in numbers if number not in self.aside and False]\n"
        "        numbers = [number for number in numbers if number in self.aside]",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_histories_find_a_planted_bug(bug: str) -> None:
    assert wrong(400, mutated(module, "RowMoves", *PLANTED[bug]))


def test_a_map_has_the_last_move_of_each_row() -> None:
    first = RowMap().after(Move(1, (RowRange(0, 2, 8),), 0, 1))
    second = first.after(Move(2, (RowRange(0, 4, 6), RowRange(1, 0, 1)), 1, 2))
    assert second == RowMap(
        2,
        (
            Placed(RowRange(0, 2, 4), 1, 1),
            Placed(RowRange(0, 4, 6), 2, 2),
            Placed(RowRange(0, 6, 8), 1, 1),
            Placed(RowRange(1, 0, 1), 2, 2),
        ),
    )
    assert second.of(2) == (second.placed[1], second.placed[3])
    assert second.changed_since(1).placed == second.of(2)
    assert first.updated(second.changed_since(1)) == RowMap().updated(second) == second
    assert second.updated(first) is second


def test_a_move_that_is_over_is_refused() -> None:
    rows = (RowRange(0, 0, 1),)
    source = RowMoves(0)
    with pytest.raises(ValueError, match="move 1 by worker 7, and worker -1 moves rows"):
        source.take(Move(1, rows, 0, 1), 7, [])
    assert source.claim(3, 7)
    assert not source.claim(3, 8)
    assert source.claim(4, 8)
    with pytest.raises(ValueError, match="move 5 by worker 7, and worker 8 moves rows"):
        source.take(Move(5, rows, 0, 1), 7, [])
    with pytest.raises(ValueError, match="move 3 from server 0 at server 0, after 4"):
        source.take(Move(3, rows, 0, 1), 8, [])
    source.take(Move(4, rows, 0, 1), 8, [])
    with pytest.raises(ValueError, match="move 4 from server 0 at server 0, after 4"):
        source.take(Move(4, (RowRange(0, 1, 2),), 0, 1), 8, [])


def test_rows_that_are_missing_keep_a_map_away_until_their_copy_is_brought() -> None:
    source, target, rows = RowMoves(0), RowMoves(1), RowRange(0, 0, 1)
    source.claim(1, 7)
    moving = source.take(Move(1, (rows,), 0, 1), 7, [5], now_s=9.0)
    assert moving == source.gone[1] == module.Moving(((5, 6),), (MovingRows(rows),), 0, 9.0)
    assert target.adopt(source.map, [4]) == ({}, [1])
    assert (target.map, target.here) == (RowMap(), [])
    assert target.install(1, moving)
    assert target.adopt(source.map, [4]) == ({1: moving}, [])
    assert target.here == [module.MovedRows(rows, 1, {5}, {4})]
    assert target.aside == {}
    assert not target.install(1, moving)


def test_what_was_kept_aside_for_a_move_that_never_was_does_not_come() -> None:
    source, target = RowMoves(0), RowMoves(1)
    assert target.install(1, module.Moving(rows=(MovingRows(RowRange(0, 0, 1)),)))
    later = source.map.after(Move(2, (RowRange(0, 3, 4),), 0, 2))
    assert target.adopt(later, []) == ({}, [])
    assert target.here == []
    assert target.aside == {}
