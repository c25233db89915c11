"""Runs as tables for a terminal of 80 columns, and as JSON values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.report.format import (
    MISSING,
    Field,
    byte_count,
    clean,
    duration,
    fixed,
    json_fields,
    json_mapping,
    percent,
    plural,
    short,
    to_json,
    to_rows,
    torn_text,
)
from headrace.report.model.summary import Saves, Summary, brief_of
from headrace.report.model.verdict import References, verdict
from headrace.report.views.server_subjects import SERVERS, server_line, worker_rows
from headrace.report.views.subjects import (
    AVERAGING,
    BALANCE,
    BOTTLENECK,
    INPUT,
    PIPELINE_STEP,
    PREDICTED,
    STEP,
    averaging_line,
    predicted_figures,
    predicted_rows,
    rows_text,
    step_text,
)
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    # Importing rich takes 40 ms, which `headrace --help` does not have.
    from rich.table import Table

_NAME_WIDTH = 15
_METRIC_WIDTH = 8


class ComparedRun(NamedTuple):
    """A run in a comparison; `metric` is the one that has a column."""

    summary: Summary
    references: References
    metric: str | None


def _step_ms(part: str) -> Callable[[ComparedRun], float | None]:
    return lambda run: None if run.summary.times is None else 1e3 * getattr(run.summary.times, part)


_megabytes = partial(fixed, factor=1e-6)

COLUMNS: tuple[Field[ComparedRun], ...] = (
    Field(lambda run: run.summary.workers, label="N"),
    Field(lambda run: f"{run.summary.workers} × {run.summary.started.threads}", head="workers\n× threads"),
    Field(
        lambda run: run.summary.metrics.get(run.metric) if run.metric else None, short, label="metric", head="metric"
    ),
    Field(attrgetter("summary.examples_per_s"), short, label="ex/s", head="examples/s"),
    Field(lambda run: run.references.to_one_device(run.summary), fixed, label="×\none", head="× one"),
    Field(lambda run: run.references.to_ceiling(run.summary), fixed, label="×\nceil", head="× ceiling"),
    Field(attrgetter("summary.cost.moved_bytes_per_step"), _megabytes, label="MB/\nstep"),
    Field(attrgetter("summary.cost.moved_bytes_per_step"), byte_count, head="moved\na step"),
    Field(_step_ms("compute_s"), fixed, label="comp\nms", head="compute\nms"),
    Field(_step_ms("exchange_s"), fixed, label="exch\nms", head="exchange\nms"),
    Field(_step_ms("update_s"), fixed, label="upd\nms", head="update\nms"),
    Field(_step_ms("wait_s"), fixed, label="wait\nms", head="wait\nms"),
    Field(attrgetter("summary.cost.peak_memory_bytes"), _megabytes, label="peak\nMB"),
    Field(attrgetter("summary.cost.peak_memory_bytes"), byte_count, head="peak\nmemory"),
)
"""A comparison's columns: those with a label on a terminal, those with a head on the page."""

_WIDTHS = {"N": 3, "metric": _METRIC_WIDTH, "×\none": 4, "×\nceil": 4}


def first_metric(summaries: Sequence[Summary]) -> str | None:
    """Returns the metric to show where there is room for one: the first that is not the loss."""
    names = dict.fromkeys(name for each in summaries for name in each.metrics)
    return next((name for name in names if name != "loss"), next(iter(names), None))


def ending(summary: Summary) -> str:
    """Returns in one line how a run ended that did not do all its rounds; empty for a run that did."""
    words = summary.outcome.words
    if summary.status == "ok" and not words:
        return ""
    told = f": {words}" if words else ""
    return f"{summary.name}: {summary.status} after {plural(summary.steps, 'step')}{told}"


