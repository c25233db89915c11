"""What a report says of each subject: one table of fields, which every renderer (rows, JSON, cells, heads) reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from msgspec.structs import asdict

from headrace.report.format import (
    MISSING,
    Field,
    byte_count,
    deviation,
    duration,
    fixed,
    json_fields,
    json_mapping,
    percent,
    plural,
    short,
    to_json,
)
from headrace.report.model.bottleneck import Bottleneck
from headrace.report.model.inputs import InputSummary, blocked_s, busy_s, occupancy
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.summary import Summary
from headrace.report.model.training import STEP_PARTS, AveragingSummary, BalanceSummary, StepTimes
from headrace.spec.events import InputStageStats, InputStats, TableStats


def step_text(times: StepTimes) -> str:
    """Returns a mean step as "12.3 ms: compute 9.10 (74 %), exchange 2.10 (17 %), ..."."""
    total = times.total_s
    parts = ", ".join(
        f"{STEP_PARTS[part]} {fixed(value, 1e3)} ({percent(value / total) if total else MISSING})"
        for part in ("compute_s", "exchange_s", "update_s", "wait_s", "other_s")
        if (value := getattr(times, part)) >= 5e-6
    )
    return f"{fixed(total, 1e3)} ms: {parts}"


@dataclass(frozen=True)
class PredictedFigure:
    """One figure of a run beside what was predicted of it; `format` makes it a text."""

    name: str
    predicted: float
    measured: float
    format: Callable[[float], str]


def predicted_figures(summary: Summary) -> tuple[PredictedFigure, ...]:
    """Returns what was predicted of a run and what was measured, where both are known."""
    expected, times = summary.training.predicted, summary.times
    if expected is None:
        return ()
    pairs: list[tuple[str, float, float | None, Callable[[float], str]]] = [
        ("examples/s", expected.examples_per_s, summary.examples_per_s, short),
        ("step", expected.step_s, times.total_s if times else None, duration),
        ("compute", expected.compute_s, times.compute_s if times else None, duration),
        ("exchange", expected.exchange_s, times.exchange_s if times else None, duration),
        ("update", expected.update_s, times.update_s if times else None, duration),
        ("moved a step", expected.moved_bytes_per_step, summary.cost.moved_bytes_per_step, byte_count),
        ("memory of training", expected.memory_bytes, summary.cost.training_bytes, byte_count),
    ]
    return tuple(
        PredictedFigure(name, predicted, measured, form)
        for name, predicted, measured, form in pairs
        if measured and predicted
    )


PREDICTED: tuple[Field[PredictedFigure], ...] = (
    *json_fields("name", "predicted", "measured"),
    Field(lambda each: each.format(each.predicted), head="predicted"),
    Field(lambda each: each.format(each.measured), head="measured"),
    Field(lambda each: deviation(each.predicted, each.measured), head="error"),
)
"""A figure of a run beside what was predicted of it."""


def predicted_rows(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Returns a row with each predicted figure and its error; none where nothing was predicted."""
    figures = predicted_figures(summary)
    if not figures:
        return ()
    texts = [
        f"{each.name} {each.format(each.predicted)} ({deviation(each.predicted, each.measured)})" for each in figures
    ]
    return (("predicted", ", ".join(texts)),)


STEP: tuple[Field[StepTimes], ...] = tuple(Field(attrgetter(part), key=part.removesuffix("_s")) for part in STEP_PARTS)


def readers_text(stats: InputStats) -> str:
    """Returns "2 threads", "1 process", or "the worker itself"."""
    if stats.parallel == "inline":
        return "the worker itself"
    one = stats.parallel.removesuffix("es").removesuffix("s")
    return f"{stats.readers} {stats.parallel if stats.readers != 1 else one}"


def _input_text(inputs: InputSummary) -> str:
    size = sum(each.bytes for each in inputs.by_rank.values())
    cost = "no example"
    if inputs.examples:
        cost = f"{short(inputs.ms_per_example)} ms and {byte_count(size / inputs.examples)} an example"
    parts = ", ".join(_stage_share(inputs, stage) for stage in inputs.stages)
    return f"{readers_text(inputs.first)}, {cost}: {parts}"


def _stage_share(inputs: InputSummary, stage: InputStageStats) -> str:
    return f"{stage.name} {percent(_part(stage.busy_s, inputs.busy_s))}"


def _part(seconds: float, whole_s: float) -> float:
    return seconds / whole_s if whole_s else 0.0


def _queue_text(inputs: InputSummary) -> str | None:
    if inputs.first.parallel != "threads":
        return None
    whole = sum(each.readers * each.seconds for each in inputs.by_rank.values())
    blocked = sum(blocked_s(each) for each in inputs.by_rank.values())
    free = percent(blocked / whole) if whole > 0 else "0 %"
    return f"{fixed(inputs.least_occupancy)} batches ready when asked; readers blocked {free} of their time"


INPUT_STAGE: tuple[Field[tuple[InputSummary, InputStageStats]], ...] = (
    Field(lambda pair: pair[1].name, key="name"),
    Field(lambda pair: pair[1].busy_s, key="busy_s"),
    Field(lambda pair: pair[1].waiting_s, key="waiting_s"),
    Field(
        lambda pair: 1e3 * pair[1].busy_s / pair[0].examples if pair[0].examples else None,
        short,
        key="ms_per_example",
        head="ms an\nexample",
    ),
    Field(lambda pair: _part(pair[1].busy_s, pair[0].busy_s), percent, head="of the\ninput"),
    Field(lambda pair: _part(pair[1].waiting_s, pair[1].busy_s), percent, head="of it\nwaiting"),
)
"""A stage of an input, with that input."""


