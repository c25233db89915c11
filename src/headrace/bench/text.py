"""Figures of a machine as tables of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from headrace.bench.figures import PARTS, MachineFigures
from headrace.bench.saving import disturbance, shown_facts
from headrace.report.format import clean, short

_WIDTH, _CELL = 80, 11
_UNSTEADY = 0.2


def lines(here: MachineFigures, answer: str, beside: MachineFigures | None = None) -> Iterator[str]:
    """Yields the tables of the parts, those of `beside` below, why cells are empty, and the answer."""
    # Each is cleaned: a file of another machine may hold any text.
    return map(clean, _lines(here, answer, beside))


def _lines(here: MachineFigures, answer: str, beside: MachineFigures | None) -> Iterator[str]:
    yield from textwrap.wrap("; ".join(f"{name} {value}" for name, value in shown_facts(here)), _WIDTH)
    yield from textwrap.wrap(disturbance(here), _WIDTH)
    for part in here.parts():
        yield from ("", PARTS[part], *_part(here, part))
        if beside and beside.rows(part):
            yield from ("", f"Beside: {beside.name}", *_part(beside, part))
    yield ""
    if any(figure.spread > _UNSTEADY for figure in here.figures):
        yield f"~ varies by more than {_UNSTEADY:.0%} between repetitions"
    if beside and beside.source:
        yield from textwrap.wrap(f"{beside.name}: {beside.source}", _WIDTH)
    yield from textwrap.wrap(answer, _WIDTH)


def _part(machine: MachineFigures, part: str) -> Iterator[str]:
    rows = machine.rows(part)
    shown = [column for column in machine.columns(part) if any(machine.at(part, row, column) for row in rows)]
    label = max((len(row) for row in rows), default=0) + 9
    fitting = max(1, (_WIDTH - label) // _CELL)
    for begin in range(0, len(shown), fitting):
        yield from _table(machine, part, rows, shown[begin : begin + fitting], label)
    for why in dict.fromkeys(gap.why for gap in machine.gaps if gap.part == part):
        where = dict.fromkeys(gap.row or gap.column for gap in machine.gaps if (gap.part, gap.why) == (part, why))
        yield from textwrap.wrap(f"{'; '.join(where)}: {why}", _WIDTH, subsequent_indent="  ")


def _table(machine: MachineFigures, part: str, rows: Sequence[str], shown: Sequence[str], label: int) -> Iterator[str]:
    heads = [textwrap.wrap(column, _CELL - 1, break_on_hyphens=False) for column in shown]
    depth = max(len(head) for head in heads)
    for line in range(depth):
        cells = [([""] * (depth - len(head)) + head)[line] for head in heads]
        yield (" " * label + "".join(f"{cell:>{_CELL}}" for cell in cells)).rstrip()
    for row in rows:
        figures = [machine.at(part, row, column) for column in shown]
        units = {figure.unit for figure in figures if figure}
        if units:
            cells = [f"{short(one.value)}{'~' * (one.spread > _UNSTEADY)}" if one else "" for one in figures]
            yield (f"{row} {units.pop()}".ljust(label) + "".join(f"{cell:>{_CELL}}" for cell in cells)).rstrip()
