"""The sentence above each picture: what the runs' data say to its question, "" where they say nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from headrace.policies.measurement import REACHED
from headrace.report.format import byte_count, duration, fixed, percent, plural, short
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.summary import Summary
from headrace.report.model.training import STEP_PARTS, BalanceSummary, LossPoint, StepTimes, smoothed
from headrace.report.model.verdict import References

SAME = 0.05
"""Two values that differ by less are called about the same."""
UNEVEN = 1.25
"""A worker that takes so many times as long as another is named."""
_MOST_NAMES = 4
_ENDED = {"failed": "failed", "interrupted": "was interrupted", "unfinished": "has not ended"}


def listed(names: Sequence[str]) -> str:
    """Returns "a", "a and b", "a, b and c", "a, b, c and 5 more"."""
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def names_of(runs: Sequence[Summary]) -> str:
    """Returns the names of runs, as a list in a sentence."""
    return listed([each.name for each in runs])


def about_the_same(values: Sequence[float]) -> bool:
    """Tells whether values, of at least 0, are too close to each other to be ranked."""
    return max(values) - min(values) <= SAME * max(values)


def _finished(runs: Sequence[Summary]) -> list[Summary]:
    """Returns the runs that are compared: those that ended well, or all if none has."""
    return [each for each in runs if each.status == "ok"] or list(runs)


def _left_out(runs: Sequence[Summary]) -> str:
    """Returns a sentence about the runs that are not compared."""
    rest = [each for each in runs if each not in _finished(runs)]
    return f" Not compared, because not finished: {names_of(rest)}." if rest else ""


def loss_answer(runs: Sequence[Summary], references: References, by_time: bool) -> str:
    """Returns how the loss fell, of one run, or which run's fell first, by examples or by time."""
    place: Callable[[LossPoint], float] = attrgetter("seconds" if by_time else "examples")
    paths = {
        index: smoothed([(place(point), point.loss) for point in run.curves.loss])
        for index, run in enumerate(runs)
        if run.curves.loss
    }
    if not paths:
        return ""
    text: Callable[[float], str] = duration if by_time else lambda count: f"{count:,.0f} examples"
    if len(runs) == 1:
        bad = runs[0].non_finite
        left_out = plural(bad.skipped + bad.rolled_back, "round") if bad is not None else ""
        not_finite = f" {left_out} left out: a loss or gradient was not finite." if left_out else ""
        return f"{_fall(runs[0], paths[0], text)}{not_finite}"
    finished = _finished(runs)
    compared = {index: path for index, path in paths.items() if runs[index] in finished}
    if not compared:
        return ""
    begins = [runs[index].curves.first_loss or path[0][1] for index, path in compared.items()]
    begin, best = sum(begins) / len(begins), min(path[-1][1] for path in compared.values())
    if best >= begin - SAME * abs(begin):
        return f"No loss fell below where it began, {short(begin)}.{_left_out(runs)}"
    target = begin - REACHED * (begin - best)
    reached = {
        index: next(x for x, loss in path if loss <= target)
        for index, path in compared.items()
        if any(loss <= target for _, loss in path)
    }
    missing = [runs[index] for index in compared if index not in reached]
    missed = f" {names_of(missing)} did not get there." if missing else ""
    doubtful = [runs[index] for index in reached if by_time and references.disturbed(runs[index])]
    return f"{_first(runs, reached, target, text)}{missed}{_doubt(doubtful)}{_left_out(runs)}"


def set_loss_answer(runs: Sequence[Summary], name: str) -> str:
    """Returns where the loss of a set of parameters began and ended, of each run."""
    told = []
    for run in runs:
        path = smoothed([(point.examples, point.loss) for point in run.curves.set_losses.get(name, ())])
        if path:
            told.append(f"{run.name}: from {short(path[0][1])} to {short(path[-1][1])}")
    return f"{'; '.join(told)}." if told else ""


def _first(runs: Sequence[Summary], reached: Mapping[int, float], target: float, text: Callable[[float], str]) -> str:
    """Returns which run reached a loss first, and when the others did."""
    order = sorted(reached, key=lambda index: reached[index])
    to_loss = f"a loss of {short(target)}"
    if len(order) > 1 and about_the_same(list(reached.values())):
        return f"All that came to {to_loss} took about as long: {text(reached[order[0]])}."
    won = [index for index in order if about_the_same([reached[order[0]], reached[index]])]
    later = [f"{runs[index].name} after {text(reached[index])}" for index in order if index not in won]
    rest = f"; then {listed(later)}" if later else ""
    return (
        f"{listed([runs[index].name for index in won])} came first to {to_loss}: after {text(reached[order[0]])}{rest}."
    )


