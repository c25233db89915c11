"""Which owner gets which piece of the parameters: pure functions from sizes to indices.

A placement is deterministic, and gives every owner a piece that has elements if there are enough of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.plan import Segment

UNEVEN = 1.5
"""The `balance` above which a run says so."""


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


def loads(pieces: Sequence[ParameterPiece], placed: Sequence[int], owners: int) -> tuple[int, ...]:
    """Returns the bytes of each of `owners`, where `placed` is the index of each piece's owner."""
    held = [0] * owners
    for piece, owner in zip(pieces, placed, strict=True):
        held[owner] += piece.bytes
    return tuple(held)


def balance(loads: Sequence[float]) -> float:
    """Returns the largest load divided by their mean: 1 if all are equal, or nobody has any.

    >>> balance((300, 100, 200))
    1.5

    Args:
        loads: bytes, seconds or anything else of which each owner has some, at least 0 each.

    Raises:
        UsageError: there are no loads.
    """
    if not loads:
        raise UsageError("a balance is of at least 1 load, got 0")
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def require_owners(owners: int) -> None:
    """Raises UsageError if `owners` is below 1."""
    if owners < 1:
        raise UsageError(f"parameters need at least 1 owner, got {owners}")
