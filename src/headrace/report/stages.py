"""A cut of a model in words."""

from __future__ import annotations

from headrace.report.quantities import byte_count, percent, short
from headrace.spec.plan import Plan

__all__ = ["stage_lines"]


def stage_lines(plan: Plan) -> list[str]:
    """Returns a line for each stage of a pipeline: its layers and what they are expected to take."""
    total = sum(stage.seconds for stage in plan.stages)
    lines = []
    for index, (names, stage) in enumerate(zip(plan.partition, plan.stages, strict=True)):
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        took = f"{short(stage.seconds * 1e3)} ms a micro-batch ({percent(stage.seconds / total)}), " if total else ""
        received = f", gets {byte_count(stage.received_bytes)}" if stage.received_bytes else ""
        lines.append(
            f"stage {index}: {stage.layers} layer{'s' * (stage.layers != 1)}, {which}: {took}"
            f"{byte_count(stage.parameter_bytes)} of parameters, {byte_count(stage.bytes)} in all{received}"
        )
    return lines
