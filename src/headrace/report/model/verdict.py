"""Which of the compared strategies to recommend: by speed to a loss, from measurements that can be believed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from headrace.policies.measurement import Learning, shortfall
from headrace.report.format import fixed, short
from headrace.report.model.summary import Summary, summarize

_SAME = 0.05
"""Two rates closer than this are called equal: runs on a shared machine differ by about as much."""
_SMOOTHED = 20
"""Parts of a loss curve whose means are compared where there is no evaluation."""


@dataclass(frozen=True)
class References:
    """Rates of the same job on the same machine, in examples a second, and what is doubtful about the runs'.

    `one_device_examples_per_s` is of one process with all threads, `one_thread_examples_per_s` of one with one thread;
    `ceiling_examples_per_s` maps a number of workers to the rate of so many unconnected workers at the same time, in
    the same malloc environment, all together. `doubts` maps a run's label to why its rate is not to be believed,
    `one_device_doubts` says so of one process; `measured_again` maps a run's label to the directory of the short run
    from which its rate and step times are taken. `may_differ` has the labels of runs under strategies that do not
    promise what one device gives on the same global batch.
    """

    one_device_examples_per_s: float | None = None
    ceiling_examples_per_s: Mapping[int, float] = field(default_factory=dict)
    one_thread_examples_per_s: float | None = None
    doubts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    one_device_doubts: tuple[str, ...] = ()
    measured_again: Mapping[str, str] = field(default_factory=dict)
    may_differ: tuple[str, ...] = ()

    def to_one_device(self, summary: Summary) -> float | None:
        """Returns the run's rate over one process with all threads; None where either is unknown."""
        return _over(summary.examples_per_s, self.one_device_examples_per_s)

    def to_ceiling(self, summary: Summary) -> float | None:
        """Returns the run's rate over that of as many unconnected workers; None for one worker, or if unknown."""
        ceiling = self.ceiling_examples_per_s.get(summary.workers) if summary.workers > 1 else None
        return _over(summary.examples_per_s, ceiling)

    def disturbed(self, summary: Summary) -> str:
        """Returns why the run's rate is not to be believed, also after it was measured again; "" if it is."""
        return "; ".join(self.doubts.get(summary.label, ()))


@dataclass(frozen=True)
class Standing:
    """A finished run on several workers: its rate and its speed to a loss over one device's; None where unknown.

    `missed` says how its loss falls short of one device's, so that it is not recommended; "" if it does not.
    """

    summary: Summary
    ratio: float
    speed: float
    missed: str


def compared(directory: Path, label: str, references: References) -> Summary:
    """Returns the summary of one run of a comparison; its rate and step times are of the measurement that counts."""
    summary = summarize(directory / label)
    if label not in references.measured_again:
        return summary
    again = summarize(directory / references.measured_again[label])
    rate = replace(summary.training, examples_per_s=again.examples_per_s, spread=again.training.spread)
    return replace(summary, training=rate, times=again.times, times_by_rank=again.times_by_rank)


def verdict(summaries: Sequence[Summary], references: References) -> str:
    """Returns one sentence that says whether distribution paid."""
    several = [each for each in summaries if each.workers > 1]
    tail = _tail(summaries, references)
    if not several:
        return f"Nothing here ran on more than one worker{tail}."
    best = _best(summaries)
    ranked = [each for each in _standings(several, references, best) if not references.disturbed(each.summary)]
    if references.one_device_doubts:
        why = "; ".join(references.one_device_doubts)
        return f"Whether distribution pays is not known: one process was disturbed ({why}){tail}."
    if not ranked:
        return f"Whether distribution pays is not known: no rate to set against one process with all threads{tail}."
    shown = ", ".join(f"{each.summary.name} {fixed(each.ratio)} ×" for each in sorted(ranked, key=lambda it: -it.ratio))
    missed = "; ".join(f"{each.summary.name} is not recommended: {each.missed}" for each in ranked if each.missed)
    told = f"; {missed}" if missed else ""
    advice = _advice([each for each in ranked if not each.missed], summaries, best)
    return f"{shown} the examples/s of one process with all threads: {advice}{told}{tail}."


