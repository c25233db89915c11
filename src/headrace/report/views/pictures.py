"""The pictures of the page, and the sentences below each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from headrace.report.format import byte_count, fixed, percent, plural, short
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.summary import Summary
from headrace.report.model.training import BalanceSummary, LossPoint, StepTimes
from headrace.report.model.verdict import References
from headrace.report.views.drawing import Bar, Curve, Lane, Mark, draw_bars, draw_curves, draw_lanes
from headrace.report.views.server_pictures import server_pictures
from headrace.report.views.style import PARTS, Picture, run_styles

_SMOOTH = 20
"""A loss curve is the mean over this part (1/20) of its points around each."""

_MOST_DOTS = 60
_MOST_RANKS = 8
_MOST_METRICS = 4
_DASHED = (2.0, 1.3)
_DOTTED = (0.6, 0.6)


def _curves_of(
    summaries: Sequence[Summary], points_of: Callable[[Summary], Sequence[tuple[float, float]]]
) -> list[Curve]:
    """Returns a curve for each run that has points, in the run's style."""
    curves = []
    for each, style in zip(summaries, run_styles(summaries), strict=True):
        if points := points_of(each):
            curves.append(Curve(points, style.colour, style.dashes, style.width))
    return curves


def averaging_pictures(summaries: Sequence[Summary]) -> list[Picture]:
    """Returns drift and period of the runs whose workers met to average."""

    def picture(title: str, name: str, axis: str, reading: str) -> Picture:
        curves = _curves_of(
            summaries,
            lambda run: [
                (float(each.step), float(getattr(each, name)))
                for each in (run.averaging.meetings if run.averaging else ())
            ],
        )
        curves = [replace(each, dots=len(each.points) <= _MOST_DOTS) for each in curves]
        return Picture(title, draw_curves(title, curves, "rounds", axis), reading, "runs")

    shown = [each.averaging.meetings for each in summaries if each.averaging is not None]
    if not shown:
        return []
    drift = picture(
        "Drift when workers meet",
        "drift",
        "distance from the mean, relative",
        "How far the worker that was furthest away was from the mean of all, over the norm of the mean. What grows "
        "from meeting to meeting asks for a shorter period.",
    )
    if all(meeting.period == meetings[0].period for meetings in shown for meeting in meetings):
        return [drift]
    period = picture(
        "Rounds between meetings",
        "rounds",
        "rounds since the last meeting",
        "How long workers went on by themselves. An automatic period grows until the exchange takes its share of the "
        "time and no more, or until drift holds it.",
    )
    return [drift, period]


_COLOURS = {False: PARTS["compute_s"], True: PARTS["update_s"]}
"""Of forward and backward."""
_WAIT = PARTS["other_s"]
_SIZE_COLOURS = (PARTS["compute_s"], PARTS["update_s"])


def passed_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns a picture for each run that has a pipeline step."""
    return tuple(
        _step_picture(f"A step of {each.name}" if len(summaries) > 1 else "A step of the pipeline", each.passed)
        for each in summaries
        if each.passed is not None
    )


def _step_picture(title: str, passed: PipelineStep) -> Picture:
    measured, scheduled = [], []
    for place, (rank, passes) in enumerate(passed.passes.items()):
        pieces = []
        for each in passes:
            start, ready = each.began_s - passed.began_s, each.began_s + each.waited_s - passed.began_s
            pieces.append((start, each.waited_s, _WAIT, ""))
            worked_s = each.ended_s - each.began_s - each.waited_s
            pieces.append((ready, worked_s, _COLOURS[each.backward], str(each.micro_batch)))
        measured.append(Lane(f"rank {rank}", pieces))
        boxes = [
            (span.start, span.stop - span.start, _COLOURS[span.action.backward], str(span.action.micro_batch))
            for span in passed.scheduled
            if span.rank == place
        ]
        scheduled.append(Lane(f"rank {rank}", boxes))
    groups = (
        (f"as measured in step {passed.step}: {percent(passed.bubble)} bubble", measured),
        (f"by the schedule, were all stages alike: {percent(passed.scheduled_bubble)} bubble", scheduled),
    )
    reading = (
        "Each box is a micro-batch in a stage: blue forward, violet backward, its number inside; grey is waiting for "
        "another stage. The bubble is the part of the time in which ranks work on nothing. There is more of it than in "
        "the schedule where stages take different times, where transfers take time, and where others want the cores."
    )
    return Picture(title, draw_lanes(title, groups, "milliseconds", 1e3), reading)


def balance_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns a picture for each run whose shares of a batch have changed."""
    return tuple(
        _shares_picture(
            f"Shares of the batch of {each.name}" if len(summaries) > 1 else "Shares of the batch", each.balance
        )
        for each in summaries
        if each.balance is not None
    )


