"""The state of a server's moves, with which its backup goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.parameter_server.core.row_moves import MovedRows, Moving, MovingRows, RowMap, RowMoves
from headrace.parameter_server.sparse.moves import ServedMoves, from_json, to_json

_STATE, _BLOCK = "moves/state", "moves/rows/"


@dataclass(frozen=True, slots=True)
class MovesState:
    """The state of `RowMoves`; everywhere, the number of the move comes first."""

    map: RowMap
    seen: int
    mover: int
    here: tuple[tuple[int, MovingRows], ...]
    aside: tuple[tuple[int, Moving], ...]
    kept: tuple[tuple[int, Moving], ...]


def machine_state(machine: RowMoves) -> MovesState:
    """Returns the whole state."""
    here = tuple(
        (each.since, MovingRows(each.rows, tuple(sorted(each.besides)), tuple(sorted(each.lack))))
        for each in machine.here
    )
    aside, kept = tuple(machine.aside.items()), tuple(machine.kept.items())
    return MovesState(machine.map, machine.seen, machine.mover, here, aside, kept)


def load_machine(machine: RowMoves, state: MovesState) -> None:
    """Takes over what `machine_state` returned."""
    machine.map, machine.seen, machine.mover = state.map, state.seen, state.mover
    machine.here = [MovedRows(each.rows, since, set(each.besides), set(each.lack)) for since, each in state.here]
    machine.aside, machine.kept = dict(state.aside), dict(state.kept)


def moves_state(moves: ServedMoves) -> dict[str, Tensor]:
    """Returns the state with the rows that are on their way, as tensors."""
    blobs = {_STATE: to_json(machine_state(moves.machine))}
    blobs |= {f"{_BLOCK}{number}": blob for number, blob in moves.blocks().items()}
    return {name: torch.frombuffer(bytearray(blob), dtype=torch.uint8) for name, blob in blobs.items()}


def load_moves(moves: ServedMoves, tensors: Mapping[str, Tensor]) -> None:
    """Takes over what `moves_state` returned; raises ValueError or KeyError if it is none."""
    state: MovesState = from_json(MovesState, tensors[_STATE].numpy().tobytes())
    load_machine(moves.machine, state)
    moves.load({number: tensors[f"{_BLOCK}{number}"].numpy().tobytes() for number, _ in (*state.aside, *state.kept)})
