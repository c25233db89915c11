"""Which pictures a run's servers give, and how each is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.drawing.rows import Bar, Histogram, Mark, draw_bars, draw_histograms
from headrace.report.format import byte_count, duration, fixed, percent, short
from headrace.report.model.servers import UNEVEN, ServerSummary, Staleness, Waiting, moved_bytes
from headrace.report.model.summary import Summary
from headrace.report.model.training import STEP_PARTS
from headrace.report.views.server_answers import (
    applied_text,
    over_time_answer,
    shards_answer,
    staleness_answer,
    traffic_answer,
    waiting_answer,
    work_answer,
)
from headrace.report.views.server_subjects import worker_name
from headrace.report.views.style import DASHES, PARTS, Picture, RunStyle, run_styles
from headrace.spec.events import ShardStats

_MOST_WORKERS = 16
_MOST_SHARDS = 12
_FEWER = 4
"""So many of either, where several runs share a picture."""

SERVER_GROUP = "Servers"
"""The fold of the page that has these pictures."""
_SECOND = PARTS["wait_s"]
"""Grey beside the run's colour, as optimizer state is beside parameters."""


@dataclass(frozen=True)
class _Shown:
    """A run with servers; `prefix` stands before the names of its processes where several runs share a picture."""

    prefix: str
    style: RunStyle
    servers: ServerSummary

    @property
    def alone(self) -> bool:
        return not self.prefix


def server_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns the pictures of the runs that have servers."""
    shown = [
        _Shown(f"{each.name}, " * (len(summaries) > 1), style, each.servers)
        for each, style in zip(summaries, run_styles(summaries), strict=True)
        if each.servers is not None
    ]
    if not shown:
        return ()
    drawn = (
        _histograms(shown),
        _over_time(shown),
        _waiting(shown),
        _work(shown),
        _traffic_of_servers(shown),
        _of_shards(
            shown,
            "Which shards move the most?",
            "MB",
            "The same for each shard; behind its name the rank of its server, and the line at the shards' mean.",
            lambda shard: moved_bytes(shard) * 1e-6,
            lambda shard, style: _traffic([shard], style),
            shards_answer(_named(shown), "moved", moved_bytes, lambda shard: byte_count(moved_bytes(shard))),
            ("pushed", "pulled"),
        ),
        _of_shards(
            shown,
            "Which shards' updates take the most time?",
            "seconds",
            "Seconds that the updates of each shard took; on the right, how many there were and how long one took.",
            lambda shard: shard.apply_s,
            _apply_time,
            shards_answer(_named(shown), "took", attrgetter("apply_s"), applied_text),
            ("updates",),
        ),
    )
    return tuple(replace(picture, group=SERVER_GROUP) for picture in drawn if picture is not None)


def bar_picture(
    title: str, bars: Sequence[Bar], unit: str, reading: str, key: str = "", answer: str = "", group: str = ""
) -> Picture | None:
    """Returns a picture of bars; None where there are none."""
    return Picture(title, draw_bars(title, bars, unit), reading, key, answer, group) if bars else None


def _named(shown: Sequence[_Shown]) -> list[tuple[str, ServerSummary]]:
    return [(run.prefix, run.servers) for run in shown]


def _histograms(shown: Sequence[_Shown]) -> Picture | None:
    rows = [
        Histogram(
            label,
            f"mean {fixed(each.mean)}{f', 99 % at most {each.percentile(99)}' * run.alone}, largest {each.largest}",
            each.counts,
            each.mean,
            run.style.colour,
        )
        for run in shown
        for label, each in _rows_of(run, len(shown) > 1)
    ]
    if not rows:
        return None
    title = "How old are the parameters of a gradient?"
    who = "run" if len(shown) > 1 else "worker"
    cut = len(shown) == 1 and len(shown[0].servers.staleness) > _MOST_WORKERS
    reading = (
        "How many updates a shard had seen between the parameters that a gradient was made with and those that it was "
        f"applied to: one row a {who}. A column's height is its part of the {who}'s updates, on the same scale in "
        "every row; the upright line is the mean." + f" The first {_MOST_WORKERS} workers are shown." * cut
    )
    drawn = draw_histograms(title, rows, "staleness, updates of the shard")
    return Picture(title, drawn, reading, answer=staleness_answer(_named(shown)))


def _rows_of(run: _Shown, together: bool) -> list[tuple[str, Staleness]]:
    """Returns the workers, or all of them together where several runs share a picture."""
    if together:
        staleness = run.servers.staleness_of_all
        return [] if staleness is None else [(run.prefix.removesuffix(", "), staleness)]
    workers = list(run.servers.staleness.items())[:_MOST_WORKERS]
    return [(f"{run.prefix}{worker_name(worker)}", each) for worker, each in workers]


def _over_time(shown: Sequence[_Shown]) -> Picture | None:
    curves = []
    for run in shown:
        points = run.servers.over_time
        if len(points) > 1:
            mean = [(point.seconds, point.staleness.mean) for point in points]
            name = f"{run.prefix}mean"
            curves.append(Curve(mean, run.style.colour, run.style.dashes, run.style.width, name=name))
            if run.alone:
                most = [(point.seconds, float(point.staleness.percentile(99))) for point in points]
                curves.append(Curve(most, run.style.colour, DASHES[2], 1.2, name="99 %"))
    if not curves:
        return None
    title = "Does staleness grow?"
    picture = draw_curves(title, curves, "seconds of training, without evaluations", "staleness", from_zero=True)
    lines = "Solid: the mean; dotted: what 99 % do not exceed" if shown[0].alone else "The line: the mean"
    reading = f"{lines}, of all workers' updates since the point before (servers speak about once a second)."
    return Picture(title, picture, reading, "served", over_time_answer(_named(shown)))


_WAITING_PARTS = ("wait_s", "compute_s", "exchange_s", "update_s")


def _waiting(shown: Sequence[_Shown]) -> Picture | None:
    bars = []
    most = _FEWER if len(shown) > 1 else _MOST_WORKERS
    for run in shown:
        for worker, each in list(run.servers.waiting.items())[:most]:
            parts = [(getattr(each, part), PARTS[part]) for part in _WAITING_PARTS]
            names = [STEP_PARTS[part] for part in _WAITING_PARTS]
            label, note = f"{run.prefix}worker {worker}", _requests(each, run.alone)
            bars.append(Bar(label, note, parts, inside=True, names=names))
    cut = any(len(run.servers.waiting) > most for run in shown)
    reading = (
        "Seconds of all of a worker's steps, in the order: waiting for data, compute, exchange, update. On the right, "
        "how long its requests lay at the servers until they were answered: others' turns, the updates, and, under a "
        "bound, slower workers. Several requests are under way at once, so that answers may add up to more than the "
        "exchange." + f" The first {most} workers of each run are shown." * cut
    )
    return bar_picture("Who waited for whom?", bars, "seconds", reading, "parts", waiting_answer(_named(shown)))


def _requests(waiting: Waiting, by_server: bool) -> str:
    """Returns how long a worker's requests took, by server where there is room."""
    if by_server and 1 < len(waiting.answers_s) <= _FEWER:
        each = ", ".join(f"{rank}: {fixed(seconds)}" for rank, seconds in waiting.answers_s.items())
        return f"answers of server {each} s"
    return f"answers {duration(sum(waiting.answers_s.values()))}" if waiting.answers_s else ""


