"""The pictures of the page, and the sentences below each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.drawing.rows import Bar, Lane, Mark, draw_lanes
from headrace.report.format import byte_count, fixed, percent, plural, short
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.summary import Summary
from headrace.report.model.training import SMOOTH, STEP_PARTS, BalanceSummary, LossPoint, StepTimes, smoothed
from headrace.report.model.verdict import References
from headrace.report.views.answers import (
    balance_answer,
    bytes_answer,
    drift_answer,
    loss_answer,
    metric_answer,
    period_answer,
    pipeline_answer,
    set_loss_answer,
    steps_answer,
    throughput_answer,
    workers_answer,
)
from headrace.report.views.server_pictures import bar_picture, server_pictures
from headrace.report.views.style import PARTS, Picture, run_styles

LEARNING, WORKERS, PIPELINE, AVERAGING, SHARES, MEMORY = (
    *("More about learning", "Each worker", "Pipeline", "Averaging", "Shares of a batch", "Memory"),
)
"""Folds of the page."""
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
            curves.append(Curve(points, style.colour, style.dashes, style.width, name=each.name))
    return curves


def averaging_pictures(summaries: Sequence[Summary]) -> list[Picture]:
    """Returns drift and period of the runs whose workers met to average."""

    def picture(title: str, name: str, axis: str, reading: str, answer: str) -> Picture:
        curves = _curves_of(
            summaries,
            lambda run: [
                (float(each.step), float(getattr(each, name)))
                for each in (run.averaging.meetings if run.averaging else ())
            ],
        )
        curves = [replace(each, dots=len(each.points) <= _MOST_DOTS) for each in curves]
        return Picture(title, draw_curves(title, curves, "rounds", axis), reading, "averaged", answer, AVERAGING)

    shown = [each.averaging.meetings for each in summaries if each.averaging is not None]
    if not shown:
        return []
    drift = picture(
        "How far do workers drift apart?",
        "drift",
        "distance from the mean, relative",
        "How far the worker that was furthest away was from the mean of all, over the norm of the mean. What grows "
        "from meeting to meeting asks for a shorter period.",
        drift_answer(summaries),
    )
    if all(meeting.period == meetings[0].period for meetings in shown for meeting in meetings):
        return [drift]
    period = picture(
        "How long do workers go on by themselves?",
        "rounds",
        "rounds since the last meeting",
        "How long workers went on by themselves. An automatic period grows until the exchange takes its share of the "
        "time and no more, or until drift holds it.",
        period_answer(summaries),
    )
    return [drift, period]


_COLOURS = {False: PARTS["compute_s"], True: PARTS["update_s"]}
"""Of forward and backward."""
_WAIT = PARTS["other_s"]
_SIZE_COLOURS = (PARTS["compute_s"], PARTS["update_s"])


def passed_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns a picture for each run that has a pipeline step."""
    return tuple(
        _step_picture(
            f"When does each stage of {each.name} work?" if len(summaries) > 1 else "When does each stage work?",
            each.passed,
        )
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
    drawn = draw_lanes(title, groups, "milliseconds", 1e3)
    return Picture(title, drawn, reading, answer=pipeline_answer(passed), group=PIPELINE)


def balance_pictures(summaries: Sequence[Summary]) -> tuple[Picture, ...]:
    """Returns a picture for each run whose shares of a batch have changed."""
    return tuple(
        _shares_picture(
            f"How is a batch of {each.name} shared?" if len(summaries) > 1 else "How is a batch shared?", each.balance
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
                if worker < len(sizes)
            ],
        )
        # A resumed run may have more workers than before, or fewer.
        for worker in range(max(len(sizes) for _, sizes in balance.splits))
    ]
    reading = (
        "Examples of a global batch that each worker computes, over the steps of the run: a worker that is slow gets "
        "fewer, so that all take the same time. The colours alternate from change to change."
    )
    drawn = draw_lanes(title, (("examples of a batch", lanes),), "steps", 1.0)
    return Picture(title, drawn, reading, answer=balance_answer(balance), group=SHARES)


