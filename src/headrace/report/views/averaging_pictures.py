"""Which pictures the meetings of runs that average give, and how each is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.report.model.summary import Summary
from headrace.report.views.drawing import Curve, draw_curves
from headrace.report.views.style import Picture, looks
from headrace.spec.events import ParametersAveraged

_FEW = 60
"""Up to so many meetings, each has a dot."""


def averaging_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns the pictures of the runs whose workers met to average; none where none did."""
    shown = [each.averaging.meetings for each in summaries if each.averaging is not None]
    if not shown:
        return ()
    drift = _picture(
        summaries,
        "Drift when workers meet",
        lambda meeting: meeting.drift,
        "distance from the mean, relative",
        "How far the worker that was furthest away was from the mean of all, over the norm of the mean. What grows "
        "from meeting to meeting asks for a shorter period.",
    )
    if all(meeting.period == meetings[0].period for meetings in shown for meeting in meetings):
        return (drift,)
    period = _picture(
        summaries,
        "Rounds between meetings",
        lambda meeting: meeting.rounds,
        "rounds since the last meeting",
        "How long workers went on by themselves. An automatic period grows until the exchange takes its share of the "
        "time and no more, or until drift holds it.",
    )
    return (drift, period)


def _picture(
    summaries: Sequence[Summary], title: str, value: Callable[[ParametersAveraged], float], axis: str, reading: str
) -> Picture:
    curves = []
    for each, look in zip(summaries, looks(summaries), strict=True):
        meetings = each.averaging.meetings if each.averaging else ()
        points = [(float(meeting.step), float(value(meeting))) for meeting in meetings]
        if points:
            curves.append(Curve(points, look.colour, look.dashes, look.width, dots=len(points) <= _FEW))
    return Picture(title, draw_curves(title, curves, "rounds", axis), reading, "runs")
