"""Which owner gets which piece of the parameters: pure functions from sizes to indices.

A placement is deterministic, and gives every owner a piece that has elements if there are enough of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.plan import Segment


@dataclass(frozen=True)
class ParameterPiece:
    """A contiguous piece `[start, stop)` of one flattened parameter, which has no owner yet, and its size."""

    parameter: str
    start: int
    stop: int
    bytes: int


Placement = Callable[[Sequence[ParameterPiece], int], tuple[int, ...]]
"""From pieces and a number of owners to the index of each piece's owner."""


def round_robin(pieces: Sequence[ParameterPiece], owners: int) -> tuple[int, ...]:
    """Deals the pieces out in turn; a piece without elements takes no turn.

    Raises:
        UsageError: `owners` is below 1.
    """
    require_owners(owners)
    chosen, turn = [], 0
    for piece in pieces:
        chosen.append(turn % owners)
        turn += piece.bytes > 0
    return tuple(chosen)


def greedy(pieces: Sequence[ParameterPiece], owners: int) -> tuple[int, ...]:
    """Gives the largest piece first to the owner with the fewest bytes so far.

    No owner has more than 4/3 of the least possible maximum (Graham, "Bounds on multiprocessing timing anomalies",
    1969, theorem 3).

    Raises:
        UsageError: `owners` is below 1.
    """
    require_owners(owners)
    held = [0] * owners
    chosen = [0] * len(pieces)
    for index in sorted(range(len(pieces)), key=lambda index: (-pieces[index].bytes, index)):
        owner = held.index(min(held))
        held[owner] += pieces[index].bytes
        chosen[index] = owner
    return tuple(chosen)


def place(pieces: Sequence[ParameterPiece], ranks: Sequence[int], placement: Placement) -> tuple[Segment, ...]:
    """Assigns every piece to one of the servers with these ranks; the pieces keep their order.

    Raises:
        InfeasiblePlan: a server would have no piece.
    """
    filled = sum(piece.bytes > 0 for piece in pieces)
    if len(ranks) > filled:
        raise InfeasiblePlan(
            f"{len(ranks)} servers and only {filled} shards of parameters to share among them; use at most "
            f"{max(1, filled)} servers, or a finer sharding, as 'fixed_shards:{len(ranks)}'"
        )
    owners = placement(pieces, len(ranks))
    return tuple(
        Segment(piece.parameter, piece.start, piece.stop, ranks[owner])
        for piece, owner in zip(pieces, owners, strict=True)
    )


def require_owners(owners: int) -> None:
    """Raises UsageError if `owners` is below 1."""
    if owners < 1:
        raise UsageError(f"parameters need at least 1 owner, got {owners}")


PLACEMENTS: Mapping[str, Placement] = {"greedy": greedy, "round_robin": round_robin}
"""Placements by name."""
