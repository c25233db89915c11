"""Whether something grows: the largest of the last minutes against the first minutes' largest, and the slope."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

NATURAL = ("events, MB", "logs, kB")
"""Each step is an event, and each lost process a line of a log."""

MEMORY = "MB"
MEMORY_SLACK = 1.02
"""Memory that was freed is used again, but not to the page."""


@dataclass(frozen=True)
class Growth:
    """One figure over the whole run.

    Attributes:
        first, last: the largest of the first and of the last minutes.
        per_hour: by how much it grows; the median of the slopes between every two minutes, which single minutes cannot
            move (Theil and Sen).
        verdict: "none", "by nature" or "GROWS"; "at moments" where more was seen in the end, but not in most minutes: a
            process that starts or ends while it is looked at.
    """

    what: str
    first: float
    last: float
    per_hour: float
    verdict: str


def growth(minutes: Sequence[Mapping[str, float]], window: int) -> list[Growth]:
    """Compares the first `window` of the minutes with as many of the last; the first one is the start, and left out."""
    settled = minutes[1:]
    found = []
    for what in dict.fromkeys(name for minute in settled for name in minute):
        values = [minute.get(what, 0.0) for minute in settled]
        first, last = max(values[:window]), max(values[-window:])
        slack = MEMORY_SLACK if what.endswith(MEMORY) else 1.0
        per_hour = 60 * slope(values)
        verdict = "none"
        if last > first * slack:
            verdict = "at moments" if per_hour <= 0 else "by nature" if what in NATURAL else "GROWS"
        found.append(Growth(what, first, last, per_hour, verdict))
    return found


def slope(values: Sequence[float]) -> float:
    """Returns the median of the slopes between every two values that are one apart."""
    slopes = [(values[late] - values[early]) / (late - early) for early, late in combinations(range(len(values)), 2)]
    return statistics.median(slopes) if slopes else 0.0


def table(rows: Sequence[Growth]) -> str:
    """Returns the figures as Markdown."""
    lines = ["| | first minutes' largest | last minutes' largest | slope an hour | growth |", "|---|--:|--:|--:|---|"]
    lines += [
        f"| {row.what} | {row.first:,.5g} | {row.last:,.5g} | {row.per_hour:+,.3g} | {row.verdict} |" for row in rows
    ]
    return "\n".join(lines)