def _doubt(runs: Sequence[Summary]) -> str:
    return f" Disturbed, so not to be believed: {names_of(runs)}." if runs else ""


def _fall(run: Summary, path: Sequence[tuple[float, float]], text: Callable[[float], str]) -> str:
    first, last = run.curves.first_loss, path[-1][1]
    if first is None or len(path) == 1:
        return f"One loss is known: {short(last)}."
    how = (
        "fell" if last < first - SAME * abs(first) else "rose" if last > first + SAME * abs(first) else "hardly changed"
    )
    told = f"The loss {how}: from {short(first)} to {short(last)} in {text(path[-1][0])}."
    lowest = min(path, key=lambda point: point[1])
    if lowest is not path[0] and lowest[1] < last - max(SAME * abs(first - lowest[1]), SAME * abs(lowest[1])):
        told += f" It was lowest after {text(lowest[0])}: {short(lowest[1])}."
    return told + (f" The run {_ENDED[run.status]}." if run.status in _ENDED else "")


def throughput_answer(runs: Sequence[Summary], references: References) -> str:
    """Returns which run is the fastest, against one process with all threads where that is known."""
    rated = [each for each in _finished(runs) if each.examples_per_s]
    if not rated:
        return ""
    fastest = max(rated, key=_rate)
    told = f"{short(fastest.examples_per_s)} examples a second"
    one = references.to_one_device(fastest)
    against = f", {fixed(one)} × one process with all threads" if one else ""
    doubtful = [each for each in rated if references.disturbed(each)]
    doubt = _doubt(doubtful)
    if len(runs) == 1:
        return f"{told}{against}.{doubt}"
    if len(rated) > 1 and about_the_same([_rate(each) for each in rated]):
        sentence = f"All are about as fast: {told}{against}."
    elif fastest.workers > 1 or all(each.workers == 1 for each in rated):
        sentence = f"{fastest.name} is the fastest: {told}{against}."
    else:
        sentence = f"{fastest.name}, on one worker, is the fastest: {told}{against}."
    if one is not None and one < 1 - SAME:
        sentence += " So one process with all threads is faster than any of them."
    return f"{sentence}{doubt}{_left_out(runs)}"


def _rate(run: Summary) -> float:
    return run.examples_per_s or 0.0


def _shares(times: StepTimes) -> dict[str, float]:
    """Returns each part of a step over the whole, the largest first; {} for a step that took no time."""
    parts = {name: getattr(times, part) for part, name in STEP_PARTS.items()}
    total = times.total_s
    if not total > 0:
        return {}
    return {name: value / total for name, value in sorted(parts.items(), key=lambda pair: -pair[1])}


def steps_answer(runs: Sequence[Summary]) -> str:
    """Returns which part of a step takes the most time."""
    shares = [(each, _shares(each.times)) for each in runs if each.times is not None]
    shares = [(each, parts) for each, parts in shares if parts]
    if not shares:
        return ""
    if len(runs) == 1:
        (run, parts), *_ = shares
        (first, most), (second, next_most), *_ = parts.items()
        assert run.times is not None
        told = f"{first.capitalize()} takes {percent(most)} of a mean step of {duration(run.times.total_s)}"
        return f"{told}, {second} {percent(next_most)}." if next_most >= 0.005 else f"{told}."
    by_part: dict[str, list[str]] = {}
    for run, parts in shares:
        name = next(iter(parts))
        by_part.setdefault(name, []).append(f"{run.name} ({percent(parts[name])})")
    groups = [f"{name} in {listed(names)}" for name, names in by_part.items()]
    return f"What takes the most of a step: {'; '.join(groups)}."


def workers_answer(runs: Sequence[Summary]) -> str:
    """Returns whether some workers compute for longer than others."""
    told = []
    for run in runs:
        computing = {rank: times.compute_s for rank, times in run.times_by_rank.items()}
        if len(computing) < 2:
            continue
        slow, fast = max(computing, key=lambda rank: computing[rank]), min(computing, key=lambda rank: computing[rank])
        if computing[slow] > UNEVEN * computing[fast] and computing[slow] > 1e-4:
            of_run = f" in {run.name}" if len(runs) > 1 else ""
            times = f"{duration(computing[slow])} a step, {run.named_rank(fast)} {duration(computing[fast])}"
            told.append(f"{run.named_rank(slow)} computes for {times}{of_run}")
    if told:
        return f"Workers differ: {listed(told)}."
    if not any(len(run.times_by_rank) > 1 for run in runs):
        return ""
    return f"No worker computes for {UNEVEN} × as long as another of its run."


