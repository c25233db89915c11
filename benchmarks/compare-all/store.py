"""Cells in files, one line each, so that an interrupted command goes on where it was."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from cell import Asked, Cell, text_of
from table import ROWS, TUNING_SEED


def _key(cell: Cell | Asked) -> tuple[object, ...]:
    return cell.task, cell.row, cell.workers, cell.seed, f"{cell.rate:.6g}"


class Store:
    """The cells in the files of a folder, one file a task."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        read = [Cell(**json.loads(line)) for file in folder.glob("*.jsonl") for line in _whole_lines(file)]
        # Those of a strategy that has been changed in the table are trained again.
        current = (cell for cell in read if cell.row in ROWS and cell.text == text_of(cell.row, cell.workers))
        self._cells = {_key(cell): cell for cell in current}

    def has(self, asked: Asked) -> bool:
        return _key(asked) in self._cells

    def add(self, cell: Cell) -> None:
        self._cells[_key(cell)] = cell
        with (self._folder / f"{cell.task}.jsonl").open("a") as file:
            file.write(_line(cell))

    def sort(self) -> None:
        """Writes all files anew, in the order of the table and without what is no more in it."""
        names = list(ROWS)
        cells = sorted(
            self._cells.values(),
            key=lambda cell: (cell.task, names.index(cell.row), cell.workers, cell.seed, cell.rate),
        )
        for task in {cell.task for cell in cells}:
            text = "".join(_line(cell) for cell in cells if cell.task == task)
            (self._folder / f"{task}.jsonl").write_text(text)

    def best_rate(self, task: str, row: str) -> float | None:
        """Returns the tried learning rate with the least loss at the end; None where none was tried."""
        tried = [
            cell for cell in self._cells.values()
            if cell.task == task and cell.row == row and cell.seed == TUNING_SEED
        ]  # fmt: skip
        if not tried:
            return None
        return min(tried, key=lambda cell: (final_loss(cell), cell.rate)).rate

    def rates(self, task: str, row: str) -> list[float]:
        """Returns the learning rates that were tried."""
        return sorted(
            cell.rate for cell in self._cells.values()
            if cell.task == task and cell.row == row and cell.seed == TUNING_SEED
        )  # fmt: skip

    def cells(self, task: str, row: str, workers: int) -> list[Cell]:
        """Returns those of the reported seeds, with the row's learning rate, by seed."""
        rate = self.best_rate(task, row) or self.best_rate(task, "one device") or math.nan
        found = [
            cell
            for cell in self._cells.values()
            if (cell.task, cell.row, cell.workers) == (task, row, workers)
            and cell.seed != TUNING_SEED
            and math.isclose(cell.rate, rate, rel_tol=1e-5)
        ]
        return sorted(found, key=lambda cell: cell.seed)


def final_loss(cell: Cell) -> float:
    """Returns the loss at the end; infinite where there is none."""
    return cell.losses[-1] if cell.losses and math.isfinite(cell.losses[-1]) else math.inf


def _whole_lines(file: Path) -> list[str]:
    """Returns the lines of a file, and takes the end off that a killed command has left half written."""
    whole, _, rest = file.read_text().rpartition("\n")
    if rest:
        file.write_text(f"{whole}\n" if whole else "")
    return whole.splitlines()


def _line(cell: Cell) -> str:
    plain = {
        name: [round(each, 6) if isinstance(each, float) else each for each in value]
        if isinstance(value, list)
        else value
        for name, value in asdict(cell).items()
    }
    return json.dumps(plain) + "\n"
