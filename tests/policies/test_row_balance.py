"""Which rows move between servers."""

from __future__ import annotations

import random

import pytest

from headrace.policies.row_balance import LoadPiece, ServerLoad, choose_moves, unevenness


def loads_after(loads: list[ServerLoad], moves: list[tuple[LoadPiece, int, int]]) -> list[float]:
    now = [float(each.load) for each in loads]
    for piece, source, target in moves:
        assert piece in loads[source].pieces
        now[source] -= piece.load
        now[target] += piece.load
    return now


def hot(*loads: int) -> ServerLoad:
    pieces = tuple(LoadPiece(0, row, row + 1, load) for row, load in enumerate(loads))
    return ServerLoad(sum(loads), pieces)


def test_the_busiest_gives_to_the_idlest_what_brings_them_nearest() -> None:
    loads = [hot(60, 25, 15), hot(20)]
    assert choose_moves(loads) == [(LoadPiece(0, 1, 2, 25), 0, 1), (LoadPiece(0, 2, 3, 15), 0, 1)]


def test_nothing_moves_where_loads_are_even_or_one_row_is_all() -> None:
    assert choose_moves([hot(52, 50), hot(50, 50)]) == []
    assert choose_moves([hot(90), hot(10), hot(10)]) == []
    assert choose_moves([hot(), hot()]) == []


def test_no_more_moves_than_allowed_and_no_piece_twice() -> None:
    moves = choose_moves([hot(*[1] * 1000), hot()], most=30)
    assert len({piece.start for piece, _, _ in moves}) == len(moves) == 30


@pytest.mark.parametrize("seed", range(20))
def test_loads_like_zipfs_become_even(seed: int) -> None:
    chance = random.Random(seed)
    servers = chance.randint(2, 5)
    every = [round(100_000 * rank**-1.1) for rank in range(1, 5_000)]
    of: list[list[int]] = [[] for _ in range(servers)]
    for load in every:
        of[chance.choice(range(servers)) if seed % 2 else 0].append(load)
    loads = [
        ServerLoad(sum(own), tuple(LoadPiece(0, row, row + 1, load) for row, load in enumerate(own))) for own in of
    ]
    now = loads_after(loads, choose_moves(loads, 5_000))
    # One row alone may be more than the mean.
    assert unevenness(now) <= max(1.06, servers * max(every) / sum(every) + 0.01)
    assert sum(now) == sum(every)