def pictures(summaries: Sequence[Summary], references: References) -> tuple[Picture, ...]:
    """Returns the pictures for which the runs have data, those that are always seen first."""
    rates = [] if len(summaries) == 1 and references == References() else [_throughput(summaries, references)]
    drawn = (
        *_losses(summaries, references),
        *_set_losses(summaries),
        *rates,
        _steps(summaries),
        *_metrics(summaries),
        _steps_by_rank(summaries),
        *passed_pictures(summaries),
        *server_pictures(summaries),
        *averaging_pictures(summaries),
        *balance_pictures(summaries),
        *_memory(summaries),
    )
    return tuple(picture for picture in drawn if picture is not None)


def main_pictures(summaries: Sequence[Summary], references: References) -> tuple[Picture, ...]:
    """Returns the pictures to show where there is little room: the loss, and the rates where runs are compared."""
    found = (*_losses(summaries, references), *_set_losses(summaries))
    losses = tuple(each for each in found if not each.group)
    rates = _throughput(summaries, references) if len(summaries) > 1 else None
    return (*losses, *([rates] if rates else []))


def _losses(summaries: Sequence[Summary], references: References) -> list[Picture]:
    """Returns the loss by examples and by time: of one run the first is seen, of several the second."""
    values = [point.loss for each in summaries for point in each.curves.loss]
    if not values:
        return []
    log = min(values) > 0 and max(values) > 8 * min(values)
    by_examples, by_time = "Against the work done, whatever the machine.", "The same over time."
    titles = ("Does the loss fall?", "How fast does the loss fall?")
    if len(summaries) > 1:
        titles = ("Which loss falls with the fewest examples?", "Which loss falls first?")
        by_examples = (
            "The same work on every point of the axis: synchronous strategies on the same global batch lie on each "
            "other, and should."
        )
        by_time = "The same curves over time: the one that falls first learns fastest on this machine."
    dots = " Dots: the loss of evaluations." if len(summaries) == 1 and summaries[0].metrics else ""
    smooth = f"Drawn: the mean over 1/{SMOOTH} of the run around each point; faint: before that.{dots}"
    label = "training loss" + " (log)" * log

    def picture(title: str, axis: str, place: Callable[[LossPoint], float], reading: str, timed: bool) -> Picture:
        curves = _loss_curves(summaries, place)
        if len(summaries) == 1:
            curves += _evaluated(summaries[0], timed)
        drawn = draw_curves(title, curves, axis, label, log)
        answer = loss_answer(summaries, references, timed)
        group = "" if timed == (len(summaries) > 1) else LEARNING
        return Picture(title, drawn, f"{reading} {smooth}", "runs", answer, group)

    return [
        picture(titles[0], "examples seen by all workers", attrgetter("examples"), by_examples, False),
        picture(titles[1], "seconds of training, without evaluations", attrgetter("seconds"), by_time, True),
    ]


def _evaluated(run: Summary, timed: bool) -> list[Curve]:
    """Returns the evaluations' losses as dots, beside the training loss of the same run."""
    each_epoch = run.started.examples_per_epoch
    points = [
        (at.seconds if timed else at.epochs * each_epoch, at.metrics["loss"])
        for at in run.curves.evaluations
        if math.isfinite(at.metrics.get("loss", math.nan))
    ]
    return [Curve(points, PARTS["update_s"], dots=True, name="evaluation")] if points else []


def _set_losses(summaries: Sequence[Summary]) -> list[Picture]:
    """Returns the loss of each set of parameters that takes turns."""
    losses = (own for each in summaries for own in each.curves.set_losses.items())
    names = list(dict.fromkeys(name for name, points in losses if points))
    return [_set_loss(summaries, name) for name in names]


