"""What servers did, in words for a terminal of 80 columns, in cells, and as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.report.format import MISSING, byte_count, duration, fixed, percent, ratio, short
from headrace.report.model.inputs import Bottleneck, InputSummary, blocked_s, busy_s, occupancy
from headrace.report.model.servers import ROUNDS, ServerSummary, Staleness, to_mean
from headrace.spec.events import InputStageStats, InputStats, ShardStats
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan

SERVER_HEADS = (
    "servers",
    *(f"staleness\n{name}" for name in ("mean", "median", "99 %", "largest")),
    *("pushes\nrefused", "servers\nbusy", "longest\nqueue", "pushed", "pulled"),
)
"""Names of what `server_cells` returns, in lines."""

_MOST_WORKERS = 8


def worker_name(worker: int) -> str:
    """Returns whose staleness it is."""
    return "means of rounds" if worker == ROUNDS else f"worker {worker}"


def server_cells(servers: ServerSummary) -> tuple[str, ...]:
    """Returns one run's servers in one row."""
    staleness = servers.staleness_of_all
    return (
        str(len(servers.by_rank)),
        *(_numbers(staleness) if staleness else [MISSING] * 4),
        percent(servers.refused_share) if servers.refused else "0",
        percent(servers.busy_share),
        str(servers.queue_longest),
        byte_count(sum(shard.pushed_bytes for _, shard in servers.shards)),
        byte_count(sum(shard.pulled_bytes for _, shard in servers.shards)),
    )


def server_line(servers: ServerSummary) -> str:
    """Returns what stands below a comparison."""
    count = len(servers.by_rank)
    many = "servers" if count > 1 else "server"
    return (
        f"{count} {many}, busy {percent(servers.busy_share)}, longest queue {servers.queue_longest}; "
        f"staleness {_words(servers.staleness_of_all)}; refused pushes: {_refused(servers)}"
    )


def server_rows(servers: ServerSummary) -> list[tuple[str, str]]:
    """Returns what is worth saying of a run's servers, as names and values in words."""
    busiest = max(servers.by_rank, key=lambda rank: servers.by_rank[rank].busy_share)
    busy = f"busy {percent(servers.busy_share)} of the time"
    if len(servers.by_rank) > 1:
        busy += f" (rank {busiest}: {percent(servers.by_rank[busiest].busy_share)})"
    queue = f"mean {fixed(max(work.queue_mean for work in servers.by_rank.values()))}"
    pushed = sum(shard.pushed_bytes for _, shard in servers.shards)
    pulled = sum(shard.pulled_bytes for _, shard in servers.shards)
    applied = sum(shard.apply_s for _, shard in servers.shards)
    traffic = f"{byte_count(pushed)} pushed, {byte_count(pulled)} pulled"
    updates = sum(shard.steps for _, shard in servers.shards)
    rows = [
        ("servers", f"{len(servers.by_rank)}, {busy}; queue: {queue}, longest {servers.queue_longest}"),
        ("traffic", traffic + _most(servers, lambda shard: shard.pushed_bytes + shard.pulled_bytes)),
        ("updates", f"{updates} of shards, {duration(applied)} in all" + _most(servers, lambda shard: shard.apply_s)),
        ("refused pushes", _refused(servers)),
        ("staleness", _words(servers.staleness_of_all)),
    ]
    workers = sorted(servers.staleness.keys() | servers.waiting.keys())
    rows += [(worker_name(worker), _worker(servers, worker)) for worker in workers[:_MOST_WORKERS]]
    if len(workers) > _MOST_WORKERS:
        rows.append(("other workers", f"{len(workers) - _MOST_WORKERS} more: see the page, or --json"))
    return rows


def server_plain(servers: ServerSummary) -> dict[str, Any]:
    """Returns the same and more as JSON values, with all digits."""
    return {
        "staleness": _staleness_plain(servers.staleness_of_all),
        "staleness_by_worker": {str(worker): _staleness_plain(each) for worker, each in servers.staleness.items()},
        "staleness_over_time": [{"seconds": point.seconds, **_summary(point.staleness)} for point in servers.over_time],
        "pushes": servers.pushes,
        "refused": dict(servers.refused),
        "refused_share": servers.refused_share,
        "busy_share": servers.busy_share,
        "queue_longest": servers.queue_longest,
        "by_rank": {
            str(rank): {
                **to_plain(work),
                "busy_share": work.busy_share,
                "moved_bytes": work.moved_bytes,
                "apply_s": work.apply_s,
            }
            for rank, work in servers.by_rank.items()
        },
        "waiting": to_plain(servers.waiting),
    }


def _summary(staleness: Staleness) -> dict[str, float]:
    return {
        "mean": staleness.mean,
        "median": staleness.percentile(50),
        "p99": staleness.percentile(99),
        "largest": staleness.largest,
    }


def _staleness_plain(staleness: Staleness | None) -> dict[str, Any] | None:
    if staleness is None:
        return None
    return {**_summary(staleness), "updates": staleness.updates, "counts": to_plain(staleness.counts)}


def _numbers(staleness: Staleness) -> list[str]:
    median, most = staleness.percentile(50), staleness.percentile(99)
    return [fixed(staleness.mean), str(median), str(most), str(staleness.largest)]


def _words(staleness: Staleness | None) -> str:
    if staleness is None:
        return MISSING
    mean, median, most, largest = _numbers(staleness)
    return f"mean {mean}, median {median}, 99 % at most {most}, largest {largest}"


def _refused(servers: ServerSummary) -> str:
    if not servers.refused:
        return "none"
    reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in servers.refused.items())
    return f"{percent(servers.refused_share)} ({reasons})"


def _worker(servers: ServerSummary, worker: int) -> str:
    staleness, waiting = servers.staleness.get(worker), servers.waiting.get(worker)
    said = [f"staleness {_words(staleness)}"] if staleness else []
    if waiting is not None:
        parts = (("compute", waiting.compute_s), ("exchange", waiting.exchange_s), ("waiting for data", waiting.wait_s))
        said.append(", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds >= 5e-4))
        if waiting.answers_s:
            said.append(f"answers {duration(sum(waiting.answers_s.values()))}")
    return "; ".join(filter(None, said))


def _most(servers: ServerSummary, load: Callable[[ShardStats], float]) -> str:
    """Says how far the server and the shard that carry most are above the mean, where there are several."""
    said = []
    if len(servers.by_rank) > 1:
        factor, which = to_mean([sum(map(load, work.shards)) for work in servers.by_rank.values()])
        said.append(f"rank {list(servers.by_rank)[which]} {ratio(factor)}")
    shards: Sequence[tuple[int, ShardStats]] = servers.shards
    if len(shards) > 1:
        factor, which = to_mean([load(shard) for _, shard in shards])
        said.append(f"shard {shards[which][1].name} {ratio(factor)}")
    return f"; most: {', '.join(said)} × the mean" if said else ""


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