def _tail(summaries: Sequence[Summary], references: References) -> str:
    broken = [each.name for each in summaries if each.status != "ok"]
    tail = f"; not counted, since not finished: {', '.join(broken)}" if broken else ""
    doubtful = [each.name for each in summaries if each.status == "ok" and references.disturbed(each)]
    return f"{tail}; disturbed, so not recommended: {', '.join(doubtful)}" if doubtful else tail


def _advice(ranked: Sequence[Standing], summaries: Sequence[Summary], best: Learning | None) -> str:
    winner = max(ranked, key=lambda each: each.speed, default=None)
    if winner is None or winner.speed < 1 - _SAME:
        return "distribution does not pay here; one process is what to pick for speed"
    if winner.speed <= 1 + _SAME:
        return "as good as equal; one process is what to pick, it takes less memory"
    to_loss = f" to a loss of {short(best.target)}" if best and best.progress(best.last) else ""
    advice = f"distribution pays here; {winner.summary.name} is what to pick for speed{to_loss}"
    if to_loss and abs(winner.speed / winner.ratio - 1) > _SAME:
        advice += f", {fixed(winner.speed)} × as fast to it"
    reached = winner.summary.metrics.get("loss")
    single = [each.metrics for each in summaries if each.workers == 1 and each.status == "ok"]
    others = [metrics["loss"] for metrics in single if "loss" in metrics]
    if reached is None or not others or reached <= min(others) + _SAME * abs(min(others)):
        return advice
    return f"{advice}, though it ends at a loss of {short(reached)} against {short(min(others))} on one device"


def _standings(summaries: Sequence[Summary], references: References, best: Learning | None) -> list[Standing]:
    """Returns those that have finished and have a rate."""
    found = []
    for each in summaries:
        ratio = references.to_one_device(each)
        if each.status != "ok" or ratio is None:
            continue
        run = _learning(each)
        speed, missed = ratio, ""
        if best is not None and run is not None:
            ends = shortfall(run, best)
            against = f"against {short(best.last)}; it began at {short(best.first)}"
            missed = f"it ends {_TOLD[ends]}, at a loss of {short(run.last)} {against}" if ends else ""
            epochs, usual = run.epochs_to(best.target), best.epochs_to(best.target)
            if epochs and usual:
                speed = ratio * usual / epochs
        found.append(Standing(each, ratio, speed, missed))
    return found


_TOLD = {"at chance": "at chance", "far above": "far above one device"}


def _best(summaries: Sequence[Summary]) -> Learning | None:
    """Returns how one device learned, or, where it was not trained, the run with the lowest last loss."""
    found = [(each, _learning(each)) for each in summaries if each.status == "ok"]
    learned = [(each, run) for each, run in found if run is not None and math.isfinite(run.last)]
    single = [run for each, run in learned if each.workers == 1]
    return min(single or [run for _, run in learned], key=lambda run: run.last, default=None)


def _learning(summary: Summary) -> Learning | None:
    """Returns how a run's loss fell, by its evaluations if there are some; None without a loss."""
    curves = summary.curves
    path = [(each.epochs, each.metrics["loss"]) for each in curves.evaluations if "loss" in each.metrics]
    if not path:
        width = max(1, len(curves.loss) // _SMOOTHED)
        parts = [curves.loss[start : start + width] for start in range(0, len(curves.loss), width)]
        an_epoch = summary.started.examples_per_epoch or 1
        path = [(part[-1].examples / an_epoch, fmean(point.loss for point in part)) for part in parts]
    if curves.first_loss is None or not path:
        return None
    return Learning(((0.0, curves.first_loss), *path))


def _over(rate: float | None, reference: float | None) -> float | None:
    return rate / reference if rate is not None and reference else None
