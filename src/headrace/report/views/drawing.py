"""Curves and bars as SVG text that a page takes in: drawn by matplotlib, coloured by the page's style sheet."""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from headrace.report.format import clean, fixed, tick
from headrace.report.views.style import GRID, INK, PAPER, QUIET, STAND_INS

if TYPE_CHECKING:
    # matplotlib takes half a second to import.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN = 5.0
_INCH = 72.0
_ROW_IN = 0.44
_HISTOGRAM_IN = 0.6
_LANE_IN = 0.26
_MOST_COLUMNS = 48
_LABEL_LETTERS = 36
_SALT = "headrace"
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": _SALT,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "path.simplify": False,
}


_VARIABLES = {stand_in: f"var(--{name})" for stand_in, name in STAND_INS.items()}


@dataclass(frozen=True)
class Curve:
    """A line through (x, y) points.

    `colour` is a placeholder of `style`; `width` is in points; `faint` are the points before smoothing, drawn faintly.
    """

    points: Sequence[tuple[float, float]]
    colour: str
    dashes: Sequence[float] = ()
    width: float = 1.6
    faint: Sequence[tuple[float, float]] = ()
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A short vertical line at `value` of one bar; `dashes`, in points, tell kinds apart."""

    value: float
    dashes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of (length, colour) parts, a label and a note; `inside` writes the lengths into long parts."""

    label: str
    note: str
    parts: Sequence[tuple[float, str]]
    marks: Sequence[Mark] = ()
    inside: bool = False


@dataclass(frozen=True)
class Histogram:
    """Columns over whole numbers of at least 0, with a label, a note and a line at `mean`."""

    label: str
    note: str
    counts: Mapping[int, int]
    mean: float
    colour: str


@dataclass(frozen=True)
class Lane:
    """What one rank did over time: `pieces` are (begin, length, colour, text inside)."""

    label: str
    pieces: Sequence[tuple[float, float, str, str]]


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    log: bool = False,
    whole_x: bool = False,
    from_zero: bool = False,
    log_x: bool = False,
) -> str:
    """Returns at least one curve as one SVG element; `log` and `from_zero` are about the vertical axis."""

    def draw(figure: Figure) -> Axes:
        axes = figure.add_axes((0.115, 0.155, 0.865, 0.785))
        _style(axes)
        for curve in curves:
            if curve.faint:
                axes.plot(*zip(*curve.faint, strict=True), color=curve.colour, linewidth=0.7, alpha=0.28)
            (line,) = axes.plot(*zip(*curve.points, strict=True), color=curve.colour, linewidth=curve.width)
            line.set_solid_capstyle("round")
            if curve.dashes:
                line.set_dashes(list(curve.dashes))
            if curve.dots:
                line.set(marker="o", markersize=4.5, markeredgecolor=PAPER, markeredgewidth=0.8)
        if from_zero:
            axes.set_ylim(bottom=0, top=1.06 * max(max(y for _, y in curve.points) for curve in curves) or 1.0)
        _scale(axes, log, whole_x, log_x)
        axes.text(-0.133, 1.035, clean(y_label), transform=axes.transAxes, color=QUIET, parse_math=False)
        return axes

    return _draw(title, 3.0, draw, x_label)


def draw_bars(title: str, bars: Sequence[Bar], x_label: str) -> str:
    """Returns bars, one above the other, as one SVG element."""
    height = 0.56 + _ROW_IN * max(len(bars), 1)
    values = [sum(length for length, _ in bar.parts) for bar in bars]
    values += [mark.value for bar in bars for mark in bar.marks]
    limit = max((value for value in values if value > 0), default=1.0) * 1.04

    def draw(figure: Figure) -> Axes:
        axes = _row_axes(figure, height, (0, limit), (len(bars) - 0.12, -0.25))
        for row, bar in enumerate(bars):
            _draw_bar(axes, row, bar, limit)
        axes.xaxis.set_major_formatter(lambda value, _: tick(value, axes.get_xlim()[1]))
        return axes

    return _draw(title, height, draw, x_label)


