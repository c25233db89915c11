"""Draws which strategy follows from which answer: choose-light.svg and choose-dark.svg.

python docs/images/draw_choose.py
"""

from __future__ import annotations

from collections.abc import Mapping

from draw_verbs import DARK, HERE, LIGHT, WIDTH, Canvas

QUESTIONS = (
    ("Is one device fast enough?", "one_device", "update"),
    ("Is one layer alone too large for a device?", "tensor_parallel", "exchange"),
    ("Too large as a whole, with layers that cut into equal stages?", "pipeline", "exchange"),
    ("Too large as a whole otherwise?", "fully_sharded", "exchange"),
    ("Do machines differ, or come and go?", "parameter_server", "store"),
    ("Is the network between them slow?", "parameter_averaging", "store"),
)
LEFT, ANSWER, ASKED, BOX, ROW, TALL = 20, 660, 500, 280, 70, 44
HEIGHT = ROW * (len(QUESTIONS) + 1) + 10


def draw(colours: Mapping[str, str]) -> str:
    """Returns the whole picture."""
    canvas = Canvas(colours)
    parts = []
    for index, (question, strategy, colour) in enumerate(QUESTIONS):
        top, middle = 14 + ROW * index, LEFT + ASKED / 2
        parts += [
            canvas.box(LEFT, top, (question,), "compute", width=ASKED, height=TALL),
            canvas.arrow(LEFT + ASKED, top + TALL / 2, ANSWER, top + TALL / 2),
            canvas.text(LEFT + ASKED + 50, top + TALL / 2 - 8, "yes", colour="quiet"),
            canvas.box(ANSWER, top, (strategy,), colour, width=BOX, height=TALL),
            f'<path d="M{middle} {top + TALL} V{top + ROW - 8}" stroke="{colours["line"]}" stroke-width="1.6"/>',
            f'<path d="M{middle} {top + ROW} l-4 -8 h8 z" fill="{colours["line"]}"/>',
            canvas.text(middle + 12, top + TALL + 18, "no", colour="quiet"),
        ]
    top = 14 + ROW * len(QUESTIONS)
    last = "mirrored; central_storage where one host is short of memory"
    parts.append(canvas.box(LEFT, top, (last,), "update", width=ASKED, height=TALL))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        "<title>Which strategy follows from which answer</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    for ground, colours in (("light", LIGHT), ("dark", DARK)):
        (HERE / f"choose-{ground}.svg").write_text(draw(colours), encoding="utf-8")
