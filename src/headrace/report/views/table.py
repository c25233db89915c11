"""Runs as tables for a terminal of 80 columns, and as JSON values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.report.format import MISSING, byte_count, clean, duration, fixed, percent, ratio, short
from headrace.report.model.pipeline_steps import passed_plain, passed_rows
from headrace.report.model.summary import References, Summary, verdict
from headrace.report.model.training import StepTimes, averaging_line, averaging_plain, averaging_rows
from headrace.report.views.subjects import (
    bottleneck_plain,
    input_plain,
    input_rows,
    server_line,
    server_plain,
    server_rows,
)
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    # Importing rich takes 40 ms, which `headrace --help` does not have.
    from rich.table import Table

_NAME_WIDTH = 15
_METRIC_WIDTH = 8
_PARTS = ("compute_s", "exchange_s", "update_s", "wait_s")


def first_metric(summaries: Sequence[Summary]) -> str | None:
    """Returns the metric to show where there is room for one: the first that is not the loss."""
    names = dict.fromkeys(name for each in summaries for name in each.metrics)
    return next((name for name in names if name != "loss"), next(iter(names), None))


def ending(summary: Summary) -> str:
    """Returns in one line how a run ended that did not end well; empty where it did."""
    if summary.status == "ok":
        return ""
    failure = summary.outcome.failure
    if failure is None:
        return f"{summary.name}: {summary.status} after {summary.steps} steps"
    who = f"rank {failure.rank}" if failure.rank >= 0 else "the launcher"
    return f"{summary.name}: {summary.status} at step {failure.step}, says {who}: {failure.cause}"


def comparison_table(summaries: Sequence[Summary], references: References) -> Table:
    """Returns one row a run, at most 80 columns wide; its caption explains the abbreviations."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    metric = first_metric(summaries)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, min_width=80, caption_justify="left")
    table.add_column("strategy", overflow="fold", max_width=_NAME_WIDTH)
    for header, width in (
        ("N", 3),
        ("\n".join(_header_lines(metric or "metric")), _METRIC_WIDTH),
        ("ex/s", 5),
        ("×\none", 4),
        ("×\nceil", 4),
        ("MB/\nstep", 5),
        ("comp\nms", 5),
        ("exch\nms", 5),
        ("upd\nms", 5),
        ("wait\nms", 5),
        ("peak\nMB", 5),
    ):
        table.add_column(Text(header), justify="right", no_wrap=True, max_width=width)
    for each in summaries:
        mark = "" if each.status == "ok" else " !"
        cells = _cells(each, references, metric)
        table.add_row(Text(clean(each.name) + mark), *(Text(cell) for cell in cells))
    one = references.one_device_examples_per_s
    if one and not any(each.strategy == "one_device" for each in summaries):
        # What one has without us belongs into every table.
        table.add_row("one process, all threads", "1", "", short(one), "1.00", *[""] * 7, style="dim")
    table.caption = Text(clean("\n".join(_legend(summaries, references, metric))))
    table.caption_style = "dim"
    return table


def _header_lines(name: str) -> list[str]:
    return [line for word in clean(name).split("_") for line in textwrap.wrap(word, _METRIC_WIDTH)]


def _cells(summary: Summary, references: References, metric: str | None) -> tuple[str, ...]:
    moved = summary.cost.moved_bytes_per_step
    peak = summary.cost.peak_memory_bytes
    times = summary.times
    return (
        str(summary.workers),
        short(summary.metrics.get(metric)) if metric else MISSING,
        short(summary.examples_per_s),
        ratio(references.to_one_device(summary)),
        ratio(references.to_ceiling(summary)),
        fixed(moved, 1e-6),
        *(fixed(getattr(times, part) if times else None, 1e3) for part in _PARTS),
        fixed(peak, 1e-6),
    )


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
    lines += [f"{each.name}: {server_line(each.servers)}." for each in summaries if each.servers is not None]
    lines += [f"{each.name}: {averaging_line(each.averaging)}." for each in summaries if each.averaging is not None]
    lines += [f"{each.name}: {each.bottleneck.line}." for each in summaries if each.bottleneck is not None]
    return lines + [f"! {ending(each)}" for each in summaries if each.status != "ok"]


def run_table(summary: Summary) -> Table:
    """Returns one run as two columns, name and value."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in run_rows(summary):
        table.add_row(Text(name), Text(clean(value)))
    return table


def run_rows(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Returns what is worth saying of one run, as names and values in words."""
    started, training, cost = summary.started, summary.training, summary.cost
    steps = f"{training.steps} of {started.global_batch_size} examples, {training.epochs:.4g} epochs"
    rows = [
        ("run", summary.name),
        ("status", ending(summary) or "ok"),
        *_attempts(summary),
        ("processes", _processes(summary)),
        ("steps", steps),
        ("training time", duration(training.seconds)),
        ("examples/s", f"{short(training.examples_per_s)} in steady state"),
    ]
    if summary.curves.evaluations:
        last = summary.curves.evaluations[-1]
        metrics = ", ".join(f"{name} {short(value)}" for name, value in last.metrics.items())
        rows.append(("evaluation", f"{metrics} after {last.epochs:.4g} epochs"))
    if summary.times is not None:
        rows.append(("mean step", step_words(summary.times)))
    rows += [] if summary.inputs is None else input_rows(summary.inputs, summary.bottleneck)
    rows += [] if summary.servers is None else server_rows(summary.servers)
    rows += [] if summary.averaging is None else averaging_rows(summary.averaging)
    rows += [] if summary.passed is None else passed_rows(summary.passed)
    together = f"in all workers {'and servers ' * (summary.servers is not None)}together"
    rows += [
        (name, f"{byte_count(value)} {where}")
        for name, value, where in (
            ("moved a step", cost.moved_bytes_per_step, "by all workers"),
            ("peak memory", cost.peak_memory_bytes, "in the largest process"),
            ("parameters", cost.parameter_bytes, together),
            ("optimizer state", cost.optimizer_bytes, together),
        )
        if value is not None
    ]
    rows += _saves(summary)
    if summary.outcome.torn_lines:
        rows.append(("torn lines", f"{summary.outcome.torn_lines} event files end in half a line"))
    return tuple(rows) + tuple(("notice", notice) for notice in summary.outcome.notices)