def draw_histograms(title: str, histograms: Sequence[Histogram], x_label: str) -> str:
    """Returns histograms, one above the other, as one SVG element; a column's height is its part of the row."""
    height = 0.5 + _HISTOGRAM_IN * len(histograms)
    width = -(-(max(max(each.counts) for each in histograms) + 1) // _MOST_COLUMNS)
    columns = [_columns(each, width) for each in histograms]
    tallest = max(max(heights.values()) for heights in columns)
    limit = max(max(heights) for heights in columns) + width

    def draw(figure: Figure) -> Axes:
        from matplotlib.ticker import MaxNLocator

        axes = _row_axes(figure, height, (-0.5, limit - 0.5), (len(histograms) - 0.04, 0))
        axes.grid(False, axis="y")
        for row, (each, heights) in enumerate(zip(histograms, columns, strict=True)):
            axes.text(-0.5, row + 0.3, _cut(each.label), va="bottom", ha="left", parse_math=False)
            axes.text(limit - 0.5, row + 0.3, clean(each.note), va="bottom", ha="right", parse_math=False)
            lefts = [left - 0.5 for left in heights]
            tall = [-0.58 * part / tallest for part in heights.values()]
            axes.bar(lefts, tall, width, row + 0.96, align="edge", color=each.colour, edgecolor=PAPER, linewidth=0.6)
            axes.plot([-0.5, limit - 0.5], [row + 0.96] * 2, color=QUIET, linewidth=0.6)
            axes.plot([each.mean] * 2, [row + 0.36, row + 0.96], color=INK, linewidth=1.4, zorder=4)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        return axes

    return _draw(title, height, draw, x_label)


def draw_lanes(title: str, groups: Sequence[tuple[str, Sequence[Lane]]], x_label: str, factor: float) -> str:
    """Returns groups of lanes under a heading as one SVG element; `factor` scales their numbers to the time axis."""
    rows = sum(1 + len(lanes) for _, lanes in groups)
    height = 0.5 + _LANE_IN * rows
    limit = factor * max((at + length for _, lanes in groups for lane in lanes for at, length, _, _ in lane.pieces))

    def draw(figure: Figure) -> Axes:
        axes = _row_axes(figure, height, (0, limit), (rows, 0), left=0.115, width=0.865)
        row = -1
        for words, lanes in groups:
            row += 1
            axes.text(0, row + 0.8, clean(words), va="bottom", ha="left", parse_math=False)
            for lane in lanes:
                row += 1
                axes.text(-0.012 * limit, row + 0.5, clean(lane.label), va="center", ha="right", parse_math=False)
                for at, length, colour, text in lane.pieces:
                    if length <= 0:
                        continue
                    left, wide = factor * at, factor * length
                    axes.barh(row + 0.5, wide, 0.84, left, color=colour, edgecolor=PAPER, linewidth=0.5)
                    if text and wide > 0.02 * limit:
                        place = (left + wide / 2, row + 0.51)
                        axes.text(*place, clean(text), color=PAPER, ha="center", va="center", fontsize=7.5)
        axes.xaxis.set_major_formatter(lambda value, _: tick(value, limit))
        return axes

    return _draw(title, height, draw, x_label)


def _columns(histogram: Histogram, width: int) -> dict[int, float]:
    """Returns the parts of the counts that fall into columns of a width, by the first number in each."""
    total = sum(histogram.counts.values())
    parts: dict[int, float] = defaultdict(float)
    for number, count in histogram.counts.items():
        parts[number // width * width] += count / total
    return parts


def _draw_bar(axes: Axes, row: int, bar: Bar, limit: float) -> None:
    axes.text(0, row + 0.16, _cut(bar.label), va="bottom", ha="left", parse_math=False)
    axes.text(limit, row + 0.16, clean(bar.note), va="bottom", ha="right", parse_math=False)
    left = 0.0
    for length, colour in bar.parts:
        if length <= 0:
            continue
        axes.barh(row + 0.46, length, left=left, height=0.46, color=colour, edgecolor=PAPER, linewidth=0.6)
        if bar.inside and length > 0.085 * limit:
            at = (left + length / 2, row + 0.47)
            axes.text(*at, fixed(length), color=PAPER, ha="center", va="center", fontsize=8)
        left += length
    for mark in bar.marks:
        (line,) = axes.plot([mark.value] * 2, [row + 0.2, row + 0.72], color=INK, linewidth=1.8, zorder=4)
        line.set_solid_capstyle("butt")
        if mark.dashes:
            line.set_dashes(list(mark.dashes))


def _cut(label: str) -> str:
    """Shortens a name so that the note has room."""
    label, half = clean(label), _LABEL_LETTERS // 2
    return label if len(label) <= _LABEL_LETTERS else f"{label[: half - 1]}…{label[-half:]}"


_Range = tuple[float, float]


def _row_axes(figure: Figure, height: float, x: _Range, y: _Range, left: float = 0.005, width: float = 0.97) -> Axes:
    """Returns axes for rows one above the other, without a vertical axis."""
    axes = figure.add_axes((left, 0.44 / height, width, (height - 0.46) / height))
    _style(axes)
    axes.set(xlim=x, ylim=y, yticks=[])
    axes.spines["left"].set_visible(False)
    return axes


def _style(axes: Axes) -> None:
    axes.patch.set_alpha(0)
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.tick_params(length=0, pad=4)


def _scale(axes: Axes, log: bool, whole_x: bool, log_x: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_formatter(lambda value, _: tick(value, axes.get_ylim()[1]))
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=9))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        axes.xaxis.set_major_formatter(lambda value, _: tick(value, axes.get_xlim()[1]))
        return
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole_x))
    axes.xaxis.set_major_formatter(lambda value, _: tick(value, axes.get_xlim()[1]))
    axes.set_xlim(left=0)


def _draw(title: str, height_in: float, draw: Callable[[Figure], Axes], x_label: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The page's reader, not matplotlib, sets the text, and may well have that letter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(_WIDTH_IN, height_in))
        figure.patch.set_alpha(0)
        draw(figure).set_xlabel(clean(x_label), parse_math=False, labelpad=4)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    return _as_element(buffer.getvalue(), title, height_in)


def _as_element(svg: str, title: str, height_in: float) -> str:
    """Cuts off the file's head and makes ids, colours and fonts those of the page."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    prefix = f"p{zlib.crc32(title.encode()):08x}"
    body = re.sub(r'( id="|url\(#|href="#)', lambda found: f"{found[1]}{prefix}-", body)
    body = re.sub(r"#0[0-9a-f]{5}\b", lambda found: _VARIABLES.get(found[0], found[0]), body)
    body = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(clean(title))}" viewBox="0 0 {_WIDTH_IN * _INCH:g} {height_in * _INCH:g}">{body}'
    )
