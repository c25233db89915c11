"""A run's progress in a notebook: one element, which is drawn anew in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape

from headrace.report.format import clean, duration, short

ShowHtml = Callable[[str], None]
"""Shows HTML below the running cell, in the place of what it has shown before."""


def notebook_display() -> ShowHtml | None:
    """Returns what shows HTML below the running cell; None where this process is no notebook's kernel."""
    # A kernel has imported it; a program that has not is not made to pay for it.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def progress_html(
    label: str,
    step: int,
    total: int | None,
    loss: float | None,
    rate: float | None,
    passed_s: float,
    left_s: float | None,
) -> str:
    """Returns one line: a bar where the number of rounds is known, and numbers."""
    bar = f'<progress value="{min(step, total)}" max="{total}"></progress> ' if total else ""
    count = f"{step}/{total}" if total else f"step {step}"
    rest = f", {duration(left_s)} left" if left_s is not None else ""
    text = f"{clean(label)}: {count}, loss {short(loss)}, {short(rate)} examples/s, {duration(passed_s)}{rest}"
    return f'<div style="font-variant-numeric: tabular-nums">{bar}{escape(text)}</div>'
