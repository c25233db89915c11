"""Curves over an axis of examples, seconds or rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.report.drawing.svg import (
    GAP,
    WIDTH,
    Canvas,
    bounded,
    draw_x_axis,
    linear_ticks,
    log_ticks,
    number_text,
    shortened,
    text_width,
    tick_text,
    x_ticks,
)
from headrace.report.format import short

Point = tuple[float, float]

_TOP, _HEIGHT = 26.0, 164.0
_MOST_Y_TICKS = 8
_MOST_SPOTS = 48
"""Values of a curve that show under the pointer."""
_FLAT = 1e-9
"""A curve that varies by less than this part of its size is drawn as flat."""


@dataclass(frozen=True)
class Curve:
    """A line through (x, y) points.

    `colour` is a variable of the style; `width` is in points; `faint` are the points before smoothing, drawn faintly;
    `name` stands before a value that shows on hover; `bars` are (x, low, high), between which values are expected.
    """

    points: Sequence[Point]
    colour: str
    dashes: Sequence[float] = ()
    width: float = 1.6
    faint: Sequence[Point] = ()
    dots: bool = False
    name: str = ""
    bars: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high`, at places from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)


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
    drawn = [point for each in curves for points in (each.points, each.faint) for point in _finite(points)]
    ends = [end for each in curves for _, *bar in each.bars for end in bar]
    low, high = _range([*(y for _, y in drawn), *ends], log, from_zero)
    marks = log_ticks(low, high, _MOST_Y_TICKS) if log else linear_ticks(low, high, 5)
    texts = [tick_text(mark, high) for mark in marks]
    left, right = max(map(text_width, texts), default=0.0) + GAP, WIDTH - 6
    across, up = _across([x for x, _ in drawn], left, right, log_x), _Axis(low, high, _TOP + _HEIGHT, _TOP, log)
    canvas = Canvas()
    canvas.text(0, 13, shortened(y_label, WIDTH), colour="quiet")
    for mark, text in zip(marks, texts, strict=True):
        y = up.at(mark)
        canvas.line([(left, y), (right, y)], "grid", 1.0)
        canvas.text(left - GAP / 2, y + 4.5, text, "end", "quiet")
    ticks = _x_ticks(across, whole_x)
    for x, _ in ticks:
        canvas.line([(x, _TOP), (x, _TOP + _HEIGHT)], "grid", 1.0)
    canvas.line([(left, _TOP + _HEIGHT), (right, _TOP + _HEIGHT)], "quiet", 0.8)
    for each in curves:
        for x, least, most in each.bars:
            canvas.line([(across.at(x), up.at(least)), (across.at(x), up.at(most))], each.colour, 7.0, opacity=0.28)
        for piece in _pieces(each.faint):
            canvas.line([(across.at(x), up.at(y)) for x, y in piece], each.colour, 1.0, opacity=0.28)
    for each in curves:
        for piece in _pieces(each.points):
            places = [(across.at(x), up.at(y)) for x, y in piece]
            canvas.line(places, each.colour, each.width * 1.3, each.dashes)
            for x, y in places if each.dots or len(places) == 1 else ():
                canvas.dot(x, y, each.colour)
    for each in curves:
        points = list(_finite(each.points))
        # The last among them.
        for x, y in points[-1 :: -max(1, math.ceil(len(points) / _MOST_SPOTS))]:
            name = f"{each.name}: " if each.name else ""
            canvas.spot(across.at(x), up.at(y), f"{name}{short(y)} at {number_text(x)} {x_label}")
    return canvas.svg(title, draw_x_axis(canvas, ticks, _TOP + _HEIGHT, left, x_label))


def _across(values: Sequence[float], left: float, right: float, log: bool) -> _Axis:
    """Returns the horizontal axis: from 0, or from the least value above 0 where it is logarithmic."""
    above = [value for value in values if value > 0] or [1.0]
    if not log:
        return _Axis(0.0, max(above), left, right, log)
    low, high = min(above), max(above)
    return _Axis(low, high if high > low * 1.01 else low * 10, left, right, log)


def _x_ticks(across: _Axis, whole: bool) -> list[tuple[float, str]]:
    if not across.log:
        return x_ticks(0.0, across.high, across.begin, across.end - across.begin, whole)
    for most in (8, 6, 4, 2):
        ticks = [
            (across.at(value), tick_text(value, across.high)) for value in log_ticks(across.low, across.high, most)
        ]
        room = max((text_width(text) for _, text in ticks), default=0.0) * 1.5 + GAP
        if all(right - left >= room for (left, _), (right, _) in pairwise(ticks)):
            return ticks
    return ticks[:1]


def _finite(points: Sequence[Point]) -> Iterator[Point]:
    """Yields the points that can be drawn."""
    return ((bounded(x), bounded(y)) for x, y in points if not math.isnan(x) and math.isfinite(y))


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yields the parts of a curve that have no value between them that is not finite."""
    piece: list[Point] = []
    for x, y in points:
        if math.isnan(x) or not math.isfinite(y):
            if piece:
                yield piece
            piece = []
        else:
            piece.append((bounded(x), bounded(y)))
    if piece:
        yield piece


def _range(values: Sequence[float], log: bool, from_zero: bool) -> Point:
    """Returns the ends of the vertical axis."""
    if log:
        low, high = max(min(values), 1e-100), max(max(values), 1e-99)
        over = (high / low) ** 0.04
        return low / over, high * max(over, 1.01)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        low, high = min(0.0, low), max(1.06 * high, 0.0) or 1.0
    if high - low <= _FLAT * max(abs(low), abs(high)) + 1e-90:
        apart = 0.1 * abs(high) or 1.0
        return low - apart, high + apart
    over = 0.0 if from_zero else 0.04 * (high - low)
    return low - over, high + over
