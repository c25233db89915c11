"""Rows in blocks, and as pieces of a checkpoint, which any strategy and any number of servers can load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.training.optimizer import StatePiece

_IDS, _VALUES, _STEPS, _STATE = "headrace.row_ids", "headrace.row_values", "headrace.row_steps", "headrace.row_state."
_USES = "headrace.row_uses"

CHUNK_BYTES = 4 << 20
"""Rows are copied and sent in blocks of about this size."""


@dataclass(frozen=True)
class RowBlock:
    """Rows with their state.

    Attributes:
        ids: `(rows,)` int64.
        values: `(rows, width)`.
        state: by key, `(rows, width)` or `(rows, 1)`.
        steps: of the table so far.
        uses: `(rows, 2)` int64 of a table with a limit, see `eviction`; else None.
    """

    ids: Tensor
    values: Tensor
    state: Mapping[str, Tensor]
    steps: int = 0
    uses: Tensor | None = None


def chunks(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the intervals [start, stop) that `count` rows are sent in."""
    most = max(1, CHUNK_BYTES // max(1, row_bytes))
    yield from ((start, min(start + most, count)) for start in range(0, count, most))


def to_pieces(table: str, number: int, block: RowBlock) -> list[StatePiece]:
    """Returns a block of a table's rows as pieces; blocks of one table have different numbers."""
    pieces = [
        StatePiece(table, _IDS, number, block.ids),
        StatePiece(table, _VALUES, number, block.values),
        StatePiece(table, _STEPS, number, torch.tensor(block.steps)),
    ]
    if block.uses is not None:
        pieces.append(StatePiece(table, _USES, number, block.uses))
    return pieces + [StatePiece(table, f"{_STATE}{key}", number, value) for key, value in block.state.items()]


def is_row_piece(piece: StatePiece) -> bool:
    """Tells whether a piece is of a table's rows."""
    return piece.key.startswith("headrace.row_")


def is_row_value(piece: StatePiece) -> bool:
    """Tells whether a piece is of the rows themselves, and not of their optimizer's state."""
    return piece.key in (_IDS, _VALUES)


def blocks_of(pieces: Iterable[StatePiece], table: str) -> Iterator[RowBlock]:
    """Yields the blocks of a table's rows; raises KeyError if a piece of a block is missing."""
    found: dict[int, dict[str, StatePiece]] = {}
    for piece in pieces:
        if piece.parameter == table and is_row_piece(piece):
            found.setdefault(piece.start, {})[piece.key] = piece
    for own in found.values():
        state = {key.removeprefix(_STATE): piece.value for key, piece in own.items() if key.startswith(_STATE)}
        steps = int(own[_STEPS].value) if _STEPS in own else 0
        uses = own[_USES].value if _USES in own else None
        yield RowBlock(own[_IDS].value, own[_VALUES].value, state, steps, uses)