def _work(shown: Sequence[_Shown]) -> Picture | None:
    bars = []
    for run in shown:
        for rank, work in run.servers.by_rank.items():
            queue = f", queue mean {fixed(work.queue_mean)}, longest {work.queue_longest}" * run.alone
            parts = [(work.apply_s, run.style.colour), (max(0.0, work.busy_s - work.apply_s), _SECOND)]
            note = f"busy {percent(work.busy_share)}{queue}"
            bars.append(Bar(f"{run.prefix}server {rank}", note, parts, names=("updates", "messages")))
    reading = (
        "Seconds in which each server (its rank) was busy: applying updates (in the run's colour, on the left), and "
        "with messages (grey, on the right)." + " Queue: messages that were there when it looked." * shown[0].alone
    )
    return bar_picture("How busy are the servers?", bars, "seconds", reading, answer=work_answer(_named(shown)))


def _traffic_of_servers(shown: Sequence[_Shown]) -> Picture | None:
    bars = []
    for run in shown:
        marks = _mean_mark([work.moved_bytes * 1e-6 for work in run.servers.by_rank.values()])
        for rank, work in run.servers.by_rank.items():
            note, parts = _traffic(work.shards, run.style)
            bars.append(Bar(f"{run.prefix}server {rank}", note, parts, marks, names=("pushed", "pulled")))
    reading = (
        "Bytes that workers pushed to each server (in the run's colour, on the left) and pulled from it (grey, on the "
        f"right). The upright line is the servers' mean; above {UNEVEN} × the mean the run says so."
    )
    return bar_picture("How much does each server move?", bars, "MB", reading, answer=traffic_answer(_named(shown)))


def _of_shards(
    shown: Sequence[_Shown],
    title: str,
    unit: str,
    reading: str,
    load: Callable[[ShardStats], float],
    bar: Callable[[ShardStats, RunStyle], tuple[str, list[tuple[float, str]]]],
    answer: str,
    names: Sequence[str],
) -> Picture | None:
    bars = []
    count = _FEWER if len(shown) > 1 else _MOST_SHARDS
    for run in shown:
        shards = sorted(run.servers.shards, key=lambda pair: -load(pair[1]))
        marks = _mean_mark([load(shard) for _, shard in shards])
        bars += [
            Bar(f"{run.prefix}{each.name} on {rank}", *bar(each, run.style), marks, names=names)
            for rank, each in shards[:count]
        ]
    most = max(len(run.servers.shards) for run in shown)
    if most > count:
        reading += f" The {count} largest of each run are shown, of up to {most}."
    return bar_picture(title, bars, unit, reading, answer=answer)


def _apply_time(shard: ShardStats, style: RunStyle) -> tuple[str, list[tuple[float, str]]]:
    note = f"{short(shard.steps)} × {duration(shard.apply_s / shard.steps)}" if shard.steps else "no update"
    return note, [(shard.apply_s, style.colour)]


def _traffic(shards: Sequence[ShardStats], style: RunStyle) -> tuple[str, list[tuple[float, str]]]:
    """Returns the note and the parts of a bar."""
    pushed, pulled = sum(shard.pushed_bytes for shard in shards), sum(shard.pulled_bytes for shard in shards)
    note = f"{byte_count(pushed)} pushed, {byte_count(pulled)} pulled"
    return note, [(pushed * 1e-6, style.colour), (pulled * 1e-6, _SECOND)]


def _mean_mark(values: Sequence[float]) -> list[Mark]:
    """Returns a line at the mean of several values."""
    mean = sum(values) / len(values) if values else 0.0
    return [Mark(mean, tip=f"mean: {short(mean)}")] if len(values) > 1 else []
