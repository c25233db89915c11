"""Rows one above the other: bars, histograms, and what ranks did over time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.report.drawing.svg import (
    GAP,
    WIDTH,
    Canvas,
    bounded,
    draw_x_axis,
    linear_ticks,
    number_text,
    shortened,
    text_width,
    x_ticks,
)
from headrace.report.format import fixed, percent
from headrace.report.views.style import words_on

_LABEL, _NOTE = 14.0, 18.0
"""The first line of a row, and how much lower the second is."""
_BAR, _OVER = 15.0, 3.0
"""Height of a bar, and how far a mark goes beyond it."""
_BELOW_LABEL, _BETWEEN = 7.0, 10.0
_COLUMNS = 34.0
_LANE, _HEADING = 20.0, 26.0
_MOST_COLUMNS = 48
_MOST_LABEL = 0.3 * WIDTH


@dataclass(frozen=True)
class Mark:
    """A short vertical line at `value` of one bar; `dashes`, in points, tell kinds apart, `tip` shows on hover."""

    value: float
    dashes: tuple[float, ...] = ()
    tip: str = ""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of (length, colour) parts, a label and a note.

    `inside` writes the lengths into long parts; `names` are those of the parts, shown on hover.
    """

    label: str
    note: str
    parts: Sequence[tuple[float, str]]
    marks: Sequence[Mark] = ()
    inside: bool = False
    names: Sequence[str] = ()


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


def draw_bars(title: str, bars: Sequence[Bar], x_label: str) -> str:
    """Returns bars, one above the other, as one SVG element."""
    values = [bounded(sum(length for length, _ in bar.parts)) for bar in bars]
    values += [bounded(mark.value) for bar in bars for mark in bar.marks]
    limit = max((value for value in values if value > 0), default=1.0) * 1.04
    ticks = x_ticks(0.0, limit, 0.0, WIDTH)
    canvas, y = Canvas(), 0.0
    lines = _lines_of([(bar.label, bar.note) for bar in bars])
    for bar in bars:
        y = _write_label(canvas, y, bar.label, bar.note, lines)
        _draw_grid(canvas, ticks, y - _OVER, y + _BAR + _OVER)
        _draw_bar(canvas, y, bar, WIDTH / limit, x_label)
        y += _BAR + _BETWEEN
    return canvas.svg(title, draw_x_axis(canvas, ticks, y - _BETWEEN + _OVER, 0.0, x_label))


def _draw_bar(canvas: Canvas, y: float, bar: Bar, scale: float, unit: str) -> None:
    left = 0.0
    for index, (length, colour) in enumerate(bar.parts):
        if not length > 0:
            continue
        name = f"{bar.names[index]} " if bar.names else ""
        wide = bounded(length) * scale
        canvas.box(left, y, wide, _BAR, colour, f"{bar.label}: {name}{number_text(length)} {unit}")
        if bar.inside and text_width(fixed(length)) + GAP < wide:
            canvas.text(left + wide / 2, y + _BAR - 3.5, fixed(length), "middle", words_on(colour), kind="in")
        left += wide
    for mark in bar.marks:
        x = bounded(mark.value) * scale
        canvas.line([(x, y - _OVER), (x, y + _BAR + _OVER)], "ink", 2.2, mark.dashes, tip=mark.tip)


def _draw_grid(canvas: Canvas, ticks: Sequence[tuple[float, str]], top: float, bottom: float) -> None:
    """Draws the lines of an axis, behind a bar alone: labels are not crossed."""
    for x, _ in ticks:
        canvas.line([(x, top), (x, bottom)], "grid", 1.0)


def _lines_of(labels: Sequence[tuple[str, str]]) -> int:
    """Returns 1 if each label has room beside its note, else 2."""
    return 1 if all(text_width(label) + GAP + text_width(note) <= WIDTH for label, note in labels) else 2


def _write_label(canvas: Canvas, y: float, label: str, note: str, lines: int) -> float:
    """Writes a row's label and note, and returns where what they name begins."""
    shown = shortened(label, WIDTH)
    canvas.text(0, y + _LABEL, shown, full=label if shown != label else "")
    if lines == 1:
        canvas.text(WIDTH, y + _LABEL, note, "end", "quiet")
        return y + _LABEL + _BELOW_LABEL
    said = shortened(note, WIDTH)
    canvas.text(0, y + _LABEL + _NOTE, said, colour="quiet", full=note if said != note else "")
    return y + _LABEL + _NOTE + _BELOW_LABEL


