"""The picture of a pipeline's step: a Gantt chart of what was measured above that of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.report.format import percent
from headrace.report.model.pipeline_steps import PipelineStep
from headrace.report.model.summary import Summary
from headrace.report.views.drawing import Lane, draw_lanes
from headrace.report.views.palette import PARTS
from headrace.report.views.style import Picture

_FORWARD, _BACKWARD, _WAIT = PARTS["compute_s"], PARTS["update_s"], PARTS["other_s"]


def passed_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns a picture for each run of a pipeline that has told of a step."""
    return tuple(
        _picture(f"A step of {each.name}" if len(summaries) > 1 else "A step of the pipeline", each.passed)
        for each in summaries
        if each.passed is not None
    )


def _picture(title: str, passed: PipelineStep) -> Picture:
    measured = [
        Lane(
            f"rank {rank}",
            tuple(
                piece
                for each in passes
                for piece in (
                    (each.began_s - passed.began_s, each.waited_s, _WAIT, ""),
                    (
                        each.began_s + each.waited_s - passed.began_s,
                        each.ended_s - each.began_s - each.waited_s,
                        _BACKWARD if each.backward else _FORWARD,
                        str(each.micro_batch),
                    ),
                )
            ),
        )
        for rank, passes in passed.passes.items()
    ]
    scheduled = [
        Lane(
            f"rank {rank}",
            tuple(
                (
                    span.start,
                    span.stop - span.start,
                    _BACKWARD if span.action.backward else _FORWARD,
                    str(span.action.micro_batch),
                )
                for span in passed.scheduled
                if span.rank == place
            ),
        )
        for place, rank in enumerate(passed.passes)
    ]
    groups = (
        (f"as measured in step {passed.step}: {percent(passed.bubble)} bubble", measured),
        (f"by the schedule, were all stages alike: {percent(passed.scheduled_bubble)} bubble", scheduled),
    )
    reading = (
        "Each box is a micro-batch in a stage: blue forward, violet backward, its number inside; grey is waiting for "
        "another stage. The bubble is the part of the time in which ranks work on nothing. There is more of it than in "
        "the schedule where stages take different times, where transfers take time, and where others want the cores."
    )
    return Picture(title, draw_lanes(title, groups, "milliseconds", 1e3), reading)
