"""SVG text that a page takes in: its colours are the page's, its labels keep their distance, its values show on hover.

Lengths are in units: a picture is `WIDTH` of them wide, and as wide as its place in the page. There a unit is about a
pixel; on a small screen it is less, and the style sheet makes letters `SMALL_SCREEN` times as large. Labels are placed
for these.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from itertools import pairwise

from headrace.report.format import clean, short, tick

WIDTH = 500.0
SIZE = 12.5
"""Of letters."""
SMALL_SCREEN = 1.2
GAP = 10.0
"""The least distance between two labels of a line."""
_LARGEST = 1e100
"""What is beyond is drawn there, and what is below one over it as 0: differences and ratios must be numbers."""
_LONGEST = 120
_LETTERS = (
    (0.31, "'ijlIJ"),
    (0.36, " ,./:;\\|f-"),
    (0.46, '()[]t!r"'),
    (0.53, "*_`\N{EN DASH}sz?"),
    (0.64, "cLFkvxyPTYaoeESbdghnpqu$0123456789{}"),
    (0.7, "KAVBRXZC"),
    (0.79, "UHNDG&OQ"),
    (0.87, "w#+<=>^~\N{MULTIPLICATION SIGN}M"),
    (1.0, "%mW@…"),
)
"""Widths in a wide font, DejaVu Sans, over the size of the letters."""
_WIDTHS = {letter: width for width, letters in _LETTERS for letter in letters}


@cache
def text_width(words: str) -> float:
    """Returns how wide a text is at most, on a small screen."""
    return SIZE * SMALL_SCREEN * sum(map(_letter_width, words))


def _letter_width(letter: str) -> float:
    wide = unicodedata.east_asian_width(letter) in ("W", "F")
    return _WIDTHS.get(letter, 1.25 if wide else 0.85)


def shortened(words: str, room: float) -> str:
    """Returns a text that fits into a width, without its middle if it must be."""
    words = clean(words)
    if len(words) > _LONGEST:
        words = words[: _LONGEST // 2] + words[-_LONGEST // 2 :]
    elif text_width(words) <= room:
        return words
    for kept in range(len(words) - 1, 1, -1):
        behind = kept // 2
        cut = f"{words[: kept - behind]}…{words[len(words) - behind :]}"
        if text_width(cut) <= room:
            return cut
    return "…"


def bounded(value: float) -> float:
    """Returns a number that can be drawn; 0 for NaN."""
    if math.isnan(value) or abs(value) < 1 / _LARGEST:
        return 0.0
    return max(-_LARGEST, min(_LARGEST, value))


class Canvas:
    """What has been drawn so far; y goes down."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, tip: str = "") -> None:
        """Draws a filled rectangle with a seam in the colour of the paper."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
        seam = ' stroke-width="0.8"' if width > 3 else ' stroke-width="0"'
        self._add("rect", f'{place}{seam} style="fill: var(--{colour}); stroke: var(--paper)"', tip)

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        width: float,
        dashes: Sequence[float] = (),
        opacity: float = 1.0,
        tip: str = "",
    ) -> None:
        """Draws a line through points; `dashes` are in line widths."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        pattern = f' stroke-dasharray="{" ".join(f"{length * width:g}" for length in dashes)}"' if dashes else ""
        faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
        look = f'stroke-width="{width:g}"{pattern}{faint} style="stroke: var(--{colour})"'
        self._add("path", f'd="M{path}" fill="none" {look}', tip)

    def dot(self, x: float, y: float, colour: str) -> None:
        """Draws a point of a curve."""
        look = f'style="fill: var(--{colour}); stroke: var(--paper)"'
        self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="3.4" {look}')

    def spot(self, x: float, y: float, tip: str) -> None:
        """Makes a place whose text shows under the pointer."""
        self._add("circle", f'class="spot" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="transparent"', tip)

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", colour: str = "ink", full: str = "", kind: str = ""
    ) -> None:
        """Writes a text on the line y; `full` shows under the pointer, "in" is the kind of what is inside a box."""
        of_kind = f' class="{kind}"' if kind else ""
        size = SIZE - 1.5 if kind else SIZE
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}"'
        self._add("text", f'{at}{of_kind} style="fill: var(--{colour})"', full, escape(clean(words), quote=False))

    def svg(self, title: str, height: float) -> str:
        """Returns the picture as one element."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(clean(title))}" '
            f'viewBox="0 0 {WIDTH:g} {height:g}">\n' + "\n".join(self._parts) + "\n</svg>"
        )

    def _add(self, tag: str, attributes: str, tip: str = "", inside: str = "") -> None:
        told = f"<title>{escape(clean(tip), quote=False)}</title>" if tip else ""
        end = f">{inside}{told}</{tag}>" if inside or told else "/>"
        self._parts.append(f"<{tag} {attributes}{end}")


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns round numbers from `low` to `high`, which is larger: about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten from `low` to `high`, or powers alone where those are too many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    fine = [value for value in fine if low <= value <= high]
    if len(fine) <= most:
        return fine
    apart = math.ceil((last - first + 1) / most)
    return [10.0**power for power in range(first, last + 1, apart) if low <= 10.0**power <= high]


def tick_text(value: float, limit: float) -> str:
    """Returns the number of a tick on an axis that ends at `limit`, without zeros that say nothing."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(limit) < 1e15:
        return f"{value:.3g}"
    return tick(value, limit)


def x_ticks(low: float, high: float, at: float, width: float, whole: bool = False) -> list[tuple[float, str]]:
    """Returns places and texts below an axis of a width that begins at `at`: as many as have room."""
    for most in (6, 5, 4, 3, 2):
        values = linear_ticks(low, high, most)
        if whole:
            values = [value for value in values if value == round(value)]
        ticks = [(at + width * (value - low) / (high - low), tick_text(value, high)) for value in values]
        room = max((text_width(text) for _, text in ticks), default=0.0) * 1.5 + GAP
        if all(right - left >= room for (left, _), (right, _) in pairwise(ticks)):
            return ticks
    return ticks[:1]


def draw_x_axis(canvas: Canvas, ticks: Sequence[tuple[float, str]], y: float, left: float, label: str) -> float:
    """Writes numbers and a name below the line y; returns where the picture ends."""
    for x, text in ticks:
        half = text_width(text) / 2
        inside = min(max(x, half), WIDTH - half)
        canvas.text(inside, y + 15, text, "middle", "quiet")
    canvas.text((left + WIDTH) / 2, y + 32, shortened(label, WIDTH - left), "middle", "quiet")
    return y + 38


def number_text(value: float) -> str:
    """Returns a number as it is told under the pointer."""
    return f"{value:,.0f}" if abs(value) < 1e15 and value == round(value) else short(value)