def _set_loss(summaries: Sequence[Summary], name: str) -> Picture:
    title = f"How does the loss of {name} go?"
    drawn = draw_curves(
        title,
        _loss_curves(summaries, attrgetter("examples"), lambda run: run.curves.set_losses.get(name, ())),
        "examples seen by all workers",
        f"training loss of {name}",
    )
    reading = (
        f"The rounds in which {name} was trained, the others left out. Where sets work against each other a loss need "
        f"not fall. Drawn: the mean over 1/{SMOOTH} of the run around each point; faint: before that."
    )
    return Picture(title, drawn, reading, "runs", set_loss_answer(summaries, name))


def _loss_curves(
    summaries: Sequence[Summary],
    place: Callable[[LossPoint], float],
    losses: Callable[[Summary], Sequence[LossPoint]] = lambda run: run.curves.loss,
) -> list[Curve]:
    curves = _curves_of(summaries, lambda run: [(place(point), point.loss) for point in losses(run)])
    smooth = [(each, smoothed(each.points)) for each in curves]
    return [
        replace(each, points=points, faint=each.points if points != each.points else (), dots=len(points) == 1)
        for each, points in smooth
    ]


def rate_marks(summaries: Sequence[Summary], references: References) -> list[tuple[tuple[float, ...], str]]:
    """Returns how the lines across rates are drawn, and what each is."""
    several = [each.workers for each in summaries if each.examples_per_s and each.workers > 1]
    marks: list[tuple[tuple[float, ...], str]] = []
    if references.one_device_examples_per_s:
        marks.append((_DOTTED, "one process with all threads"))
    if any(references.ceiling_examples_per_s.get(workers) for workers in several):
        marks.append(((), "the ceiling: as many workers that exchange nothing"))
    if references.one_thread_examples_per_s and several:
        marks.append((_DASHED, "workers × one thread that has the machine for itself"))
    return marks


def _throughput(summaries: Sequence[Summary], references: References) -> Picture | None:
    rated = [(each, style) for each, style in zip(summaries, run_styles(summaries), strict=True) if each.examples_per_s]
    one = references.one_device_examples_per_s
    one_thread = references.one_thread_examples_per_s
    bars = []
    for each, style in rated:
        ceiling = references.ceiling_examples_per_s.get(each.workers)
        marks = [Mark(one, _DOTTED, f"one process: {short(one)} examples/s")] if one else []
        if ceiling and each.workers > 1:
            marks.append(Mark(ceiling, (), f"ceiling: {short(ceiling)} examples/s"))
        if one_thread and each.workers > 1:
            ideal = one_thread * each.workers
            marks.append(Mark(ideal, _DASHED, f"{each.workers} × one thread: {short(ideal)} examples/s"))
        against = references.to_one_device(each)
        note = f"{short(each.examples_per_s)}/s" + (f"  =  {fixed(against)} × one" if against else "")
        label = f"{each.name}, {plural(each.workers, 'worker')}"
        bars.append(Bar(label, note, [(each.examples_per_s or 0.0, style.colour)], marks))
    reading = "Examples a second of all workers together, in steady state (warm-up and evaluations left out)."
    answer = throughput_answer(summaries, references)
    return bar_picture("How many examples a second?", bars, "examples/s", reading, "marks", answer)


_STEP_READING = (
    "Milliseconds of the mean step in steady state, in the order in which they pass: waiting for data, compute, "
    "exchange, update, and what lies between steps. Exchange includes waiting for slower workers: a long "
    "exchange on one rank alone means that it waits for another."
)


def _steps(summaries: Sequence[Summary]) -> Picture | None:
    """Returns the mean step of each run."""
    bars = [_step_bar(each.name, each.times) for each in summaries if each.times is not None]
    reading = f"{_STEP_READING} The mean over all workers."
    return bar_picture("Where does a step's time go?", bars, "ms a step", reading, "parts", steps_answer(summaries))


