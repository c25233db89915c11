"""The tables of one server, and the optimizer over their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.parameter_server.sparse.messages import Rows
from headrace.parameter_server.sparse.placement import RowPlaces
from headrace.spec.embedding import TableSpec
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.training.embeddings.pieces import RowBlock
from headrace.training.embeddings.updater import RowUpdater

_EXACTLY = 1e-6
"""Tolerance of the sum of a round's shares."""


@dataclass(frozen=True, slots=True)
class TablesState:
    """The state besides rows, as JSON values; `settings` as JSON text."""

    round: int
    done: float
    steps: tuple[int, ...]
    settings: str


class ServedTables:
    """Updates the rows that this server has; a row comes into being with its first gradient.

    Args:
        factory: the job's optimizer.
        rounds: per epoch, and the first round.
        full: whether a step is applied with the whole learning rate, not with its share of it.
        divide: whether the learning rate is divided by the staleness.

    `moving` is the server's index and where rows are, if they may move to other servers.
    """

    def __init__(
        self,
        model: ModelSpec,
        factory: Callable[..., Any],
        options: Options,
        rounds: tuple[int, int],
        full: bool = False,
        divide: bool = False,
    ) -> None:
        self.specs: Sequence[TableSpec] = model.tables
        self._updater = RowUpdater(factory, model, options, rounds[0])
        self.tables = [self._updater.table(spec) for spec in model.tables]
        self._round, self._done = rounds[1], float(rounds[1])
        self._full, self._divide = full, divide
        self.moving: tuple[int, RowPlaces] | None = None

    def apply(self, rows: Mapping[int, Rows], share: float, staleness: int, steps: int = 1) -> None:
        """Applies one step, of which `rows` are the gradients by table; the numbers are those of a `ShardOptimizer`."""
        factor = 1.0 if self._full else share
        if self._divide and staleness > 1:
            factor /= staleness
        for number, table in enumerate(self.tables):
            if table.spec.trainable:
                ids, gradient = rows.get(number) or (torch.empty(0, dtype=torch.int64), torch.empty(0))
                self._updater.apply(table, ids, gradient, self._round, factor)
        self._done += share * steps
        self._advance(int(self._done + _EXACTLY))

    def add(self, rows: Mapping[int, Rows], share: float) -> None:
        """Updates more rows by a step that was applied before."""
        for number, (ids, gradient) in rows.items():
            table = self.tables[number]
            if table.spec.trainable and len(ids):
                # It is the same step of the table.
                table.steps -= 1
                self._updater.apply(table, ids, gradient, self._round, 1.0 if self._full else share)

    def settle(self, done: int) -> None:
        """Sets the number of rounds done, with those whose gradients were refused."""
        self._done = float(done)
        self._advance(done)

    def clear(self) -> None:
        """Makes all rows what they began with."""
        for table in self.tables:
            table.clear()

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of the rows that are here, and of their optimizer's state."""
        values = sum(len(table) * table.spec.row_bytes for table in self.tables)
        return values, sum(table.nbytes for table in self.tables) - values

    def settings(self) -> dict[str, Any]:
        """Returns groups and schedule as JSON values."""
        return self._updater.settings()

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Loads what `settings` returned."""
        self._updater.load(settings)

    def state(self) -> tuple[TablesState, dict[str, Tensor]]:
        """Returns the whole state; tensors are copies."""
        tensors: dict[str, Tensor] = {}
        for number, table in enumerate(self.tables):
            block = table.block(0, len(table))
            tensors |= {f"table/{number}/ids": block.ids, f"table/{number}/values": block.values}
            tensors |= {f"table/{number}/state/{key}": value for key, value in block.state.items()}
            if block.uses is not None:
                tensors[f"table/{number}/uses"] = block.uses
        steps = tuple(table.steps for table in self.tables)
        return TablesState(self._round, self._done, steps, json.dumps(self.settings())), tensors

    def load(self, state: TablesState, tensors: Mapping[str, Tensor]) -> None:
        """Takes over a whole state; raises ValueError or KeyError if it is of other tables."""
        if len(state.steps) != len(self.tables):
            raise ValueError(f"the state is of {len(state.steps)} tables, and {len(self.tables)} are here")
        self.clear()
        self.load_settings(json.loads(state.settings))
        for number, table in enumerate(self.tables):
            front = f"table/{number}/state/"
            slots = {name.removeprefix(front): value for name, value in tensors.items() if name.startswith(front)}
            ids, values, uses = (tensors.get(f"table/{number}/{name}") for name in ("ids", "values", "uses"))
            if ids is None or values is None:
                raise KeyError(f"the rows of table {number}")
            table.load(RowBlock(ids, values, slots, state.steps[number], uses))
        self._round, self._done = state.round, state.done

    def _advance(self, done: int) -> None:
        while self._round < done:
            self._updater.advance(self._round)
            self._round += 1
