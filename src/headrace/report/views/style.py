"""How runs appear in pictures, and what a picture is to the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.report.model.summary import Summary
from headrace.report.views.drawing import DASHES
from headrace.report.views.palette import colours_of


@dataclass(frozen=True)
class RunStyle:
    """How one run appears in every picture.

    Attributes:
        colour: a stand-in of the palette, the strategy's.
        dashes: tells apart runs that lie on each other.
        width: of its lines; earlier runs are wider, so that they show under later ones.
    """

    colour: str
    dashes: Sequence[float]
    width: float


@dataclass(frozen=True)
class Picture:
    """Attributes:
    title: what it shows.
    svg: the picture.
    reading: how it is read, in sentences.
    key: "runs" where the runs' colours explain it, "parts" where a step's parts do, "" where nothing must.
    """

    title: str
    svg: str
    reading: str
    key: str = ""


def looks(summaries: Sequence[Summary]) -> tuple[RunStyle, ...]:
    """Returns one look a run, in order."""
    colours = colours_of(each.strategy for each in summaries)
    return tuple(
        RunStyle(colours[each.strategy], DASHES[index % len(DASHES)], 2.4 if index == 0 and len(summaries) > 1 else 1.6)
        for index, each in enumerate(summaries)
    )
