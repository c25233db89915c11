"""What a run is measured against, and whether distribution paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.report.format import ratio, short
from headrace.report.model.summary import Summary

_SAME = 0.05
"""Two rates closer than this are called equal: runs on a shared machine differ by about as much."""


@dataclass(frozen=True)
class References:
    """Rates of the same job on the same machine.

    Attributes:
        one_device_examples_per_s: of one process with all threads: what a user would have without us.
        ceiling_examples_per_s: by number of workers: of so many unconnected workers at the same time, in the
            same malloc environment, all together.
        one_thread_examples_per_s: of one process with one thread and the machine for itself.
    """

    one_device_examples_per_s: float | None = None
    ceiling_examples_per_s: Mapping[int, float] = field(default_factory=dict)
    one_thread_examples_per_s: float | None = None

    def to_one_device(self, summary: Summary) -> float | None:
        """The run's rate over one process with all threads; None where either is unknown."""
        return _over(summary.examples_per_s, self.one_device_examples_per_s)

    def to_ceiling(self, summary: Summary) -> float | None:
        """The run's rate over that of as many unconnected workers; None for one worker, or if unknown."""
        return (
            None
            if summary.workers == 1
            else _over(summary.examples_per_s, self.ceiling_examples_per_s.get(summary.workers))
        )


def verdict(summaries: Sequence[Summary], references: References) -> str:
    """Returns one sentence: did it pay to distribute?"""
    spread = [each for each in summaries if each.workers > 1]
    rated = [
        (rate, each) for each in spread if each.status == "ok" and (rate := references.to_one_device(each)) is not None
    ]
    broken = [each.name for each in summaries if each.status != "ok"]
    tail = f"; not counted, since not finished: {', '.join(broken)}" if broken else ""
    if not spread:
        return f"Nothing here ran on more than one worker{tail}."
    if not rated:
        return f"Whether distribution pays is not known: no rate to set against one process with all threads{tail}."
    rated.sort(key=lambda pair: -pair[0])
    best, winner = rated[0]
    shown = ", ".join(f"{each.name} {ratio(rate)} ×" for rate, each in rated)
    return f"{shown} the examples/s of one process with all threads: {_advice(best, winner, summaries)}{tail}."


def _advice(best: float, winner: Summary, summaries: Sequence[Summary]) -> str:
    if best < 1 - _SAME:
        return "distribution does not pay here; one process is what to pick for speed"
    if best <= 1 + _SAME:
        return "as good as equal; one process is what to pick, it takes less memory"
    return f"distribution pays here; {winner.name} is what to pick for speed{_warning(winner, summaries)}"


def _warning(winner: Summary, summaries: Sequence[Summary]) -> str:
    """A faster run that learns less is no better; say so."""
    reached = winner.metrics.get("loss")
    others = [
        each.metrics["loss"]
        for each in summaries
        if each.workers == 1 and each.status == "ok" and "loss" in each.metrics
    ]
    if reached is None or not others or reached <= min(others) * (1 + _SAME):
        return ""
    return f", though it ends at a loss of {short(reached)} against {short(min(others))} on one device"


def _over(rate: float | None, reference: float | None) -> float | None:
    return rate / reference if rate is not None and reference else None