def draw_histograms(title: str, histograms: Sequence[Histogram], x_label: str) -> str:
    """Returns histograms, one above the other, as one SVG element; a column's height is its part of the row."""
    width = -(-(max(max(each.counts) for each in histograms) + 1) // _MOST_COLUMNS)
    columns = [_columns(each, width) for each in histograms]
    tallest = max(max(heights.values()) for heights in columns)
    limit = max(max(heights) for heights in columns) + width
    scale = WIDTH / limit
    canvas, y = Canvas(), 0.0
    lines = _lines_of([(each.label, each.note) for each in histograms])
    for each, heights in zip(histograms, columns, strict=True):
        y = _write_label(canvas, y, each.label, each.note, lines)
        for left, part in heights.items():
            tall = _COLUMNS * part / tallest
            numbers = f"{left}" if width == 1 else f"{left} to {left + width - 1}"
            tip = f"{each.label}: {numbers}: {percent(part)}"
            canvas.box(left * scale, y + _COLUMNS - tall, width * scale, tall, each.colour, tip)
        canvas.line([(0, y + _COLUMNS), (WIDTH, y + _COLUMNS)], "quiet", 0.8)
        middle = (each.mean + 0.5) * scale
        canvas.line([(middle, y), (middle, y + _COLUMNS)], "ink", 2.0, tip=f"{each.label}: mean {fixed(each.mean)}")
        y += _COLUMNS + _BETWEEN
    marks = [round(value) for value in linear_ticks(0.0, float(limit), 8) if value == round(value) < limit]
    room = max(text_width(str(mark)) for mark in marks) + GAP
    apart = math.ceil(room / (WIDTH * (marks[1] - marks[0]) / limit)) if len(marks) > 1 else 1
    ticks = [((mark + 0.5) * scale, str(mark)) for mark in marks[::apart]]
    return canvas.svg(title, draw_x_axis(canvas, ticks, y - _BETWEEN, 0.0, x_label))


def _columns(histogram: Histogram, width: int) -> dict[int, float]:
    """Returns the parts of the counts that fall into columns of a width, by the first number in each."""
    total = sum(histogram.counts.values())
    parts: dict[int, float] = defaultdict(float)
    for number, count in histogram.counts.items():
        parts[number // width * width] += count / total
    return parts


def draw_lanes(title: str, groups: Sequence[tuple[str, Sequence[Lane]]], x_label: str, factor: float) -> str:
    """Returns groups of lanes under a heading as one SVG element; `factor` scales their numbers to the time axis."""
    every = [lane for _, lanes in groups for lane in lanes]
    ends = [factor * bounded(at + length) for lane in every for at, length, _, _ in lane.pieces]
    limit = max((end for end in ends if end > 0), default=1.0)
    left = min(_MOST_LABEL, max(text_width(lane.label) for lane in every)) + GAP
    scale = (WIDTH - left) / limit
    ticks = x_ticks(0.0, limit, left, WIDTH - left)
    canvas, y = Canvas(), 0.0
    for words, lanes in groups:
        said = shortened(words, WIDTH)
        canvas.text(0, y + _HEADING - 9, said, full=words if said != words else "")
        y += _HEADING
        _draw_grid(canvas, ticks, y, y + _LANE * len(lanes))
        for lane in lanes:
            canvas.text(left - GAP, y + _LANE - 5.5, shortened(lane.label, left - GAP), "end", "quiet")
            for at, length, colour, text in lane.pieces:
                if length > 0:
                    begin, wide = factor * bounded(at) * scale, factor * bounded(length) * scale
                    when = f"{fixed(factor * at)} to {fixed(factor * (at + length))} {x_label}"
                    tip = f"{lane.label}{f', {text}' if text else ''}: {when}"
                    canvas.box(left + begin, y + 1.5, wide, _LANE - 3, colour, tip)
                    if text and text_width(text) + 2 < wide:
                        canvas.text(left + begin + wide / 2, y + _LANE - 6, text, "middle", words_on(colour), kind="in")
            y += _LANE
    return canvas.svg(title, draw_x_axis(canvas, ticks, y, left, x_label))
