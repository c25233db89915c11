"""In which order the ranks of a pipeline do what: pure generators, one a file. To add one, add a file and a line."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.pipeline.schedules.gpipe import gpipe
from headrace.pipeline.schedules.interleaved import interleaved
from headrace.pipeline.schedules.one_forward_one_backward import one_forward_one_backward
from headrace.pipeline.schedules.schedule import Action, Schedule

__all__ = ["SCHEDULES", "Action", "Schedule"]

SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
}
"""Every schedule by its name."""
