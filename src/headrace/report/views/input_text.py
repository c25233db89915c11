"""How workers were fed and what held the run up, in words, in cells, and as JSON values."""

from __future__ import annotations

from typing import Any

from headrace.report.format import byte_count, fixed, percent, short
from headrace.report.model.bottleneck import Bottleneck
from headrace.report.model.inputs import InputSummary, blocked_s, busy_s, occupancy
from headrace.spec.events import InputStageStats, InputStats

INPUT_HEADS = ("bottleneck", "read by", "ms an\nexample", "dearest\nstage", "batches\nready", "left\nout")
"""Names of what `input_cells` returns, in lines."""


def input_cells(inputs: InputSummary, bottleneck: Bottleneck | None) -> tuple[str, ...]:
    """Returns one run's input in one row."""
    busiest, first = inputs.busiest, next(iter(inputs.by_rank.values()))
    busy = sum(stage.busy_s for stage in inputs.stages)
    return (
        bottleneck.kind if bottleneck else "",
        readers(first),
        short(1e3 * busy / inputs.examples if inputs.examples else None),
        f"{busiest.name} {percent(busiest.busy_s / busy if busy else 0.0)}",
        fixed(min(occupancy(each) for each in inputs.by_rank.values())),
        str(inputs.skipped),
    )


def input_rows(inputs: InputSummary, bottleneck: Bottleneck | None) -> list[tuple[str, str]]:
    """Returns what is worth saying of a run's input, as names and values in words."""
    first = next(iter(inputs.by_rank.values()))
    busy = sum(stage.busy_s for stage in inputs.stages)
    rows = [("input", f"{readers(first)}, {_cost(inputs, busy)}: {_parts(inputs.stages, busy)}")]
    if first.parallel == "threads":
        least = min(occupancy(each) for each in inputs.by_rank.values())
        whole = sum(each.readers * each.seconds for each in inputs.by_rank.values())
        blocked = sum(blocked_s(each) for each in inputs.by_rank.values())
        free = percent(blocked / whole) if whole > 0 else "0 %"
        rows.append(("input queue", f"{fixed(least)} batches ready when asked; readers blocked {free} of their time"))
    if inputs.skipped:
        rows.append(("left out", f"{inputs.skipped} example{'s' * (inputs.skipped != 1)} that could not be had"))
    if bottleneck is not None:
        rows += [("bottleneck", bottleneck.line), ("try next", bottleneck.remedy)]
    return rows


def readers(of: InputStats) -> str:
    """Returns who reads."""
    if of.parallel == "inline":
        return "the worker itself"
    return f"{of.readers} {of.parallel if of.readers != 1 else of.parallel.removesuffix('es').removesuffix('s')}"


def bottleneck_plain(bottleneck: Bottleneck | None) -> dict[str, Any] | None:
    """Returns the same as JSON values."""
    if bottleneck is None:
        return None
    return {
        "kind": bottleneck.kind,
        "stage": bottleneck.stage,
        "rank": bottleneck.rank,
        "share": bottleneck.share,
        "because": bottleneck.because,
        "remedy": bottleneck.remedy,
    }


def input_plain(inputs: InputSummary) -> dict[str, Any]:
    """Returns the same and more as JSON values, with all digits."""
    return {
        "stages": [stage_plain(stage, inputs.examples) for stage in inputs.stages],
        "skipped": inputs.skipped,
        "by_rank": {
            str(rank): {
                "parallel": each.parallel,
                "readers": each.readers,
                "seconds": each.seconds,
                "waited_s": each.waited_s,
                "busy_s": busy_s(each),
                "blocked_s": blocked_s(each),
                "occupancy": occupancy(each),
                "batches": each.batches,
                "examples": each.examples,
                "bytes": each.bytes,
                "skipped": each.skipped,
            }
            for rank, each in inputs.by_rank.items()
        },
    }


def stage_plain(stage: InputStageStats, examples: int) -> dict[str, Any]:
    """Returns one stage as JSON values."""
    return {
        "name": stage.name,
        "busy_s": stage.busy_s,
        "waiting_s": stage.waiting_s,
        "ms_per_example": 1e3 * stage.busy_s / examples if examples else None,
    }


def _cost(inputs: InputSummary, busy: float) -> str:
    total = sum(each.bytes for each in inputs.by_rank.values())
    if not inputs.examples:
        return "no example"
    return f"{short(1e3 * busy / inputs.examples)} ms and {byte_count(total / inputs.examples)} an example"


def _parts(stages: tuple[InputStageStats, ...], busy: float) -> str:
    return ", ".join(f"{stage.name} {percent(stage.busy_s / busy if busy else 0.0)}" for stage in stages)