def _steps_by_rank(summaries: Sequence[Summary]) -> Picture | None:
    several = [each for each in summaries if len(each.times_by_rank) > 1]
    bars = [
        _step_bar(f"{each.name}, {each.named_rank(rank)}", times)
        for each in several
        for rank, times in list(each.times_by_rank.items())[:_MOST_RANKS]
    ]
    cut = any(len(each.times_by_rank) > _MOST_RANKS for each in several)
    reading = _STEP_READING + f" The first {_MOST_RANKS} ranks of each run are shown." * cut
    title = "Where does each worker's step go?"
    return bar_picture(title, bars, "ms a step", reading, "parts", workers_answer(several), WORKERS)


def _step_bar(label: str, times: StepTimes) -> Bar:
    parts = [(getattr(times, part) * 1e3, colour) for part, colour in PARTS.items()]
    return Bar(label, f"{fixed(times.total_s, 1e3)} ms", parts, inside=True, names=list(STEP_PARTS.values()))


def _metrics(summaries: Sequence[Summary]) -> list[Picture]:
    evaluations = [point for each in summaries for point in each.curves.evaluations]
    names = list(dict.fromkeys(name for point in evaluations for name in point.metrics))
    # The loss has its own two pictures; here it comes after what users care for.
    names.sort(key=lambda name: name == "loss")
    drawn = [_metric(summaries, name) for name in names[:_MOST_METRICS]]
    return [*drawn[:1], *(replace(each, group=LEARNING) for each in drawn[1:])]


def _metric(summaries: Sequence[Summary], name: str) -> Picture:
    def points(run: Summary) -> list[tuple[float, float]]:
        return [(at.epochs, at.metrics[name]) for at in run.curves.evaluations if name in at.metrics]

    curves = [replace(each, dots=True) for each in _curves_of(summaries, points)]
    title = f"What {name} do evaluations find?"
    drawn = draw_curves(title, curves, "epochs", f"evaluation {name}", whole_x=True)
    reading = "Over the whole evaluation set, each example counted once."
    return Picture(title, drawn, reading, "runs", metric_answer(summaries, name))


def _memory(summaries: Sequence[Summary]) -> tuple[Picture | None, ...]:
    peaks, held, sizes, sums = [], [], [], []
    for each, style in zip(summaries, run_styles(summaries), strict=True):
        cost = each.cost
        if cost.peak_memory_bytes is not None:
            sizes.append((each.name, cost.peak_memory_bytes))
            peak = cost.peak_memory_bytes
            peaks.append(Bar(each.name, byte_count(peak), [(peak * 1e-6, style.colour)]))
        if cost.parameter_bytes is not None and cost.optimizer_bytes is not None:
            sums.append((each.name, cost.parameter_bytes + cost.optimizer_bytes))
            parts = [(cost.parameter_bytes * 1e-6, style.colour), (cost.optimizer_bytes * 1e-6, PARTS["wait_s"])]
            note = f"{byte_count(cost.parameter_bytes)} + {byte_count(cost.optimizer_bytes)}"
            held.append(Bar(each.name, note, parts, names=("parameters", "optimizer state")))
    everyone = "all workers and servers" if any(each.servers for each in summaries) else "all workers"
    peak_reading = "The most that one process had in memory at any time, libraries included."
    held_reading = (
        f"What {everyone} together hold: parameters in the run's colour, optimizer state in grey. A copy that all "
        "share is counted once."
    )
    title, unit = "How much do parameters and optimizer state take?", f"MB in {everyone} together"
    largest, whole = bytes_answer("The largest process", sizes), bytes_answer("Parameters and optimizer state", sums)
    return (
        bar_picture("How much memory does the largest process take?", peaks, "MB", peak_reading, "", largest, MEMORY),
        bar_picture(title, held, unit, held_reading, "", whole, MEMORY),
    )
