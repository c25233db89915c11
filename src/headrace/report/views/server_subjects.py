"""What a report says of parameter servers: tables of fields, see `subjects`."""

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
from headrace.report.model.servers import ROUNDS, ServerSummary, ServerWork, Staleness, moved_bytes, to_mean
from headrace.report.model.training import STEP_PARTS
from headrace.spec.events import ShardStats

_MOST_WORKERS = 8


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


def _backups_text(servers: ServerSummary) -> str | None:
    windows = servers.unguarded_s
    if not windows:
        return None
    times = "once" if len(windows) == 1 else f"{len(windows)} times"
    return (
        f"ready {times}, after {duration(max(windows))} at most; the loss of a server in that time would have ended "
        "the run"
    )


def _row_load_text(servers: ServerSummary) -> str | None:
    rows = servers.row_moves
    if rows is None:
        return None
    first, last = (to_mean(list(each.values())) for each in (rows.first, rows.asked))
    loads = ", ".join(f"rank {rank} {short(load)}" for rank, load in rows.asked.items())
    return f"{loads} pulled at the last look; most: {fixed(last[0])} × the mean (at the first look {fixed(first[0])})"


def _hot_rows_text(servers: ServerSummary) -> str | None:
    rows = servers.row_moves
    if rows is None or not rows.hottest:
        return None
    return ", ".join(f"{row.table} {row.row} ({percent(rows.share(row))})" for row in rows.hottest)


def _row_reads_text(servers: ServerSummary) -> str | None:
    reads = servers.row_reads
    if reads is None:
        return None
    copied, early = (percent(count / max(1, reads.asked)) for count in (reads.copied, reads.early))
    saved = byte_count(reads.saved_bytes)
    return f"{short(reads.asked)}; {copied} from copies of hot rows ({saved} not pulled), {early} pulled a step early"


def _row_moves_text(servers: ServerSummary) -> str | None:
    rows = servers.row_moves
    if rows is None:
        return None
    if not rows.moves:
        return "none"
    pauses = rows.pauses_s
    most = pauses[-(-len(pauses) * 99 // 100) - 1]
    waited = f"on the way for {duration(pauses[len(pauses) // 2])}, 99 % at most {duration(most)}"
    return f"{rows.moves} of {short(rows.rows)} rows, {byte_count(rows.bytes)}; {waited}"


SERVER: tuple[Field[ServerWork], ...] = json_fields(
    *("busy_s", "seconds", "queue_mean", "queue_longest", "shards", "busy_share", "moved_bytes", "apply_s")
)

SERVERS: tuple[Field[ServerSummary], ...] = (
    Field(lambda servers: len(servers.by_rank), head="servers"),
    Field(_servers_text, label="servers"),
    Field(_traffic_text, label="traffic"),
    Field(_updates_text, label="updates"),
    Field(_refused_text, label="refused pushes"),
    Field(_backups_text, label="backups"),
    Field(_row_load_text, label="row load"),
    Field(_hot_rows_text, label="hot rows"),
    Field(_row_reads_text, label="rows read"),
    Field(_row_moves_text, label="row moves"),
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
    *json_fields("waiting", "row_moves", "row_reads", "unguarded_s"),
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
