"""One picture a task: the loss by examples, by seconds, by bytes, and at the end by workers. Light and dark."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from html import escape
from statistics import mean

from figures import ALONE, Axis, Figures
from table import DRAWN, DRAWN_WORKERS, ROWS, WORKERS

from headrace.report.drawing.curves import Curve, Point, draw_curves
from headrace.report.views.style import colour_sheet

AXES: tuple[tuple[str, Axis, bool], ...] = (
    ("examples", lambda cell: [float(each) for each in cell.examples], False),
    ("virtual seconds", lambda cell: cell.seconds, True),
    ("MB that a worker sends and receives", lambda cell: cell.megabytes, True),
)
WIDTH, LINE, MARGIN = 500, 22, 14


def picture(figures: Figures, task: str, title: str) -> str:
    """Returns the SVG of a task."""
    rows = [row for row in DRAWN if figures.trained(task, row, DRAWN_WORKERS)]
    colours = {row: f"series-{DRAWN.index(row)}" for row in rows}
    panels = [
        draw_curves(f"loss by {name}", _curves(figures, task, colours, axis), name, "loss", log_x=log)
        for name, axis, log in AXES
    ]
    panels.append(
        draw_curves("loss by workers", _ends(figures, task, colours), "workers", "loss at the end", log_x=True)
    )
    return _page(f"{title}, {DRAWN_WORKERS} workers", panels, colours)


def _curves(figures: Figures, task: str, colours: dict[str, str], axis: Axis) -> list[Curve]:
    """Means over the seeds; bars from the least to the greatest loss."""
    made = []
    for row, colour in colours.items():
        by_place: dict[int, list[Point]] = defaultdict(list)
        for cell in figures.trained(task, row, DRAWN_WORKERS):
            for place, point in enumerate(zip(axis(cell), cell.losses, strict=bool(axis(cell)))):
                by_place[place].append(point)
        points, bars = [], []
        for own in by_place.values():
            x, losses = mean(each[0] for each in own), [each[1] for each in own]
            points.append((x, mean(losses)))
            bars.append((x, min(losses), max(losses)))
        if points and max(x for x, _ in points) > 0:
            made.append(Curve(points, colour, dots=True, name=row, bars=bars))
    return made


def _ends(figures: Figures, task: str, colours: dict[str, str]) -> list[Curve]:
    made = []
    for row, colour in colours.items():
        counts = WORKERS if row == ALONE else ROWS[row].workers
        known = [count for count in counts if math.isfinite(figures.loss(task, row, count))]
        points = [(float(count), figures.loss(task, row, count)) for count in known]
        bars = [(float(count), *figures.band(task, row, count)) for count in known]
        made.append(Curve(points, colour, (5, 2) if row == ALONE else (), dots=True, name=row, bars=bars))
    return made


def _page(title: str, panels: list[str], colours: dict[str, str]) -> str:
    heights = [float(found[1]) for panel in panels if (found := re.search(r'viewBox="0 0 \S+ ([\d.]+)"', panel))]
    tall, wide = max(heights) + MARGIN, WIDTH + 2 * MARGIN
    legend_rows = -(-len(colours) // 4)
    top = 34 + LINE * legend_rows
    height = top + 2 * tall + MARGIN
    parts = [f'<text x="{MARGIN}" y="24" class="head">{escape(title)}</text>']
    for number, (row, colour) in enumerate(colours.items()):
        x, y = MARGIN + number % 4 * wide // 2, 34 + LINE * (number // 4) + 12
        parts.append(f'<rect x="{x}" y="{y - 8}" width="20" height="5" style="fill: var(--{colour})"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(row)}</text>')
    for number, (panel, own) in enumerate(zip(panels, heights, strict=True)):
        x, y = MARGIN + number % 2 * wide, top + number // 2 * tall
        parts.append(panel.replace("<svg ", f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{own:g}" ', 1))
    sheet = colour_sheet("svg") + "text { font: 12.5px system-ui, sans-serif; fill: var(--ink) }\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * wide} {height:g}" width="{2 * wide}" '
        f'height="{height:g}" role="img">\n<title>{escape(title)}</title>\n<style>\n{sheet}'
        ".head { font-size: 16px; font-weight: 600 }\n</style>\n"
        f'<rect width="{2 * wide}" height="{height:g}" rx="8" style="fill: var(--paper)"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