def comparison_table(summaries: Sequence[Summary], references: References) -> Table:
    """Returns one row a run, at most 80 columns wide; its caption explains the abbreviations."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    metric = first_metric(summaries)
    columns = [each for each in COLUMNS if each.label]
    head = [line for word in clean(metric or "").split("_") for line in textwrap.wrap(word, _METRIC_WIDTH)]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, min_width=80, caption_justify="left")
    table.add_column("strategy", overflow="fold", max_width=_NAME_WIDTH)
    for each in columns:
        name = "\n".join(head) if each.label == "metric" and metric else each.label
        table.add_column(Text(name), justify="right", no_wrap=True, max_width=_WIDTHS.get(each.label, 5))
    for summary in summaries:
        run = ComparedRun(summary, references, metric)
        mark = " !" if summary.status != "ok" else " ~" if references.disturbed(summary) else ""
        table.add_row(Text(clean(summary.name) + mark), *(Text(each.format(each.get(run))) for each in columns))
    one = references.one_device_examples_per_s
    if one and not any(each.strategy == "one_device" for each in summaries):
        # A user has this rate without headrace, so it belongs in every table.
        table.add_row("one process, all threads", "1", "", short(one), "1.00", *[""] * 7, style="dim")
    table.caption = Text(clean("\n".join(_legend(summaries, references, metric))))
    table.caption_style = "dim"
    return table


def _legend(summaries: Sequence[Summary], references: References, metric: str | None) -> list[str]:
    one = references.one_device_examples_per_s
    ceilings = ", ".join(
        f"{short(rate)} with {workers}" for workers, rate in sorted(references.ceiling_examples_per_s.items())
    )
    lines = [
        f"N: workers. {f'{metric}: of the last evaluation. ' if metric else ''}ex/s: examples a second, steady state.",
        f"× one: ex/s over one process with all threads ({f'{short(one)} ex/s' if one else 'not measured'}).",
        f"× ceil: ex/s over N unconnected workers at once ({f'{ceilings}' if ceilings else 'not measured'}).",
        "MB/step: moved by all workers together. peak MB: of the largest process.",
        "ms: of a worker's mean step in compute, exchange, update, waiting for data.",
    ]
    lines += [differ] if (differ := differing_line(summaries, references)) else []
    lines += [f"{each.name}: {server_line(each.servers)}." for each in summaries if each.servers is not None]
    lines += [f"{each.name}: {averaging_line(each.averaging)}." for each in summaries if each.averaging is not None]
    lines += [f"{each.name}: {each.bottleneck.line}." for each in summaries if each.bottleneck is not None]
    lines += [f"~ {each.name}: disturbed: {why}." for each in summaries if (why := references.disturbed(each))]
    return lines + [f"! {ending(each)}" for each in summaries if each.status != "ok"]


def differing_line(summaries: Sequence[Summary], references: References) -> str:
    """Returns the line that names the runs under strategies that need not equal one device; "" without such a run."""
    names = ", ".join(each.name for each in summaries if each.label in references.may_differ)
    return f"Need not equal one device, so their loss may differ from its: {names}." if names else ""


_SHORT = ("steps", "evaluation", "examples/s")
"""What a run has reached, in how much time, and how fast."""


def short_table(summary: Summary) -> Table:
    """Returns what most want to know of a run, and how it ended if that was not after all its rounds."""
    rows = dict(run_rows(summary))
    rows["examples/s"] += f", {rows['training time']} of training"
    names = (*(("status",) if ending(summary) else ()), *_SHORT, "remark")
    return _two_columns([(name, rows[name]) for name in names if name in rows])


def run_table(summary: Summary) -> Table:
    """Returns one run as two columns, name and value."""
    return _two_columns(run_rows(summary))


def _two_columns(rows: Sequence[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    # As wide in the short form as in the long one.
    table.add_column(no_wrap=True, style="bold", min_width=len("optimizer state"))
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(clean(value)))
    return table


def run_rows(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Returns one run as names and values in words."""
    return (
        *to_rows(_RUN, summary),
        *predicted_rows(summary),
        *to_rows(INPUT, summary.inputs),
        *to_rows(BOTTLENECK, summary.bottleneck if summary.inputs else None),
        *to_rows(SERVERS, summary.servers),
        *worker_rows(summary.servers),
        *to_rows(AVERAGING, summary.averaging),
        *to_rows(BALANCE, summary.balance),
        *to_rows(PIPELINE_STEP, summary.passed),
        *to_rows(_COST, summary),
        *(("notice", notice) for notice in summary.outcome.notices),
    )


def _attempts_text(summary: Summary) -> str | None:
    count = summary.outcome.attempts
    return f"{count}, resumed at step {summary.started.resumed_step}" if count > 1 else None


def _resumed_text(summary: Summary) -> str | None:
    resumed = summary.started.resumed_step
    return f"at step {resumed}, which another run had reached" if resumed and summary.outcome.attempts == 1 else None


def _processes_text(summary: Summary) -> str:
    servers = f" and {plural(len(summary.servers.by_rank), 'server')}" if summary.servers is not None else ""
    hosts = ", ".join(summary.outcome.hosts) or MISSING
    threads = plural(summary.started.threads, "thread")
    kinds = summary.started.device
    devices = ", ".join(dict.fromkeys(summary.outcome.devices.values())) if summary.mixed else kinds
    return f"{plural(summary.workers, 'worker')}{servers} on {hosts} ({devices}), {threads} each"


def _evaluation_text(summary: Summary) -> str | None:
    if not summary.curves.evaluations:
        return None
    metrics = ", ".join(f"{name} {short(value)}" for name, value in summary.metrics.items())
    return f"{metrics} after {plural(summary.curves.evaluations[-1].epochs, 'epoch')}"


_MOST_NUMBERS = 8


def _numbers_text(summary: Summary) -> str | None:
    shown = [f"{name} {short(points[-1][1])}" for name, points in summary.numbers.items()]
    more = f", and {len(shown) - _MOST_NUMBERS} more" if len(shown) > _MOST_NUMBERS else ""
    return ", ".join(shown[:_MOST_NUMBERS]) + more or None


def _steps_text(summary: Summary) -> str:
    batch, epochs = summary.started.global_batch_size, summary.training.epochs
    return f"{summary.steps} of {batch} examples, {plural(epochs, 'epoch')}"


def _held_text(name: str, summary: Summary) -> str | None:
    value = getattr(summary.cost, name)
    where = "in all workers and servers" if summary.servers is not None else "in all workers"
    return None if value is None else f"{byte_count(value)} {where} together"