def _shares_picture(title: str, balance: BalanceSummary) -> Picture:
    ends = [*(step for step, _ in balance.splits[1:]), balance.steps]
    lanes = [
        Lane(
            f"rank {worker}",
            [
                (float(step), float(end - step), _SIZE_COLOURS[index % 2], str(sizes[worker]))
                for index, ((step, sizes), end) in enumerate(zip(balance.splits, ends, strict=True))
            ],
        )
        for worker in range(len(balance.last))
    ]
    reading = (
        "Examples of a global batch that each worker computes, over the steps of the run: a worker that is slow gets "
        "fewer, so that all take the same time. The colours alternate from change to change."
    )
    return Picture(title, draw_lanes(title, (("examples of a batch", lanes),), "steps", 1.0), reading)


def pictures(summaries: Sequence[Summary], references: References) -> tuple[Picture, ...]:
    """Returns the pictures for which the runs have data."""
    drawn = (
        *_losses(summaries),
        _throughput(summaries, references),
        _steps(summaries),
        *passed_pictures(summaries),
        *server_pictures(summaries),
        *averaging_pictures(summaries),
        *balance_pictures(summaries),
        *_metrics(summaries),
        *_memory(summaries),
    )
    return tuple(picture for picture in drawn if picture is not None)


def main_pictures(summaries: Sequence[Summary], references: References) -> tuple[Picture, ...]:
    """Returns the pictures to show where there is little room: the loss, and the rates where runs are compared."""
    if len(summaries) == 1:
        return tuple(_losses(summaries)[:1])
    rates = _throughput(summaries, references)
    return (*_losses(summaries)[1:], *([rates] if rates else []))


def _losses(summaries: Sequence[Summary]) -> list[Picture]:
    values = [point.loss for each in summaries for point in each.curves.loss]
    if not values:
        return []
    log = min(values) > 0 and max(values) > 8 * min(values)
    by_examples, by_time = "Against the work done, whatever the machine.", "The same over time."
    if len(summaries) > 1:
        by_examples = (
            "The same work on every point of the axis: synchronous strategies on the same global batch lie on each "
            "other, and should."
        )
        by_time = "The same curves over time: the one that falls first learns fastest on this machine."
    kinds: tuple[tuple[str, str, Callable[[LossPoint], float], str], ...] = (
        ("Loss by examples", "examples seen by all workers", attrgetter("examples"), by_examples),
        ("Loss by time", "seconds of training, without evaluations", attrgetter("seconds"), by_time),
    )
    smooth = f"Drawn: the mean over 1/{_SMOOTH} of the run around each point; faint: before that."
    label = "training loss" + " (log)" * log
    drawn = [draw_curves(title, _loss_curves(summaries, place), axis, label, log) for title, axis, place, _ in kinds]
    return [Picture(kind[0], svg, f"{kind[3]} {smooth}", "runs") for kind, svg in zip(kinds, drawn, strict=True)]


