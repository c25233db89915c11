"""Draws the pictures of docs/answers from the output that their pages show: NAME.svg, and NAME.es.svg in Spanish.

python docs/answers/images/draw.py [NAME ...]

`pictures.toml` says for each page which lines of its output are drawn, and how: so a picture has no figure of its own.
"""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
LANGUAGES = ("en", "es")
PANEL_WIDTH, PLOT_HEIGHT, ROW, BAR = 560, 240, 34, 18
LETTER = 7.4
"""Width of a letter of 13 px, on average."""

LIGHT = {
    "text": "#1b1f24",
    ".quiet": "#59626d",
    ".ground": "#ffffff",
    ".rule": "#dfe3e8",
    ".ideal": "#8b939c",
    ".cell": "#dfe8f3",
}
DARK = {
    "text": "#e6e8eb",
    ".quiet": "#9aa4af",
    ".ground": "#14181d",
    ".rule": "#2c333b",
    ".ideal": "#7d8791",
    ".cell": "#26384d",
}
LIGHT_SERIES = ("#2563a8", "#c2620c", "#1f7a4d", "#7a3fa0", "#a8325a", "#4b5563")
DARK_SERIES = ("#6aa9ee", "#f0a35a", "#5fc796", "#c39be3", "#ef88ab", "#aab2bd")
SERIES = len(LIGHT_SERIES)

Row = Mapping[str, str]
Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        rows: the named groups of each line of the output that is drawn.
        series: group of a value to the name that is shown.
    """

    kind: str
    title: str
    x: str
    rows: Sequence[Row]
    series: Mapping[str, str]
    options: Mapping[str, Any]


def style() -> str:
    """Returns the colours of both grounds: a reader's browser takes the dark ones if it is set so."""
    fixed = (
        'text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }\n'
        ".head { font-size: 15px; font-weight: 600 } .rule, .ideal, .line { fill: none } .line { stroke-width: 2.2 }\n"
        ".ideal { stroke-dasharray: 5 4 }\n"
    )
    return (
        f"{fixed}{_rules(LIGHT, LIGHT_SERIES)}@media (prefers-color-scheme: dark) {{\n{_rules(DARK, DARK_SERIES)}}}\n"
    )


def _rules(colours: Mapping[str, str], series: Sequence[str]) -> str:
    lines = [
        f"{name} {{ {'stroke' if name in ('.rule', '.ideal') else 'fill'}: {colour} }}"
        for name, colour in colours.items()
    ]
    lines += [f".s{index} {{ fill: {colour} }} .l{index} {{ stroke: {colour} }}" for index, colour in enumerate(series)]
    return "".join(f"{line}\n" for line in lines)


