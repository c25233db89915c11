"""In which order the ranks of a pipeline do what. To add a schedule, add a file and a line.

In the drawings each pass takes a unit: 2 is the forward of micro-batch 2, 2' its backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.registry import Registry

if TYPE_CHECKING:
    from headrace.pipeline.schedules.schedule import PipelineSchedule

_ROOM = "headrace.pipeline.schedules"

SCHEDULES: Registry[type[PipelineSchedule]] = Registry(
    _ROOM,
    {
        "1f1b": f"{_ROOM}.one_forward_one_backward:OneForwardOneBackward",
        "breadth_first": f"{_ROOM}.breadth_first:BreadthFirst",
        "dualpipe_v": f"{_ROOM}.dualpipe_v:DualPipeV",
        "gpipe": f"{_ROOM}.gpipe:GPipe",
        "interleaved": f"{_ROOM}.interleaved:Interleaved",
        "v_half": f"{_ROOM}.v_half:VHalf",
        "zb_h1": f"{_ROOM}.zb_h1:ZeroBubbleH1",
        "zb_h2": f"{_ROOM}.zb_h2:ZeroBubbleH2",
        "zb_v": f"{_ROOM}.zb_v:ZeroBubbleV",
    },
    base=f"{_ROOM}.schedule:PipelineSchedule",
)
"""Every schedule by its name; other packages add theirs by entry points of the group `headrace.pipeline.schedules`."""