def _attempts(summary: Summary) -> list[tuple[str, str]]:
    count, resumed = summary.outcome.attempts, summary.started.resumed_step
    if count == 1:
        return [("resumed", f"at step {resumed}, which another run had reached")] if resumed else []
    return [("attempts", f"{count}, resumed at step {resumed}")]


def _saves(summary: Summary) -> list[tuple[str, str]]:
    """What there is to say of checkpoints, and of rounds that were left out."""
    rows = []
    saves, bad = summary.saves, summary.non_finite
    if saves is not None:
        count = f"{saves.count}, the last at step {saves.last_step}, {byte_count(saves.bytes)}"
        stall = f"mean {duration(saves.mean_stall_s)}, longest {duration(saves.longest_stall_s)}"
        rows.append(("checkpoints", f"{count}; training stood still: {stall}, {percent(saves.share)} of its time"))
    if bad is not None:
        left_out = bad.skipped + bad.rolled_back
        back = f", {bad.rolled_back} of them with a rollback" if bad.rolled_back else ""
        rows.append(("not finite", f"{left_out} round{'s' * (left_out != 1)} left out{back}"))
    return rows


def step_words(times: StepTimes) -> str:
    """Returns a mean step in words: "12.3 ms: compute 9.10 (74 %), exchange 2.10 (17 %), ..."."""
    total = times.total_s
    parts = ", ".join(
        f"{name} {fixed(value, 1e3)} ({percent(value / total) if total else MISSING})"
        for name, value in (
            ("compute", times.compute_s),
            ("exchange", times.exchange_s),
            ("update", times.update_s),
            ("waiting for data", times.wait_s),
            ("between steps", times.other_s),
        )
        if value >= 5e-6
    )
    return f"{fixed(total, 1e3)} ms: {parts}"


def _processes(summary: Summary) -> str:
    hosts = ", ".join(summary.outcome.hosts) or MISSING
    workers = f"{summary.workers} worker{'s' if summary.workers != 1 else ''}"
    if summary.servers is not None:
        count = len(summary.servers.by_rank)
        workers += f" and {count} server{'s' * (count != 1)}"
    threads = f"{summary.threads} thread{'s' if summary.threads != 1 else ''} each"
    return f"{workers} on {hosts} ({summary.device}), {threads}"


def run_plain(summary: Summary) -> dict[str, Any]:
    """Returns one run as JSON values; what is unknown or not finite is None."""
    training, cost, failure = summary.training, summary.cost, summary.outcome.failure
    return {
        "label": summary.label,
        "strategy": summary.strategy,
        "workers": summary.workers,
        "device": summary.device,
        "threads": summary.threads,
        "status": summary.status,
        "attempts": summary.outcome.attempts,
        "resumed_step": summary.started.resumed_step,
        "steps": training.steps,
        "epochs": training.epochs,
        "examples": training.examples,
        "seconds": training.seconds,
        "examples_per_s": training.examples_per_s,
        "metrics": {name: _finite(value) for name, value in summary.metrics.items()},
        "step_seconds": _times_plain(summary.times),
        "step_seconds_by_rank": {str(rank): _times_plain(each) for rank, each in summary.times_by_rank.items()},
        "moved_bytes_per_step": cost.moved_bytes_per_step,
        "peak_memory_bytes": cost.peak_memory_bytes,
        "parameter_bytes": cost.parameter_bytes,
        "optimizer_bytes": cost.optimizer_bytes,
        "saves": None if summary.saves is None else to_plain(summary.saves),
        "non_finite": None if summary.non_finite is None else to_plain(summary.non_finite),
        "servers": None if summary.servers is None else server_plain(summary.servers),
        "averaging": None if summary.averaging is None else averaging_plain(summary.averaging),
        "passed": None if summary.passed is None else passed_plain(summary.passed),
        "input": None if summary.inputs is None else input_plain(summary.inputs),
        "bottleneck": bottleneck_plain(summary.bottleneck),
        "notices": list(summary.outcome.notices),
        "failure": failure
        and {"rank": failure.rank, "step": failure.step, "cause": failure.cause, "traceback": failure.traceback},
    }


def comparison_plain(summaries: Sequence[Summary], references: References) -> dict[str, Any]:
    """Returns what `comparison_table` shows as JSON values, with all digits."""
    return {
        "runs": [
            {
                **run_plain(each),
                "ratio_to_one_device": references.to_one_device(each),
                "ratio_to_ceiling": references.to_ceiling(each),
            }
            for each in summaries
        ],
        "references": {
            "one_device_examples_per_s": references.one_device_examples_per_s,
            "one_thread_examples_per_s": references.one_thread_examples_per_s,
            "ceiling_examples_per_s": {
                str(workers): rate for workers, rate in references.ceiling_examples_per_s.items()
            },
        },
        "verdict": verdict(summaries, references),
    }


def _times_plain(times: StepTimes | None) -> dict[str, float] | None:
    if times is None:
        return None
    return {
        "wait": times.wait_s,
        "compute": times.compute_s,
        "exchange": times.exchange_s,
        "update": times.update_s,
        "other": times.other_s,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