def output(page: Path) -> str:
    """Returns what the console blocks of a page show below their commands."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "".join(blocks)


def panels(name: str, language: str) -> list[Panel]:
    """Returns a picture's diagrams, in a language.

    Raises ValueError for one of which the page's output has no line.
    """
    text = output(HERE.parent / f"{name}.md")
    return [_panel(name, given, text, language) for given in _pictures()[name]["panels"]]


def _pictures() -> Mapping[str, Any]:
    return tomllib.loads((HERE / "pictures.toml").read_text(encoding="utf-8"))


def _panel(name: str, given: Mapping[str, Any], text: str, language: str) -> Panel:
    found = [match.groupdict() for match in re.finditer(given["rows"], text, re.MULTILINE)]
    if not found:
        raise ValueError(f"no line of what {name}.md shows matches {given['rows']!r}")
    words = given.get("words", {}) if language == "es" else {}

    def said(label: str) -> str:
        for word, translated in words.items():
            label = label.replace(word, translated)
        return label

    rows = [{key: said(value) if key in _WORDS else value for key, value in row.items()} for row in found]
    series = {group: said(label) for group, label in given.get("series", {"value": ""}).items()}
    return Panel(
        given["kind"], _in(given["title"], language), _in(given.get("x", ["", ""]), language), rows, series, given
    )


_WORDS = ("label", "text", "row", "column", "line")


def _in(both: Sequence[str], language: str) -> str:
    return both[LANGUAGES.index(language)]


def number(text: str) -> float:
    """Returns the number of a text, which may have commas between thousands."""
    return float(text.replace(",", ""))


def draw(name: str, language: str) -> str:
    """Returns a whole picture."""
    parts, top = [], 12.0
    for panel in panels(name, language):
        body, height = KINDS[panel.kind](panel)
        parts.append(f'<g transform="translate(0 {top:g})">{_text(16, 16, panel.title, "head")}{body}</g>')
        top += height
    title = escape(panels(name, language)[0].title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PANEL_WIDTH} {top:g}" width="{PANEL_WIDTH}" '
        f'height="{top:g}" role="img" xml:lang="{language}">\n<title>{title}</title>\n'
        f'<style>\n{style()}</style>\n<rect class="ground" width="{PANEL_WIDTH}" height="{top:g}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def ticks(top: float, most: int = 5) -> list[float]:
    """Returns round numbers from 0 to the first that is at least `top`, at most so many and one."""
    step = next(
        factor * 10.0**power
        for power in range(math.floor(math.log10(top)) - 1, 13)
        for factor in (1, 2, 5)
        if factor * 10.0**power * most >= top
    )
    return [index * step for index in range(math.ceil(top / step - 1e-9) + 1)]


def _legend(names: Sequence[str], y: float) -> Iterator[str]:
    x = 16.0
    for index, name in enumerate(names):
        yield f'<rect class="s{index % SERIES}" x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2"/>'
        yield _text(x + 18, y, name)
        x += 18 + LETTER * len(name) + 20


def _bars(panel: Panel) -> tuple[str, float]:
    """Rows of horizontal bars, one for each series, with their numbers as the page shows them."""
    groups = [group for group in panel.series if group in panel.rows[0]]
    named = len(groups) > 1
    most = max(number(row[group]) for row in panel.rows for group in groups)
    unit = f" {panel.options['unit']}" if "unit" in panel.options else ""
    left = 24 + LETTER * max(len(row["label"]) for row in panel.rows)
    digits = max(len(row[group]) for row in panel.rows for group in groups) + len(unit)
    room = PANEL_WIDTH - left - 24 - LETTER * digits
    y = 32.0
    parts = list(_legend([panel.series[group] for group in groups], y + 12)) if named else []
    y += 26 if named else 4
    for row in panel.rows:
        middle = y + BAR * len(groups) / 2
        parts.append(_text(left - 10, middle + 4.5, row["label"], anchor="end"))
        for index, group in enumerate(groups):
            length = max(1.5, room * number(row[group]) / most if most else 0.0)
            place = f'x="{left:.1f}" y="{y + 1:.1f}" width="{length:.1f}" height="{BAR - 3}"'
            parts.append(f'<rect class="s{index}" {place} rx="2"/>')
            parts.append(_text(left + length + 6, y + 13, row[group] + unit, "quiet"))
            y += BAR
        y += ROW - BAR - 4
    return "".join(parts), y + 12


def _curves(panel: Panel) -> Mapping[str, list[Point]]:
    """Points by the name of their line: of the group `line`, or of each series."""
    found: dict[str, list[Point]] = {}
    for row in panel.rows:
        for group, shown in panel.series.items():
            found.setdefault(row.get("line", shown), []).append((number(row["x"]), number(row[group])))
    return found


def _lines(panel: Panel) -> tuple[str, float]:
    """Curves over x, which is logarithmic where the options say so."""
    curves = _curves(panel)
    places = sorted({x for points in curves.values() for x, _ in points})
    marks = ticks(max(y for points in curves.values() for _, y in points))
    left, right, top = 30 + LETTER * max(len(f"{mark:,g}") for mark in marks), PANEL_WIDTH - 30, 62.0
    scale = math.log2 if panel.options.get("log_x") else float
    low, high = scale(places[0]) if panel.options.get("log_x") else 0.0, scale(places[-1])

    def at(x: float, y: float) -> Point:
        return left + (right - left) * (scale(x) - low) / (high - low), top + PLOT_HEIGHT * (1 - y / marks[-1])

    parts = list(_legend(list(curves), 44))
    for mark in marks:
        _, y = at(places[-1], mark)
        parts.append(
            f'<path class="rule" d="M{left:.1f} {y:.1f}H{right}"/>'
            + _text(left - 8, y + 4.5, f"{mark:,g}", "quiet", "end")
        )
    for place in places:
        parts.append(_text(at(place, 0)[0], top + PLOT_HEIGHT + 18, f"{place:,g}", "quiet", "middle"))
    if panel.options.get("ideal"):
        reach = min(places[-1], marks[-1])
        first, last = at(places[0], places[0]), at(reach, reach)
        parts.append(f'<path class="ideal" d="M{first[0]:.1f} {first[1]:.1f}L{last[0]:.1f} {last[1]:.1f}"/>')
    for index, points in enumerate(curves.values()):
        drawn = [at(x, y) for x, y in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
        parts.append(f'<path class="line l{index % SERIES}" d="M{path}"/>')
        parts += [f'<circle class="s{index % SERIES}" cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>' for x, y in drawn]
    parts.append(_text((left + right) / 2, top + PLOT_HEIGHT + 38, panel.x, "quiet", "middle"))
    return "".join(parts), top + PLOT_HEIGHT + 56


def _boxes(panel: Panel) -> tuple[str, float]:
    """A table of boxes: one row for each `row`, one column for each `column`, with a text in each."""
    rows = list(dict.fromkeys(row["row"] for row in panel.rows))
    columns = list(dict.fromkeys(row["column"] for row in panel.rows))
    left = 28 + LETTER * max(map(len, rows))
    width = (PANEL_WIDTH - left - 16) / len(columns)
    parts = [
        _text(left + width * (index + 0.5) - 4, 48, column, "quiet", "middle") for index, column in enumerate(columns)
    ]
    parts += [_text(left - 12, 84 + 54 * index, row, anchor="end") for index, row in enumerate(rows)]
    for row in panel.rows:
        x, y = left + width * columns.index(row["column"]), 58 + 54 * rows.index(row["row"])
        parts.append(f'<rect class="cell" x="{x:.1f}" y="{y}" width="{width - 8:.1f}" height="44" rx="6"/>')
        parts.append(_text(x + width / 2 - 4, y + 26, row["text"], anchor="middle"))
    return "".join(parts), 58 + 54 * len(rows) + 14


KINDS = {"bars": _bars, "lines": _lines, "boxes": _boxes}


def file_of(name: str, language: str) -> str:
    """Returns the name of a picture's file."""
    return f"{name}.svg" if language == "en" else f"{name}.{language}.svg"


def main(names: Sequence[str]) -> None:
    """Draws these pictures, or all."""
    for name in names or _pictures():
        for language in LANGUAGES:
            (HERE / file_of(name, language)).write_text(draw(name, language), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
