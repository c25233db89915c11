"""README.md of `text.md`, whose {figures} are those of the stored cells; all tables; the pictures."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from cell import text_of
from figures import Figures
from pictures import AXES, picture
from store import Store
from table import ELSEWHERE, RATE_STEP, ROWS, WORKERS, rows_of
from tasks import TASKS

MOST = max(WORKERS)
DRAWN_TASKS = [task for task in TASKS if task != "mixture"]


def write(folder: Path, store: Store) -> None:
    """Writes README.md, tables.md and a picture for each task."""
    figures, results = Figures(store), folder / "results"
    for task in TASKS:
        if task in DRAWN_TASKS and figures.trained(task, "one device", 1):
            (results / f"{task}.svg").write_text(picture(figures, task, TASKS[task].title))
    (folder / "README.md").write_text(filled((folder / "text.md").read_text(), figures, results))
    (folder / "tables.md").write_text(tables(figures))


def filled(text: str, figures: Figures, results: Path) -> str:
    """Returns a text with the figures that its {name: task / row / workers} ask for."""
    about = json.loads((results / "about.json").read_text())
    simulated = {
        (each["task"], each["row"], str(each["workers"])): each
        for each in json.loads((results / "simulated.json").read_text())
    }

    def figure(match: re.Match[str]) -> str:
        name, given = match[1], match[2].split(" / ") if match[2] else []
        if name in about:
            return f"{about[name]:.2f}" if isinstance(about[name], float) else str(about[name])
        if name in SIMULATED:
            return _number(simulated[tuple(given)][name], 2)
        return SAID[name](figures, *given)

    return re.sub(r"\{(\w+)(?:: ([^}]+))?\}", figure, text)


def _number(value: float, digits: int = 3) -> str:
    """Returns a number with so many digits that count, without an exponent; a dash for none."""
    if not math.isfinite(value):
        return "–"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - whole)}f}" if value else "0"


def _of(method: Callable[..., float], form: Callable[[float], str]) -> Callable[..., str]:
    """Returns what writes a number of a task, a row and a number of workers."""
    return lambda figures, task, row, workers: form(method(figures, task, row, int(workers)))


def _plain(words: str) -> str:
    """Returns words in one line that a table can have."""
    return " ".join(words.split()).replace("|", "\\|")


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _ratio(name: str) -> Callable[..., str]:
    def ratio(figures: Figures, task: str, row: str, other: str, workers: str) -> str:
        own, theirs = (getattr(figures, name)(task, each, int(workers)) for each in (row, other))
        return _number(own / theirs, 2)

    return ratio


def short_table(figures: Figures, task: str) -> str:
    """Returns the rows of a task with the most workers."""
    if not figures.trained(task, "one device", 1):
        return "Not trained yet."
    target = figures.target(task)
    right = "accuracy" if TASKS[task].classifies else "next character"
    lines = [
        f"| {MOST} workers | loss | {right}, % | seconds | MB a worker "
        f"| examples, seconds, MB to a loss of {target:.3f} |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for row in rows_of(task):
        cells = figures.trained(task, row, MOST)
        if not cells:
            continue
        first, *_ = cells
        mark = "*" * (first.kind == "trained") + "†" * (first.one_host and first.workers > 1)
        mark += "‡" * bool(first.no_seconds)
        least, most = figures.band(task, row, MOST)
        between = f" ({_loss(least)} to {_loss(most)})" if len(figures.cells(task, row, MOST)) > 1 else " ="
        loss = f"{_loss(figures.loss(task, row, MOST))}{between}"
        reached = ", ".join(_number(figures.reaches(task, row, MOST, axis)) for _, axis, _ in AXES)
        lines.append(
            f"| {row}{mark} | {loss} | {figures.accuracy(task, row, MOST):.1f} | "
            f"{_number(figures.seconds(task, row, MOST))} | {_number(figures.mb(task, row, MOST))} | {reached} |"
        )
    if task in DRAWN_TASKS:
        lines.append(f"\n![{TASKS[task].title}: loss by examples, seconds, bytes and workers](results/{task}.svg)")
    return "\n".join(lines)


def tables(figures: Figures) -> str:
    """Returns the page with all numbers of workers, learning rates and refusals."""
    parts = [
        "# All cells\n\nWritten by `main.py` of [results](results); what the columns are is in the [text](README.md)."
    ]
    for task in TASKS:
        parts.append(f"## {TASKS[task].title}\n\n{_by_workers(figures, task)}")
    lines = [f"| {task} | {row} | {cell.kind} | {_plain(cell.why)} |"
             for task in TASKS for row in rows_of(task) if (cell := figures.refusal(task, row))]  # fmt: skip
    parts.append("\n".join(["## Without a cell\n", "| task | strategy | | why |", "|---|---|---|---|", *lines]))
    parts.append("\n".join(f"- `{name}`: {why}." for name, why in ELSEWHERE.items()))
    return "\n\n".join(parts) + "\n"


def _by_workers(figures: Figures, task: str) -> str:
    heads = "".join(f" loss, {count} | seconds | MB |" for count in WORKERS)
    lines = [f"| strategy | what it is | | learning rate |{heads}", "|---|---|---|--:|" + "--:|" * 3 * len(WORKERS)]
    for row in rows_of(task):
        if (
            figures.refusal(task, row)
            or not figures.trained(task, "one device", 1)
            or not any(figures.cells(task, row, count) for count in ROWS[row].workers)
        ):
            continue
        rate, at_end = figures.rate(task, row if figures.is_tuned(task, row) else "one device")
        columns = []
        for count in WORKERS:
            cells = figures.cells(task, row, count) if count in ROWS[row].workers else []
            if not any(cell.losses for cell in cells):
                columns += [cells[0].kind if cells else "", "", ""]
                continue
            columns += [
                _loss(figures.loss(task, row, count)),
                _number(figures.seconds(task, row, count)),
                _number(figures.mb(task, row, count)),
            ]
        text = text_of(row, MOST).replace("|", "\\|")
        tried = f"{rate:.3g} ({'end' if at_end else 'middle'})" if figures.is_tuned(task, row) else f"{rate:.3g}"
        tried = "line search" if ROWS[row].job == "lbfgs" else tried
        lines.append(f"| {row} | {ROWS[row].idea} | `{text}` | {tried} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _tasks(_: Figures) -> str:
    """Returns the rows of the table of tasks."""
    lines = []
    for task in TASKS.values():
        size = sum(each.numel() for each in task.model().parameters())
        maker = task.optimizer.func if isinstance(task.optimizer, functools.partial) else task.optimizer
        options = dict(task.optimizer.keywords) if isinstance(task.optimizer, functools.partial) else {}
        optimizer = ", ".join([maker.__name__, *(f"{name} {value}" for name, value in options.items())])
        rates = ", ".join(f"{task.rate * RATE_STEP**place:.2g}" for place in (-1, 0, 1))
        lines.append(f"| {task.title} | {size:,} parameters | {task.batch}, {task.rounds} | {optimizer} | {rates} |")
    return "\n".join(lines)


def _count(figures: Figures, kind: str) -> str:
    """Returns how many rows of the three tasks have a rate at an end of those tried, and of how many."""
    tuned = [(task, row) for task in TASKS for row in rows_of(task) if len(figures.tried(task, row)) > 1]
    ends = [each for each in tuned if figures.rate(*each)[1]]
    return str(len(ends) if kind == "ends" else len(tuned))


SIMULATED = ("efficiency", "slow_network", "staleness", "slow_steps")

SAID: Mapping[str, Callable[..., str]] = {
    "loss": _of(Figures.loss, _loss),
    "gap": _of(Figures.gap, lambda value: f"{value:+.3f}"),
    "accuracy": _of(Figures.accuracy, lambda value: f"{value:.1f}"),
    "seconds": _of(Figures.seconds, _number),
    "mb": _of(Figures.mb, _number),
    "band": lambda figures, task, row, workers: " to ".join(map(_loss, figures.band(task, row, int(workers)))),
    "farthest": lambda figures, task, row: f"{figures.farthest(task, row):.1g}",
    "target": lambda figures, task: _loss(figures.target(task)),
    "less_mb": _ratio("mb"),
    "less_seconds": _ratio("seconds"),
    "table": short_table,
    "rates": _count,
    "tasks": _tasks,
}
"""What a text may ask for."""