def _saves_text(saves: Saves) -> str:
    stall = f"mean {duration(saves.mean_stall_s)}, longest {duration(saves.longest_stall_s)}"
    return (
        f"{saves.count}, the last at step {saves.last_step}, {byte_count(saves.bytes)}; "
        f"training stood still: {stall}, {percent(saves.share)} of its time"
    )


def _non_finite_text(summary: Summary) -> str | None:
    bad = summary.non_finite
    if bad is None:
        return None
    back = f", {bad.rolled_back} of them with a rollback" if bad.rolled_back else ""
    return f"{plural(bad.skipped + bad.rolled_back, 'round')} left out{back}"


_RUN: tuple[Field[Summary], ...] = (
    *json_fields("label", "strategy", "workers", "started.device", "started.threads", "status"),
    *json_fields("outcome.cause", "outcome.remedy"),
    *json_fields("outcome.devices", "outcome.attempts", "started.resumed_step"),
    *json_fields("training.steps", "training.epochs", "training.examples"),
    Field(attrgetter("name"), label="run"),
    Field(lambda summary: ending(summary) or "ok", label="status"),
    Field(lambda summary: brief_of(summary).remarks or None, key="remark", label="remark"),
    Field(_attempts_text, label="attempts"),
    Field(_resumed_text, label="resumed"),
    Field(_processes_text, label="processes"),
    Field(_steps_text, label="steps"),
    Field(attrgetter("training.seconds"), duration, key="seconds", label="training time"),
    *json_fields("training.examples_per_s"),
    Field(lambda summary: f"{short(summary.examples_per_s)} in steady state", label="examples/s"),
    Field(
        lambda summary: {k: value if math.isfinite(value) else None for k, value in summary.metrics.items()},
        key="metrics",
    ),
    Field(_evaluation_text, label="evaluation"),
    Field(_numbers_text, label="logged"),
    Field(
        lambda summary: {
            name: last if math.isfinite(last := points[-1][1]) else None for name, points in summary.numbers.items()
        },
        key="logged",
    ),
    Field(lambda summary: to_json(STEP, summary.times), key="step_seconds"),
    json_mapping(STEP, "times_by_rank", key="step_seconds_by_rank"),
    Field(attrgetter("times"), step_text, label="mean step"),
)

_FAILURE = json_fields("rank", "step", "cause", "traceback")

_COST: tuple[Field[Summary], ...] = (
    Field(
        attrgetter("cost.moved_bytes_per_step"),
        lambda value: f"{byte_count(value)} by all workers",
        key="moved_bytes_per_step",
        label="moved a step",
    ),
    Field(
        attrgetter("cost.peak_memory_bytes"),
        lambda value: f"{byte_count(value)} in the largest process",
        key="peak_memory_bytes",
        label="peak memory",
    ),
    *json_fields("cost.training_bytes", "cost.parameter_bytes", "cost.optimizer_bytes"),
    Field(partial(_held_text, "parameter_bytes"), label="parameters"),
    Field(partial(_held_text, "optimizer_bytes"), label="optimizer state"),
    *json_fields("cost.rows"),
    Field(lambda summary: summary.cost.rows or None, rows_text, label="rows held"),
    Field(attrgetter("saves"), _saves_text, key="saves", label="checkpoints"),
    *json_fields("non_finite"),
    Field(_non_finite_text, label="not finite"),
    Field(
        lambda summary: summary.outcome.torn_lines or None,
        torn_text,
        label="torn lines",
    ),
    Field(lambda summary: [to_json(PREDICTED, each) for each in predicted_figures(summary)] or None, key="prediction"),
    Field(lambda summary: to_json(SERVERS, summary.servers), key="servers"),
    Field(lambda summary: to_json(AVERAGING, summary.averaging), key="averaging"),
    Field(lambda summary: to_json(BALANCE, summary.balance), key="balance"),
    Field(lambda summary: to_json(PIPELINE_STEP, summary.passed), key="passed"),
    Field(lambda summary: to_json(INPUT, summary.inputs), key="input"),
    Field(lambda summary: to_json(BOTTLENECK, summary.bottleneck), key="bottleneck"),
    *json_fields("outcome.notices"),
    Field(lambda summary: to_json(_FAILURE, summary.outcome.failure), key="failure"),
)


def run_plain(summary: Summary) -> dict[str, Any]:
    """Returns one run as JSON values; what is unknown or not finite is None."""
    return to_json((*_RUN, *_COST), summary) or {}


def comparison_plain(summaries: Sequence[Summary], references: References) -> dict[str, Any]:
    """Returns what `comparison_table` shows as JSON values, with all digits."""
    return {
        "runs": [
            {
                **run_plain(each),
                "ratio_to_one_device": references.to_one_device(each),
                "ratio_to_ceiling": references.to_ceiling(each),
                "disturbed": references.disturbed(each) or None,
                "may_differ": each.label in references.may_differ,
            }
            for each in summaries
        ],
        "references": to_plain(references),
        "verdict": verdict(summaries, references),
    }
