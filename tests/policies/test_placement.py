from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InfeasiblePlan, UsageError
from headrace.policies.sharding import PLACEMENTS, ParameterPiece, fixed_shards, greedy, place, round_robin
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import Segment


def pieces_of(*sizes: int) -> list[ParameterPiece]:
    return [ParameterPiece(f"p{index}", 0, size, size) for index, size in enumerate(sizes)]


def loads(pieces: Sequence[ParameterPiece], placed: Sequence[int], owners: int) -> tuple[int, ...]:
    """Returns the bytes of each owner."""
    return tuple(
        sum(piece.bytes for piece, by in zip(pieces, placed, strict=True) if by == one) for one in range(owners)
    )


PIECES = st.lists(st.integers(0, 60), max_size=14).map(lambda sizes: pieces_of(*sizes))
OWNERS = st.integers(1, 6)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
@given(pieces=PIECES, owners=OWNERS)
def test_every_piece_has_an_owner_and_every_owner_a_piece_where_there_are_enough(
    name: str, pieces: list[ParameterPiece], owners: int
) -> None:
    placed = PLACEMENTS[name](pieces, owners)
    assert placed == PLACEMENTS[name](pieces, owners)
    assert len(placed) == len(pieces)
    assert all(0 <= owner < owners for owner in placed)
    held = loads(pieces, placed, owners)
    assert sum(held) == sum(piece.bytes for piece in pieces)
    filled = sum(piece.bytes > 0 for piece in pieces)
    assert sum(load > 0 for load in held) == min(owners, filled)


@given(PIECES, OWNERS)
def test_round_robin_deals_pieces_out_by_number(pieces: list[ParameterPiece], owners: int) -> None:
    placed = round_robin(pieces, owners)
    filled = [owner for piece, owner in zip(pieces, placed, strict=True) if piece.bytes]
    assert filled == [index % owners for index in range(len(filled))]


def least_maximum(pieces: Sequence[ParameterPiece], owners: int) -> int:
    """Returns the largest load of the best placement, found by trying all."""
    return min(max(loads(pieces, placed, owners)) for placed in product(range(owners), repeat=len(pieces)))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6).map(lambda sizes: pieces_of(*sizes)), st.integers(1, 3))
def test_greedy_is_within_grahams_bound_of_the_best(pieces: list[ParameterPiece], owners: int) -> None:
    largest = max(loads(pieces, greedy(pieces, owners), owners))
    # 4/3 - 1/(3 m)
    assert 3 * owners * largest <= (4 * owners - 1) * least_maximum(pieces, owners)


def test_greedy_reaches_grahams_bound_where_it_is_tight() -> None:
    # Graham 1969, section 3, for two owners: 3 3 | 2 2 2 is 6 and 6, the largest first make it 7 and 5
    pieces = pieces_of(3, 3, 2, 2, 2)
    assert greedy(pieces, 2) == (0, 1, 0, 1, 0)
    assert loads(pieces, greedy(pieces, 2), 2) == (7, 5)
    assert least_maximum(pieces, 2) == 6


def test_greedy_is_more_even_than_round_robin_where_sizes_alternate() -> None:
    pieces = pieces_of(100, 1, 100, 1)
    assert loads(pieces, round_robin(pieces, 2), 2) == (200, 2)
    assert loads(pieces, greedy(pieces, 2), 2) == (101, 101)


def test_pieces_become_segments_of_their_servers_in_the_same_order() -> None:
    # after 3 workers, 2 servers: weights in 2 pieces of 8 and 12 elements
    pieces = fixed_shards([ParameterSpec("weight", (5, 4)), ParameterSpec("bias", (5,))], 2)
    assert place(pieces, (3, 4), round_robin) == (
        Segment("weight", 0, 8, 3),
        Segment("weight", 8, 20, 4),
        Segment("bias", 0, 2, 3),
        Segment("bias", 2, 5, 4),
    )
    # 12 elements to the first; 8, 3 and 2 to the second, which has less each time
    assert place(pieces, (3, 4), greedy) == (
        Segment("weight", 0, 8, 4),
        Segment("weight", 8, 20, 3),
        Segment("bias", 0, 2, 4),
        Segment("bias", 2, 5, 4),
    )


@given(PIECES, st.integers(1, 20))
def test_servers_without_anything_to_do_are_refused(pieces: list[ParameterPiece], servers: int) -> None:
    filled = sum(piece.bytes > 0 for piece in pieces)
    ranks = range(2, 2 + servers)
    if servers <= filled:
        assert {segment.owner for segment in place(pieces, ranks, greedy)} == set(ranks)
    else:
        with pytest.raises(InfeasiblePlan, match=f"{servers} servers and only {filled} shards .* or a finer sharding"):
            place(pieces, ranks, greedy)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_zero_owners_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="at least 1 owner, got 0"):
        PLACEMENTS[name](pieces_of(3), 0)