def _loss_curves(summaries: Sequence[Summary], place: Callable[[LossPoint], float]) -> list[Curve]:
    curves = _curves_of(summaries, lambda run: [(place(point), point.loss) for point in run.curves.loss])
    smoothed = [(each, _smoothed(each.points)) for each in curves]
    return [
        replace(each, points=smooth, faint=each.points if smooth != each.points else (), dots=len(smooth) == 1)
        for each, smooth in smoothed
    ]


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the centred mean, over fewer points at both ends."""
    reach = len(points) // (2 * _SMOOTH)
    result = []
    for index, (x, _) in enumerate(points):
        half = min(reach, index)
        near = points[index - half : index + half + 1]
        result.append((x, sum(y for _, y in near) / len(near)))
    return result


def _throughput(summaries: Sequence[Summary], references: References) -> Picture | None:
    rated = [(each, style) for each, style in zip(summaries, run_styles(summaries), strict=True) if each.examples_per_s]
    if not rated:
        return None
    title = "Throughput"
    one = references.one_device_examples_per_s
    one_thread = references.one_thread_examples_per_s
    bars = []
    for each, style in rated:
        ceiling = references.ceiling_examples_per_s.get(each.workers)
        marks = [Mark(one, _DOTTED)] if one else []
        if ceiling and each.workers > 1:
            marks.append(Mark(ceiling))
        if one_thread and each.workers > 1:
            marks.append(Mark(one_thread * each.workers, _DASHED))
        against = references.to_one_device(each)
        note = f"{short(each.examples_per_s)}/s" + (f"  =  {fixed(against)} × one" if against else "")
        label = f"{each.name}, {plural(each.workers, 'worker')}"
        bars.append(Bar(label, note, [(each.examples_per_s or 0.0, style.colour)], marks))
    reading = ["Examples a second of all workers together, in steady state (warm-up and evaluations left out)."]
    if one:
        reading.append(f"Dotted: one process with all threads ({short(one)}), what you would have without us.")
    kinds = {mark.dashes for bar in bars for mark in bar.marks}
    if () in kinds:
        reading.append("Solid: the ceiling, as many unconnected workers at once.")
    if _DASHED in kinds:
        reading.append("Dashed: the ideal, workers × one thread that has the machine for itself.")
    return Picture(title, draw_bars(title, bars, "examples/s"), " ".join(reading))


def _steps(summaries: Sequence[Summary]) -> Picture | None:
    bars = [
        _step_bar(f"{each.name}, rank {rank}", times)
        for each in summaries
        for rank, times in list(each.times_by_rank.items())[:_MOST_RANKS]
    ]
    if not bars:
        return None
    title = "Where each worker's step goes"
    cut = any(len(each.times_by_rank) > _MOST_RANKS for each in summaries)
    reading = (
        "Milliseconds of the mean step in steady state, in the order in which they pass: waiting for data, compute, "
        "exchange, update, and what lies between steps. Exchange includes waiting for slower workers: a long "
        "exchange on one rank alone means that it waits for another."
        + f" The first {_MOST_RANKS} ranks of each run are shown."
        * cut
    )
    return Picture(title, draw_bars(title, bars, "ms a step"), reading, "parts")


def _step_bar(label: str, times: StepTimes) -> Bar:
    parts = [(getattr(times, part) * 1e3, colour) for part, colour in PARTS.items()]
    return Bar(label, f"{fixed(times.total_s, 1e3)} ms", parts, inside=True)


def _metrics(summaries: Sequence[Summary]) -> list[Picture]:
    evaluations = [point for each in summaries for point in each.curves.evaluations]
    names = list(dict.fromkeys(name for point in evaluations for name in point.metrics))
    # The loss has its own two pictures; here it comes after what users care for.
    names.sort(key=lambda name: name == "loss")
    return [_metric(summaries, name) for name in names[:_MOST_METRICS]]


def _metric(summaries: Sequence[Summary], name: str) -> Picture:
    def points(run: Summary) -> list[tuple[float, float]]:
        return [(at.epochs, at.metrics[name]) for at in run.curves.evaluations if name in at.metrics]

    curves = [replace(each, dots=True) for each in _curves_of(summaries, points)]
    title = f"Evaluation: {name}"
    drawn = draw_curves(title, curves, "epochs", f"evaluation {name}", whole_x=True)
    last = [f"{each.name} {short(each.metrics[name])}" for each in summaries if name in each.metrics]
    reading = "Over the whole evaluation set, each example counted once."
    return Picture(title, drawn, f"{reading} Last: {', '.join(last)}." if last else reading, "runs")


def _memory(summaries: Sequence[Summary]) -> list[Picture]:
    peaks, held = [], []
    for each, style in zip(summaries, run_styles(summaries), strict=True):
        peak, parameters, state = (
            getattr(each.cost, name) for name in ("peak_memory_bytes", "parameter_bytes", "optimizer_bytes")
        )
        if peak is not None:
            peaks.append(Bar(each.name, byte_count(peak), [(peak * 1e-6, style.colour)]))
        if parameters is not None and state is not None:
            parts = [(parameters * 1e-6, style.colour), (state * 1e-6, PARTS["wait_s"])]
            held.append(Bar(each.name, f"{byte_count(parameters)} + {byte_count(state)}", parts))
    everyone = "all workers and servers" if any(each.servers for each in summaries) else "all workers"
    peak_reading = "The most that one process had in memory at any time, libraries included."
    held_reading = (
        f"What {everyone} together hold: parameters in the run's colour, optimizer state in grey. A copy that all "
        "share is counted once."
    )
    kinds = (
        ("Peak memory of the largest process", peaks, "MB", peak_reading),
        ("Parameters and optimizer state", held, f"MB in {everyone} together", held_reading),
    )
    return [Picture(title, draw_bars(title, bars, axis), reading) for title, bars, axis, reading in kinds if bars]
