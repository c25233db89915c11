"""Into what the parameters are cut for servers, and which server gets which piece: pure functions of names and sizes.

Every cut covers each trainable parameter wholly and without overlap, in the model's order. It is along the first axis,
never through a row, and leaves the owners to a placement, which gives every owner a piece that has elements if there
are enough of them:

    weight (5, 4)           fixed_shards:2      ████████ | ████████████                 2 + 3 rows
    of float32,             min_size:32B/8      ████████ | ████████████                 at least 2 rows each
    80 bytes                max_size:32B        ████ | ████████ | ████████              at most 2 rows each
                            whole               ████████████████████

A number of owners, pieces or bytes below 1 is a `UsageError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.policies.segments import require_owners
from headrace.spec.model import ITEM_BYTES, ParameterSpec
from headrace.spec.plan import Segment


@dataclass(frozen=True)
class ParameterPiece:
    """A contiguous piece `[start, stop)` of one flattened parameter, which has no owner yet, and its size."""

    parameter: str
    start: int
    stop: int
    bytes: int


Sharding = Callable[[Sequence[ParameterSpec]], tuple[ParameterPiece, ...]]
"""From parameters to pieces."""

Placement = Callable[[Sequence[ParameterPiece], int], tuple[int, ...]]
"""From pieces and a number of owners to the index of each piece's owner."""

_EXAMPLES = {
    "fixed_shards": "fixed_shards:4",
    "max_size": "max_size:4MB",
    "min_size": "min_size:256kB/8",
    "whole": "whole",
}
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_QUANTITY = re.compile(r"([0-9]{1,15}) ?([A-Za-z]+)")


def whole(parameters: Sequence[ParameterSpec], owners: int) -> tuple[Segment, ...]:
    """Gives every parameter to one owner: the largest first, to the owner with the fewest bytes so far.

    For optimizers that need whole matrices. See `greedy`.
    """
    pieces = unsharded(parameters)
    return tuple(
        Segment(piece.parameter, piece.start, piece.stop, owner)
        for piece, owner in zip(pieces, greedy(pieces, owners), strict=True)
    )


def unsharded(parameters: Sequence[ParameterSpec]) -> tuple[ParameterPiece, ...]:
    """Leaves every parameter whole."""
    return _cut(parameters, lambda rows, row_bytes: 1)


def fixed_shards(parameters: Sequence[ParameterSpec], count: int) -> tuple[ParameterPiece, ...]:
    """Cuts every parameter into `count` pieces, or one a row where it has fewer rows."""
    _require("count", count)
    return _cut(parameters, lambda rows, row_bytes: min(count, rows))


def min_size(parameters: Sequence[ParameterSpec], count: int, least_bytes: int) -> tuple[ParameterPiece, ...]:
    """Cuts every parameter into as many pieces as are at least `least_bytes` each, but not more than `count`.

    A parameter that is smaller stays whole.
    """
    _require("count", count)
    _require("least_bytes", least_bytes)
    # The smallest of n pieces has rows // n rows.
    return _cut(parameters, lambda rows, row_bytes: min(count, rows // -(-least_bytes // row_bytes)))


def max_size(parameters: Sequence[ParameterSpec], most_bytes: int) -> tuple[ParameterPiece, ...]:
    """Cuts every parameter into as few pieces as are at most `most_bytes` each; a single row may be larger."""
    _require("most_bytes", most_bytes)
    return _cut(parameters, lambda rows, row_bytes: -(-rows // max(1, most_bytes // row_bytes)))


def parse_sharding(text: str) -> Sharding:
    """Returns the sharding that a text names.

    "fixed_shards:4" is `fixed_shards` with 4 pieces a parameter, "max_size:4MB" is `max_size` with 4,000,000 bytes,
    "min_size:256kB/8" is `min_size` with 256,000 bytes and at most 8 pieces a parameter, "whole" is `unsharded`. Units
    are B, kB, MB and GB, by thousands, or KiB, MiB and GiB, by 1,024. Raises a `UsageError` if it names none, or
    without what the sharding needs.
    """
    if not isinstance(text, str):
        raise UsageError(f"a sharding is a text as {_EXAMPLES['max_size']!r}, got {text!r}")
    name, _, rest = text.partition(":")
    if name not in _EXAMPLES:
        raise UnknownName("sharding", name, _EXAMPLES)
    if name == "fixed_shards":
        return partial(fixed_shards, count=_count(text, rest))
    if name == "max_size":
        return partial(max_size, most_bytes=_bytes(text, rest))
    if name == "min_size":
        least, _, count = rest.partition("/")
        return partial(min_size, count=_count(text, count), least_bytes=_bytes(text, least))
    if text != name:
        raise UsageError(f"the sharding 'whole' takes nothing, got {text!r}; write 'whole'")
    return unsharded


def round_robin(pieces: Sequence[ParameterPiece], owners: int) -> tuple[int, ...]:
    """Deals the pieces out in turn; a piece without elements takes no turn."""
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


PLACEMENTS: Mapping[str, Placement] = {"greedy": greedy, "round_robin": round_robin}
"""Placements by name."""


def _cut(parameters: Sequence[ParameterSpec], count: Callable[[int, int], int]) -> tuple[ParameterPiece, ...]:
    """Cuts each parameter into about `count(rows, bytes of a row)` pieces, whose rows differ by at most 1."""
    pieces = []
    for parameter in parameters:
        if not parameter.trainable:
            continue
        rows = parameter.shape[0] if parameter.shape else 1
        width = parameter.elements // rows if rows else 0
        item = ITEM_BYTES[parameter.dtype]
        parts = max(1, count(rows, width * item)) if width else 1
        cuts = [width * (part * rows // parts) for part in range(parts)] + [parameter.elements]
        pieces += [ParameterPiece(parameter.name, start, stop, (stop - start) * item) for start, stop in pairwise(cuts)]
    return tuple(pieces)


def _count(text: str, digits: str) -> int:
    if not (digits.isascii() and digits.isdigit() and 0 < len(digits) <= 15 and int(digits)):
        raise _malformed(text, f"{digits!r} is no number of pieces of at least 1")
    return int(digits)


def _bytes(text: str, quantity: str) -> int:
    match = _QUANTITY.fullmatch(quantity)
    if match is None or not int(match[1]):
        raise _malformed(text, f"{quantity!r} is no whole number of at least 1 with a unit, one of {', '.join(_UNITS)}")
    if match[2] not in _UNITS:
        near = {unit.lower(): unit for unit in _UNITS}.get(match[2].lower())
        hint = f"did you mean {near!r}? " if near else ""
        raise _malformed(text, f"there is no unit {match[2]!r}; {hint}known: {', '.join(_UNITS)}")
    return int(match[1]) * _UNITS[match[2]]


def _malformed(text: str, why: str) -> UsageError:
    name = text.partition(":")[0]
    return UsageError(f"sharding {text!r}: {why}; write it as {_EXAMPLES[name]!r}")


def _require(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} must be at least 1, got {value}")