READER: tuple[Field[InputStats], ...] = (
    *json_fields("parallel", "readers", "seconds", "waited_s"),
    Field(busy_s, key="busy_s"),
    Field(blocked_s, key="blocked_s"),
    Field(occupancy, key="occupancy"),
    *json_fields("batches", "examples", "bytes", "skipped"),
)

BOTTLENECK: tuple[Field[Bottleneck], ...] = (
    Field(attrgetter("kind"), key="kind", head="bottleneck"),
    *json_fields("stage", "rank", "share", "because", "remedy", "command"),
    Field(attrgetter("line"), label="bottleneck"),
    Field(attrgetter("remedy"), label="try next"),
)

INPUT: tuple[Field[InputSummary], ...] = (
    Field(_input_text, label="input"),
    Field(_queue_text, label="input queue"),
    Field(
        lambda inputs: inputs.skipped or None,
        lambda count: f"{plural(count, 'example')} that could not be had",
        label="left out",
    ),
    Field(lambda inputs: [to_json(INPUT_STAGE, (inputs, stage)) for stage in inputs.stages], key="stages"),
    Field(lambda inputs: readers_text(inputs.first), head="read by"),
    Field(attrgetter("ms_per_example"), short, head="ms an\nexample"),
    Field(lambda inputs: _stage_share(inputs, inputs.busiest), head="dearest\nstage"),
    Field(attrgetter("least_occupancy"), fixed, head="batches\nready"),
    Field(attrgetter("skipped"), key="skipped", head="left\nout"),
    json_mapping(READER, "by_rank", key="by_rank"),
)


def _meetings_text(averaging: AveragingSummary) -> str:
    return f"{plural(len(averaging.meetings), 'meeting')}, one in {short(averaging.mean_rounds)} rounds"


def _averaging_text(averaging: AveragingSummary) -> str:
    period = plural(averaging.last.period, "round")
    return f"{_meetings_text(averaging)}, {duration(averaging.mean_exchange_s)} each; the last period is {period}"


def _drift_text(averaging: AveragingSummary) -> str:
    furthest = averaging.furthest
    return (
        f"mean {short(averaging.mean_drift)}, largest {short(furthest.drift)} of the parameters' norm, "
        f"after {plural(furthest.step, 'round')}"
    )


def _left_out_text(averaging: AveragingSummary) -> str | None:
    ranks = ", ".join(f"rank {rank} {count} ×" for rank, count in averaging.left_out.items())
    return f"{ranks}: parameters that were not finite; they went on from the others' mean" if ranks else None


AVERAGING: tuple[Field[AveragingSummary], ...] = (
    Field(_averaging_text, label="averaging"),
    Field(attrgetter("last.why"), label="period because"),
    Field(_drift_text, label="drift"),
    Field(_left_out_text, label="left out"),
    Field(lambda averaging: [asdict(each) for each in averaging.meetings], key="meetings"),
    *json_fields("mean_rounds", "mean_drift"),
    Field(attrgetter("furthest.drift"), key="largest_drift"),
    *json_fields("left_out"),
)


def _balance_text(balance: BalanceSummary) -> str:
    changes = plural(len(balance.splits) - 1, "change")
    return f"{' + '.join(map(str, balance.last))} examples of a batch, after {changes}"


BALANCE: tuple[Field[BalanceSummary], ...] = (
    Field(_balance_text, label="shares"),
    *json_fields("splits", "last"),
)


def rows_text(tables: Sequence[TableStats]) -> str:
    """Returns how many rows of each sparse embedding are held, and how many were dropped."""
    return "; ".join(
        f"{each.name} {each.held:,}" + (f" of {each.most:,}, {each.evicted:,} evicted" if each.most else "")
        for each in tables
    )


def averaging_line(averaging: AveragingSummary) -> str:
    """Returns the sentence below a comparison."""
    return (
        f"{_meetings_text(averaging)}, the last period {plural(averaging.last.period, 'round')} "
        f"({averaging.last.why}); drift mean {short(averaging.mean_drift)}, largest {short(averaging.furthest.drift)}"
    )


def _bubble_text(step: PipelineStep) -> str:
    return (
        f"{percent(step.bubble)} of step {step.step}; {percent(step.scheduled_bubble)} is the schedule's own with "
        f"{plural(step.micro_batches, 'micro-batch', 'es')}"
    )


def _stages_text(step: PipelineStep) -> str:
    took, expected = (
        ", ".join(short(1e3 * seconds) for seconds in each) for each in (step.stage_s.values(), step.expected_s)
    )
    return f"{took} ms a micro-batch" + (f"; profiled: {expected} ms" if any(step.expected_s) else "")


PIPELINE_STEP: tuple[Field[PipelineStep], ...] = (
    Field(_bubble_text, label="bubble"),
    Field(_stages_text, label="stages"),
    Field(
        lambda step: max(step.in_flight.values()),
        lambda count: f"at most {plural(count, 'micro-batch', 'es')} a stage",
        label="in flight",
    ),
    *json_fields(
        *("step", "seconds", "micro_batches", "bubble", "scheduled_bubble", "stage_s", "expected_s", "in_flight")
    ),
)
