"""The state of a server's moves, with which its backup goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.parameter_server.core.row_moves import Move, MovedRows, Moving, MovingRows, RowMap, RowMoves
from headrace.parameter_server.sparse.moves import ServedMoves, from_json, to_json

_STATE, _ASIDE = "moves/state", "moves/aside/"


@dataclass(frozen=True, slots=True)
class MovesState:
    """The state of `RowMoves`, and the workers whose pushes wait for a move, with their incarnations.

    Of the rows that were moved here, and of those that are kept aside, the number of their move comes first.
    """

    map: RowMap
    seen: int
    leaving: Move | None
    mover: int
    here: tuple[tuple[int, MovingRows], ...]
    aside: tuple[tuple[int, Moving], ...]
    held: tuple[tuple[int, int], ...]


def machine_state(machine: RowMoves, held: Mapping[int, int]) -> MovesState:
    """Returns the whole state; `held` are the incarnations of workers whose pushes wait."""
    here = tuple(
        (each.since, MovingRows(each.rows, tuple(sorted(each.besides)), tuple(sorted(each.lack))))
        for each in machine.here
    )
    aside, waiting = tuple(machine.aside.items()), tuple(held.items())
    return MovesState(machine.map, machine.seen, machine.leaving, machine.mover, here, aside, waiting)


def load_machine(machine: RowMoves, state: MovesState) -> None:
    """Takes over what `machine_state` returned."""
    machine.map, machine.seen, machine.leaving, machine.mover = state.map, state.seen, state.leaving, state.mover
    machine.here = [MovedRows(each.rows, since, set(each.besides), set(each.lack)) for since, each in state.here]
    machine.aside = dict(state.aside)


def moves_state(moves: ServedMoves, held: Mapping[int, int]) -> dict[str, Tensor]:
    """Returns the state with the rows that are kept aside, as tensors."""
    blobs = {_STATE: to_json(machine_state(moves.machine, held))}
    blobs |= {f"{_ASIDE}{number}": blob for number, blob in moves.kept_aside().items()}
    return {name: torch.frombuffer(bytearray(blob), dtype=torch.uint8) for name, blob in blobs.items()}


def load_moves(moves: ServedMoves, tensors: Mapping[str, Tensor]) -> dict[int, int]:
    """Takes over what `moves_state` returned, and returns `held`; raises ValueError or KeyError if it is none."""
    state: MovesState = from_json(MovesState, tensors[_STATE].numpy().tobytes())
    load_machine(moves.machine, state)
    moves.load({number: tensors[f"{_ASIDE}{number}"].numpy().tobytes() for number, _ in state.aside})
    return dict(state.held)
