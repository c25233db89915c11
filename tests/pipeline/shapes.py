"""How many stages a rank may have under each schedule."""

from __future__ import annotations

from headrace.errors import UsageError
from headrace.pipeline.schedules import SCHEDULES


def chunks_of(name: str) -> tuple[int, ...]:
    """Returns numbers of stages a rank: one, two, or two and three where there may be more."""
    found = []
    for chunks in (1, 2, 3):
        try:
            found += [chunks] if SCHEDULES[name](1, 1, chunks).stages() == chunks else []
        except UsageError:
            continue
    return tuple(each for each in found if each > 1) or (1,)
