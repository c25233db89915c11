"""What a report says of each subject: one table of fields, which every renderer (rows, JSON, cells, heads) reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from headrace.report.format import (
    MISSING,
    Field,
    byte_count,
    duration,
    fixed,
    json_fields,
    json_mapping,
    percent,
    plural,
    short,
    to_cells,
    to_json,
)
from headrace.report.model.inputs import Bottleneck, InputSummary, blocked_s, busy_s, occupancy
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.servers import ROUNDS, ServerSummary, ServerWork, Staleness, moved_bytes, to_mean
from headrace.report.model.training import STEP_PARTS, AveragingSummary, BalanceSummary, StepTimes
from headrace.spec.events import InputStageStats, InputStats, ShardStats

_MOST_WORKERS = 8


def step_text(times: StepTimes) -> str:
    """Returns a mean step as "12.3 ms: compute 9.10 (74 %), exchange 2.10 (17 %), ..."."""
    total = times.total_s
    parts = ", ".join(
        f"{STEP_PARTS[part]} {fixed(value, 1e3)} ({percent(value / total) if total else MISSING})"
        for part in ("compute_s", "exchange_s", "update_s", "wait_s", "other_s")
        if (value := getattr(times, part)) >= 5e-6
    )
    return f"{fixed(total, 1e3)} ms: {parts}"


STEP: tuple[Field[StepTimes], ...] = tuple(Field(attrgetter(part), key=part.removesuffix("_s")) for part in STEP_PARTS)


def worker_name(worker: int) -> str:
    """Returns the name of a key of `ServerSummary.staleness`."""
    return "means of rounds" if worker == ROUNDS else f"worker {worker}"


STALENESS: tuple[Field[Staleness], ...] = (
    Field(lambda each: each.mean, fixed, "mean", head="mean"),
    Field(lambda each: each.percentile(50), key="median", head="median"),
    Field(lambda each: each.percentile(99), key="p99", head="99 %"),
    Field(lambda each: each.largest, key="largest", head="largest"),
    *json_fields("updates", "counts"),
)


def _staleness_text(staleness: Staleness | None) -> str:
    if staleness is None:
        return MISSING
    mean, median, most, largest = to_cells(STALENESS, staleness)
    return f"mean {mean}, median {median}, 99 % at most {most}, largest {largest}"


def _staleness_cell(field: Field[Staleness], servers: ServerSummary) -> str:
    staleness = servers.staleness_of_all
    return MISSING if staleness is None else field.format(field.get(staleness))


def _total(name: str, servers: ServerSummary) -> Any:
    return sum(getattr(shard, name) for _, shard in servers.shards)


def _servers_text(servers: ServerSummary) -> str:
    busiest = max(servers.by_rank, key=lambda rank: servers.by_rank[rank].busy_share)
    busy = f"busy {percent(servers.busy_share)} of the time"
    if len(servers.by_rank) > 1:
        busy += f" (rank {busiest}: {percent(servers.by_rank[busiest].busy_share)})"
    queue = fixed(max(work.queue_mean for work in servers.by_rank.values()))
    return f"{len(servers.by_rank)}, {busy}; queue: mean {queue}, longest {servers.queue_longest}"


def _traffic_text(servers: ServerSummary) -> str:
    pushed, pulled = (byte_count(_total(name, servers)) for name in ("pushed_bytes", "pulled_bytes"))
    return f"{pushed} pushed, {pulled} pulled{_most_text(servers, moved_bytes)}"


def _updates_text(servers: ServerSummary) -> str:
    most = _most_text(servers, attrgetter("apply_s"))
    return f"{_total('steps', servers)} of shards, {duration(_total('apply_s', servers))} in all{most}"


def _most_text(servers: ServerSummary, load: Callable[[ShardStats], float]) -> str:
    """Returns how far the most loaded server and shard are above the mean, where there are several."""
    parts = []
    if len(servers.by_rank) > 1:
        factor, which = to_mean([sum(map(load, work.shards)) for work in servers.by_rank.values()])
        parts.append(f"rank {list(servers.by_rank)[which]} {fixed(factor)}")
    shards = servers.shards
    if len(shards) > 1:
        factor, which = to_mean([load(shard) for _, shard in shards])
        parts.append(f"shard {shards[which][1].name} {fixed(factor)}")
    return f"; most: {', '.join(parts)} × the mean" if parts else ""


def _refused_text(servers: ServerSummary) -> str:
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in servers.refused.items())
    return f"{percent(servers.refused_share)} ({reasons})" if reasons else "none"


SERVER: tuple[Field[ServerWork], ...] = json_fields(
    *("busy_s", "seconds", "queue_mean", "queue_longest", "shards", "busy_share", "moved_bytes", "apply_s")
)

SERVERS: tuple[Field[ServerSummary], ...] = (
    Field(lambda servers: len(servers.by_rank), head="servers"),
    Field(_servers_text, label="servers"),
    Field(_traffic_text, label="traffic"),
    Field(_updates_text, label="updates"),
    Field(_refused_text, label="refused pushes"),
    Field(lambda servers: _staleness_text(servers.staleness_of_all), label="staleness"),
    Field(lambda servers: to_json(STALENESS, servers.staleness_of_all), key="staleness"),
    *(Field(partial(_staleness_cell, each), head=f"staleness\n{each.head}") for each in STALENESS if each.head),
    json_mapping(STALENESS, "staleness", key="staleness_by_worker"),
    Field(
        lambda servers: [
            {"seconds": point.seconds, **(to_json(STALENESS[:4], point.staleness) or {})} for point in servers.over_time
        ],
        key="staleness_over_time",
    ),
    *json_fields("pushes", "refused", "refused_share"),
    Field(lambda servers: percent(servers.refused_share) if servers.refused else "0", head="pushes\nrefused"),
    Field(attrgetter("busy_share"), percent, key="busy_share", head="servers\nbusy"),
    Field(attrgetter("queue_longest"), key="queue_longest", head="longest\nqueue"),
    json_mapping(SERVER, "by_rank", key="by_rank"),
    *json_fields("waiting"),
    *(Field(partial(_total, f"{name}_bytes"), byte_count, head=name) for name in ("pushed", "pulled")),
)


def worker_rows(servers: ServerSummary | None) -> list[tuple[str, str]]:
    """Returns a row for each of the first workers: staleness, time, and how long servers took to answer it."""
    if servers is None:
        return []
    workers = sorted(servers.staleness.keys() | servers.waiting.keys())
    rows = [(worker_name(worker), _worker_text(servers, worker)) for worker in workers[:_MOST_WORKERS]]
    if len(workers) > _MOST_WORKERS:
        rows.append(("other workers", f"{len(workers) - _MOST_WORKERS} more: see the page, or --json"))
    return rows


def _worker_text(servers: ServerSummary, worker: int) -> str:
    staleness, waiting = servers.staleness.get(worker), servers.waiting.get(worker)
    parts = [f"staleness {_staleness_text(staleness)}"] if staleness else []
    if waiting is not None:
        times = ((STEP_PARTS[part], getattr(waiting, part)) for part in ("compute_s", "exchange_s", "wait_s"))
        parts.append(", ".join(f"{name} {duration(seconds)}" for name, seconds in times if seconds >= 5e-4))
        if waiting.answers_s:
            parts.append(f"answers {duration(sum(waiting.answers_s.values()))}")
    return "; ".join(filter(None, parts))


def server_line(servers: ServerSummary) -> str:
    """Returns the sentence below a comparison."""
    return (
        f"{plural(len(servers.by_rank), 'server')}, busy {percent(servers.busy_share)}, longest queue "
        f"{servers.queue_longest}; staleness {_staleness_text(servers.staleness_of_all)}; refused pushes: "
        f"{_refused_text(servers)}"
    )


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
    *json_fields("stage", "rank", "share", "because", "remedy"),
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
    *json_fields("meetings", "mean_rounds", "mean_drift"),
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
