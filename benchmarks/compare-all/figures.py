"""Numbers of the stored cells: what tables, pictures and sentences say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean

from cell import Cell
from store import Store, final_loss
from table import ROWS, WORKERS

ALONE = "one device"
TARGET_PART = 0.6
"""Of one device's examples: what its loss is there, on average, is the target of a task."""

Axis = Callable[[Cell], Sequence[float]]


class Figures:
    """Numbers over the seeds of a row."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def cells(self, task: str, row: str, workers: int) -> list[Cell]:
        return self._store.cells(task, row, min(workers, max(ROWS[row].workers)))

    def trained(self, task: str, row: str, workers: int) -> list[Cell]:
        """Returns the cells that have been trained to the end."""
        return [cell for cell in self.cells(task, row, workers) if math.isfinite(final_loss(cell))]

    def loss(self, task: str, row: str, workers: int) -> float:
        """Returns the mean of the loss at the end; infinite if a seed has none."""
        return mean(list(map(final_loss, self.cells(task, row, workers))) or [math.inf])

    def band(self, task: str, row: str, workers: int) -> tuple[float, float]:
        """Returns the least and the greatest loss at the end."""
        losses = list(map(final_loss, self.cells(task, row, workers)))
        return min(losses), max(losses)

    def gap(self, task: str, row: str, workers: int) -> float:
        """Returns how much greater the loss is than that of one device with the same seeds."""
        alone = {cell.seed: final_loss(cell) for cell in self.cells(task, ALONE, 1)}
        own = self.cells(task, row, workers)
        return mean(final_loss(cell) - alone[cell.seed] for cell in own)

    def farthest(self, task: str, row: str) -> float:
        """Returns the largest difference of a loss from one device's, at any evaluation and number of workers."""
        alone = {cell.seed: cell.losses for cell in self.cells(task, ALONE, 1)}
        every = [cell for workers in ROWS[row].workers for cell in self.trained(task, row, workers)]
        return max(abs(a - b) for cell in every for a, b in zip(cell.losses, alone[cell.seed], strict=True))

    def accuracy(self, task: str, row: str, workers: int) -> float:
        """Returns the mean at the end, per cent."""
        return 100 * mean(cell.accuracies[-1] for cell in self.trained(task, row, workers))

    def seconds(self, task: str, row: str, workers: int) -> float:
        """Returns what the run takes, virtual seconds; NaN where that is not known."""
        return mean([cell.seconds[-1] if cell.seconds else math.nan for cell in self.trained(task, row, workers)])

    def mb(self, task: str, row: str, workers: int) -> float:
        """Returns what a worker sends and receives in the run."""
        return mean(cell.megabytes[-1] for cell in self.trained(task, row, workers))

    def target(self, task: str) -> float:
        """Returns the loss that counts as reached."""
        alone = self.cells(task, ALONE, 1)
        return mean(_at(cell.examples, cell.losses, TARGET_PART * cell.examples[-1]) for cell in alone)

    def reaches(self, task: str, row: str, workers: int, axis: Axis) -> float:
        """Returns the mean over the seeds of where the loss gets to the target; NaN if one does not."""
        cells, target = self.cells(task, row, workers), self.target(task)
        found = [_reached(axis(cell), cell.losses, target) for cell in cells]
        return mean(found) if found and None not in found else math.nan  # type: ignore[type-var]

    def rate(self, task: str, row: str) -> tuple[float, bool]:
        """Returns the chosen learning rate, and whether it is at an end of those that were tried."""
        tried = self.tried(task, row)
        best = self._store.best_rate(task, row)
        assert best is not None
        return best, len(tried) > 1 and best in (tried[0], tried[-1])

    def tried(self, task: str, row: str) -> list[float]:
        """Returns the learning rates that were tried."""
        return self._store.rates(task, row)

    def is_tuned(self, task: str, row: str) -> bool:
        return bool(self.tried(task, row))

    def refusal(self, task: str, row: str) -> Cell | None:
        """Returns a cell that was refused or has diverged with every number of workers; None where some was trained."""
        every = [cell for workers in WORKERS for cell in self._store.cells(task, row, workers)]
        return every[-1] if every and not any(cell.losses for cell in every) else None


def _at(places: Sequence[float], values: Sequence[float], where: float) -> float:
    for (x, y), (next_x, next_y) in pairwise(zip(places, values, strict=True)):
        if x <= where <= next_x:
            return y + (next_y - y) * (where - x) / (next_x - x)
    return values[0]


def _reached(places: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Returns where the loss gets to the target, on the line between two evaluations; None if it does not."""
    if not places:
        return None
    if losses and losses[0] <= target:
        return places[0]
    for (x, y), (next_x, next_y) in pairwise(zip(places, losses, strict=True)):
        if next_y <= target:
            return x + (next_x - x) * (y - target) / (y - next_y)
    return None
