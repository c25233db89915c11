"""Figures of a machine as one page, with bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.bench.figures import PARTS, Figure, MachineFigures, is_time
from headrace.bench.saving import IDLE_SHARE, disturbance, shown_facts
from headrace.report.drawing.rows import Bar, draw_bars
from headrace.report.format import MISSING, percent, short
from headrace.report.views.document import (
    definitions,
    figures,
    html_text,
    notices,
    page_header,
    scrolled_table,
    table_row,
    write_document,
)
from headrace.report.views.style import PARTS as COLOURS
from headrace.report.views.style import Picture

_MOST_BARS = 14
_BY_KIND = ("matrix", "memory")
"""Parts whose rows begin with a kind, and are drawn together if it is the same."""
_HOW = {
    "A number": (
        "The median of repetitions for some time, at least two, after one that does not count. Spread: the distance "
        "between the quartiles over the median."
    ),
    "Other programs": (
        "From /proc/stat: the processors' time while numbers were measured, less what headrace and its own processes "
        f"took. A part of which others had more than {percent(IDLE_SHARE)} is named at the top."
    ),
    "Matrix product": "For two square matrices of side n, 2 n\N{SUPERSCRIPT THREE} operations; no memory is allocated.",
    "Memory": "Bytes read plus bytes written: a copy of 256 MB moves 512 MB.",
    "Storage": (
        "Read from Python, as an input pipeline reads. Disk: after the page cache let go of the files; the host of a "
        "virtual machine may still have them in its memory."
    ),
    "Networks": (
        "torchvision's, random weights, synthetic images. Inference is in eval mode; training is forward, "
        "cross-entropy and backward, without the optimizer's update. torch's defaults on a GPU: TF32 in convolutions."
    ),
}


def write_page(path: Path, here: MachineFigures, answer: str, beside: MachineFigures | None = None) -> None:
    """Writes the page; makes its directory."""
    head = page_header("headrace bench", f"What {here.name} gives", answer, shown_facts(here))
    disturbed = disturbance(here)
    if disturbed:
        head += f'\n<section class="alert"><p>{html_text(disturbed)}</p></section>'
    how = f"<section>\n<h2>How the numbers are made</h2>\n{definitions('how', _HOW.items())}\n</section>"
    body = [head, *(section for part in here.parts() for section in _part(here, beside, part)), how]
    write_document(path, f"what {here.name} gives", body)


def _part(here: MachineFigures, beside: MachineFigures | None, part: str) -> Iterator[str]:
    yield f"<section>\n<h2>{html_text(PARTS[part])}</h2>"
    if here.rows(part):
        yield _table(here, part)
    gaps = dict.fromkeys(
        f"{gap.row or gap.column}: {gap.why}" for gap in here.gaps if gap.part == part and (gap.row or gap.why)
    )
    if gaps:
        yield notices(gaps)
    if beside and beside.rows(part):
        yield f"<h3>Beside: {html_text(beside.name)}</h3>\n{_table(beside, part)}"
        yield f'<p class="quiet">{html_text(beside.source)}</p>'
    yield "</section>"
    drawn = [_picture(part, rows, machines) for rows, machines in _groups(here, beside, part)]
    if drawn:
        yield figures(f"{PARTS[part]}: bars", ((picture, "") for picture in drawn))


def _table(machine: MachineFigures, part: str) -> str:
    columns = machine.columns(part)
    rows = []
    for row in machine.rows(part):
        figures = [machine.at(part, row, column) for column in columns]
        unit = next((figure.unit for figure in figures if figure), "")
        cells = [MISSING if figure is None else html_text(_cell(figure)) for figure in figures]
        rows.append(table_row(html_text(f"{row} [{unit}]" if unit else row), cells))
    return scrolled_table(columns, rows, "")


def _cell(figure: Figure) -> str:
    return f"{short(figure.value)} ± {percent(figure.spread / 2)}" if figure.spread else short(figure.value)


def _title(part: str, row: str) -> str:
    """Returns the picture that a row is in: one of its own, or that of its kind, its first word."""
    return row.partition(", ")[0] if part in _BY_KIND else row


def _groups(
    here: MachineFigures, beside: MachineFigures | None, part: str
) -> Iterator[tuple[Sequence[Figure], Sequence[bool]]]:
    """Yields what is drawn in one picture, and which of it was measured here."""
    machines = [machine for machine in (here, beside) if machine]
    titles = dict.fromkeys((_title(part, figure.row), figure.unit) for figure in here.figures if figure.part == part)
    for title, unit in titles:
        bars = [
            (figure, machine is here)
            for machine in machines
            for figure in machine.figures
            if figure.part == part and figure.unit == unit and _title(part, figure.row) == title
        ]
        for begin in range(0, len(bars), _MOST_BARS):
            chosen = bars[begin : begin + _MOST_BARS]
            yield [figure for figure, _ in chosen], [is_own for _, is_own in chosen]


def _picture(part: str, rows: Sequence[Figure], ours: Sequence[bool]) -> Picture:
    unit, name = rows[0].unit, _title(part, rows[0].row)
    bars = [
        Bar(
            figure.row.partition(", ")[2] + f": {figure.column}" if part in _BY_KIND else figure.column,
            f"{short(figure.value)} {unit}",
            [(figure.value, COLOURS["compute_s" if is_own else "exchange_s"])],
        )
        for figure, is_own in zip(rows, ours, strict=True)
    ]
    title = f"{name}, {unit}"
    reading = "Shorter is better." if is_time(unit) else "Longer is better."
    if not all(ours):
        reading += " The other colour: published, or of another machine."
    return Picture(title, draw_bars(f"{part} {title} {rows[0].row} {rows[0].column}", bars, unit), reading)