def metric_answer(runs: Sequence[Summary], name: str) -> str:
    """Returns how a metric ended, of one run from where to where, or in which run it is highest and lowest."""
    if len(runs) == 1:
        return _course(runs[0], name)
    ended = [(each.metrics[name], each) for each in _finished(runs) if name in each.metrics]
    known = [(value, each) for value, each in ended if math.isfinite(value)]
    bad = [each for value, each in ended if not math.isfinite(value)]
    lost = f" Not finite: {names_of(bad)}." if bad else ""
    if not known:
        return lost.strip()
    lowest, highest = (choose(value for value, _ in known) for choose in (min, max))
    if len(known) == 1:
        return f"{name} ends at {short(lowest)} in {names_of([known[0][1]])}.{lost}{_left_out(runs)}"
    if highest - lowest <= 0.01 * max(abs(highest), abs(lowest)):
        return f"{name} ends at about {short(highest)} in all of them.{lost}{_left_out(runs)}"
    best, worst = (names_of([each for value, each in known if value == end]) for end in (highest, lowest))
    ends = f"highest in {best} ({short(highest)}), lowest in {worst} ({short(lowest)})"
    return f"{name} ends {ends}.{lost}{_left_out(runs)}"


def _course(run: Summary, name: str) -> str:
    points = [each for each in run.curves.evaluations if name in each.metrics]
    if not points:
        return ""
    last = f"{short(points[-1].metrics[name])} after {plural(points[-1].epochs, 'epoch')}"
    if len(points) == 1:
        return f"{name} is {last}, in the only evaluation."
    known = [each.metrics[name] for each in points if math.isfinite(each.metrics[name])]
    first, end = points[0].metrics[name], points[-1].metrics[name]
    told = f"{name} went from {short(first)} after {plural(points[0].epochs, 'epoch')} to {last}."
    extremes = (("lowest", min(known)), ("highest", max(known))) if known else ()
    beyond = [f"{word} {short(value)}" for word, value in extremes if value not in (first, end)]
    return f"{told} Between: {' and '.join(beyond)}." if beyond else told


def bytes_answer(what: str, sizes: Sequence[tuple[str, int]]) -> str:
    """Returns which of some named sizes is the largest, and which the smallest; "" for none."""
    if not sizes:
        return ""
    (most, largest), (least, smallest) = (choose(sizes, key=lambda pair: pair[1]) for choose in (max, min))
    if len(sizes) == 1:
        return f"{what}: {byte_count(largest)}."
    if about_the_same([largest, smallest]):
        return f"{what}: about {byte_count(largest)} in all of them."
    times = f", {fixed(largest / smallest)} × that of {least}, the smallest" if smallest > 0 else ""
    return f"{what}: the most in {most}, {byte_count(largest)}{times}."


def drift_answer(runs: Sequence[Summary]) -> str:
    """Returns how far workers were apart when they met to average."""
    averaged = [(each.name, each.averaging) for each in runs if each.averaging is not None]
    told = []
    for name, each in averaged:
        last, furthest = each.last, each.furthest
        of_run = f"in {name} " if len(runs) > 1 else ""
        most = f"{short(furthest.drift)} of the parameters' norm, after {plural(furthest.step, 'round')}"
        told.append(f"{of_run}at most {most}, and {short(last.drift)} at the end")
    return f"The worker that is furthest from the mean: {'; '.join(told)}."


def period_answer(runs: Sequence[Summary]) -> str:
    """Returns how long workers went on between two averages."""
    averaged = [(each.name, each.averaging) for each in runs if each.averaging is not None]
    told = [
        f"{f'{name}: ' if len(runs) > 1 else ''}{short(each.mean_rounds)} on average, {each.last.rounds} at the end"
        for name, each in averaged
    ]
    return f"Rounds from one average to the next: {'; '.join(told)}."


def pipeline_answer(step: PipelineStep) -> str:
    """Returns how much of a step ranks did nothing, and whether more than the schedule says."""
    told = f"Ranks work on nothing for {percent(step.bubble)} of the time"
    least = step.scheduled_bubble
    if abs(step.bubble - least) <= SAME:
        return f"{told}, about what the schedule costs ({percent(least)})."
    if step.bubble > least:
        rest = "the rest comes from unequal stages, transfers or busy cores"
        return f"{told}; the schedule alone costs {percent(least)}, {rest}."
    return f"{told}, less than if all stages were alike ({percent(least)})."


def balance_answer(balance: BalanceSummary) -> str:
    """Returns what the workers' shares of a batch are in the end."""
    last = balance.last
    most, least = last.index(max(last)), last.index(min(last))
    if last[most] == last[least]:
        return f"In the end every worker computes {last[0]} examples of a batch."
    total = sum(last)
    return f"In the end rank {most} computes {last[most]} of {total} examples of a batch, rank {least} {last[least]}."
