"""Draws what compute, synchronize and update are under each strategy: verbs-light.svg and verbs-dark.svg.

python docs/images/draw_verbs.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 960, 500

LIGHT = {
    "ink": "#1b1f24",
    "quiet": "#59626d",
    "line": "#8b939c",
    "rule": "#e1e5ea",
    "compute": "#dfe8f3",
    "exchange": "#fbe3c8",
    "update": "#eadcf4",
    "store": "#d5efe5",
}
DARK = {
    "ink": "#e6e8eb",
    "quiet": "#9aa4af",
    "line": "#7d8791",
    "rule": "#2c333b",
    "compute": "#26384d",
    "exchange": "#5a3a10",
    "update": "#412b52",
    "store": "#14493a",
}

NAMES, COMPUTE, SYNCHRONIZE, UPDATE = 20, 200, 452, 704
"""Left edges of the columns."""
BOX = 220
ROWS = (78, 180, 332)
"""Top edges of the three strategies."""


@dataclass(frozen=True)
class Canvas:
    """SVG elements in the colours of one ground."""

    colours: Mapping[str, str]

    def text(self, x: float, y: float, words: str, *, size: int = 14, colour: str = "ink", style: str = "") -> str:
        return f'<text x="{x}" y="{y}" font-size="{size}" fill="{self.colours[colour]}" {style}>{escape(words)}</text>'

    def box(self, x: float, y: float, words: Iterable[str], colour: str, *, width: int = BOX, height: int = 48) -> str:
        lines = list(words)
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{self.colours[colour]}"/>'
        middle = 'text-anchor="middle"'
        return shape + "".join(
            self.text(x + width / 2, first + 18 * index, line, size=14 - index, style=middle)
            for index, line in enumerate(lines)
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> str:
        bend = (x + to_x) / 2
        path = f"M{x} {y} C{bend} {y} {bend} {to_y} {to_x - 6} {to_y}"
        colour = self.colours["line"]
        head = f"M{to_x} {to_y} l-8 -4 v8 z"
        return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/><path d="{head}" fill="{colour}"/>'

    def rule(self, y: float) -> str:
        return f'<path d="M{NAMES} {y} H{WIDTH - NAMES}" stroke="{self.colours["rule"]}"/>'


def draw(colours: Mapping[str, str]) -> str:
    """Returns the whole picture."""
    canvas = Canvas(colours)
    parts = [*_heads(canvas), *_one_device(canvas), *_mirrored(canvas), *_central_storage(canvas)]
    title = "What each strategy does to compute, to synchronize and to update"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _heads(canvas: Canvas) -> list[str]:
    columns = ((COMPUTE, "compute"), (SYNCHRONIZE, "synchronize"), (UPDATE, "update"))
    style = 'font-weight="600" text-anchor="middle"'
    heads = [canvas.text(x + BOX / 2, 40, words, size=17, style=style) for x, words in columns]
    return [*heads, *(canvas.rule(top - 18) for top in ROWS)]


def _name(canvas: Canvas, top: float, name: str, *lines: str) -> list[str]:
    quiet = [
        canvas.text(NAMES, top + 40 + 17 * index, line, size=13, colour="quiet") for index, line in enumerate(lines)
    ]
    return [canvas.text(NAMES, top + 18, name, size=16, style='font-weight="600"'), *quiet]


def _one_device(canvas: Canvas) -> list[str]:
    top = ROWS[0]
    return [
        *_name(canvas, top, "OneDevice", "one process"),
        canvas.box(COMPUTE, top, ("forward, backward", "on the whole batch"), "compute", height=60),
        canvas.text(SYNCHRONIZE + BOX / 2, top + 35, "nothing", colour="quiet", style='text-anchor="middle"'),
        canvas.box(UPDATE, top, ("optimizer", "on all parameters"), "update", height=60),
    ]


def _shares(canvas: Canvas, top: float) -> list[str]:
    return [
        canvas.box(COMPUTE, top + 64 * rank, ("forward, backward", f"worker {rank}, its share"), "compute")
        for rank in (0, 1)
    ]


def _cross(canvas: Canvas, left: float, right: float, top: float) -> list[str]:
    """Arrows from both workers' boxes to both."""
    return [
        canvas.arrow(left + BOX, top + 24 + 64 * source, right, top + 24 + 64 * target)
        for source in (0, 1)
        for target in (0, 1)
    ]


def _mirrored(canvas: Canvas) -> list[str]:
    top = ROWS[1]
    sums = [
        canvas.box(SYNCHRONIZE, top + 64 * rank, (f"sum of part {rank}", "of all gradients"), "exchange")
        for rank in (0, 1)
    ]
    updates = [
        canvas.box(UPDATE, top + 64 * rank, ("optimizer", f"on worker {rank}'s mirror"), "update") for rank in (0, 1)
    ]
    return [
        *_name(canvas, top, "Mirrored", "every worker holds", "all parameters", "and optimizer state"),
        *_shares(canvas, top),
        *_cross(canvas, COMPUTE, SYNCHRONIZE, top),
        *sums,
        *_cross(canvas, SYNCHRONIZE, UPDATE, top),
        *updates,
    ]


def _central_storage(canvas: Canvas) -> list[str]:
    top = ROWS[2]
    sums = [
        canvas.box(SYNCHRONIZE, top + 64 * rank, (f"sum of slice {rank}", "of all gradients"), "exchange")
        for rank in (0, 1)
    ]
    slices = [
        canvas.box(UPDATE, top + 64 * rank, ("optimizer", f"on slice {rank} of the one copy"), "update")
        for rank in (0, 1)
    ]
    straight = [canvas.arrow(SYNCHRONIZE + BOX, top + 24 + 64 * rank, UPDATE, top + 24 + 64 * rank) for rank in (0, 1)]
    store = "one copy of the parameters in shared memory: every worker computes on it, each updates its slice"
    return [
        *_name(canvas, top, "CentralStorage", "the host holds", "all parameters and", "optimizer state once"),
        *_shares(canvas, top),
        *_cross(canvas, COMPUTE, SYNCHRONIZE, top),
        *sums,
        *straight,
        *slices,
        canvas.box(COMPUTE, top + 124, (store,), "store", width=UPDATE + BOX - COMPUTE, height=32),
    ]


def main() -> None:
    for ground, colours in (("light", LIGHT), ("dark", DARK)):
        (HERE / f"verbs-{ground}.svg").write_text(draw(colours), encoding="utf-8")


if __name__ == "__main__":
    main()
