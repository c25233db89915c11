"""A cut of a model in words."""

from __future__ import annotations

from headrace.report.format import byte_count, percent, short
from headrace.spec.plan import Plan

_MOST = 8


def replica_lines(plan: Plan) -> list[str]:
    """Returns a line that says which ranks hold a replica together, and which servers serve them; none for one."""
    ranks = plan.workers // max(1, plan.replicas)
    if ranks == 1 or plan.replicas == 1:
        return []
    what = "stage" if plan.partition else "slice"
    each = [f"{first} to {first + ranks - 1}" for first in range(0, plan.workers, ranks)]
    line = f"{plan.replicas} replicas of {ranks} ranks: {', '.join(_some(each))}"
    if plan.servers:
        serve = [f"rank {rank} of {what} {plan.role(rank).stage}" for rank in plan.servers]
        line += f"; servers: {', '.join(_some(serve))}"
    return [line]


def _some(words: list[str]) -> list[str]:
    return words if len(words) <= _MOST else [*words[: _MOST - 1], f"{len(words) - _MOST + 1} more"]


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
