"""In which order the ranks of a pipeline do what. To add a schedule, add a file and a line.

In the drawings each pass takes a unit: 2 is the forward of micro-batch 2, 2' its backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.pipeline.schedules.gpipe import GPipe
from headrace.pipeline.schedules.interleaved import Interleaved
from headrace.pipeline.schedules.one_forward_one_backward import OneForwardOneBackward
from headrace.pipeline.schedules.schedule import PipelineSchedule
from headrace.pipeline.schedules.zb_h1 import ZeroBubbleH1
from headrace.pipeline.schedules.zb_h2 import ZeroBubbleH2

SCHEDULES: Mapping[str, type[PipelineSchedule]] = {
    "1f1b": OneForwardOneBackward,
    "gpipe": GPipe,
    "interleaved": Interleaved,
    "zb_h1": ZeroBubbleH1,
    "zb_h2": ZeroBubbleH2,
}
"""Every schedule by its name."""
