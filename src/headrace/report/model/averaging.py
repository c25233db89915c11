"""How often workers that go on by themselves have met, and how far they had drifted apart: numbers, words, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from headrace.report.format import duration, short
from headrace.report.model.attempts import Attempt, of_kind
from headrace.spec.events import ParametersAveraged
from headrace.spec.plain import to_plain


@dataclass(frozen=True)
class AveragingSummary:
    """The meetings of a run; what a later attempt did again counts once.

    Attributes:
        meetings: at least one, in their order.
    """

    meetings: tuple[ParametersAveraged, ...]

    @property
    def mean_rounds(self) -> float:
        """Rounds between two meetings, on the mean."""
        return sum(each.rounds for each in self.meetings) / len(self.meetings)

    @property
    def mean_drift(self) -> float:
        """Over all meetings."""
        return sum(each.drift for each in self.meetings) / len(self.meetings)

    @property
    def furthest(self) -> ParametersAveraged:
        """The meeting at which the workers had drifted furthest apart."""
        return max(self.meetings, key=lambda each: each.drift)

    @property
    def left_out(self) -> Mapping[int, int]:
        """Rank to how many of its copies were not finite, and left out."""
        return Counter(rank for each in self.meetings for rank in each.left_out)


def averaging_of(attempts: Sequence[Attempt]) -> AveragingSummary | None:
    """Returns the meetings of a run; None where there were none."""
    meetings: list[ParametersAveraged] = []
    for attempt, then in zip_longest(attempts, attempts[1:]):
        until = then.started.resumed_step if then else None
        told = [each for each in of_kind(ParametersAveraged, attempt.events) if until is None or each.step <= until]
        meetings += _merged(told)
    return AveragingSummary(tuple(meetings)) if meetings else None


def _merged(told: Sequence[ParametersAveraged]) -> list[ParametersAveraged]:
    """Returns one event a meeting: where each worker tells of itself, that of whoever had drifted furthest."""
    meetings: dict[int, list[ParametersAveraged]] = {}
    for each in told:
        # What one tells for all has no number.
        meetings.setdefault(each.meeting or -1 - len(meetings), []).append(each)
    merged = []
    for every in meetings.values():
        furthest = max(every, key=lambda each: each.drift)
        exchange_s = sum(each.exchange_s for each in every) / len(every)
        left_out = tuple(sorted({rank for each in every for rank in each.left_out}))
        merged.append(replace(furthest, exchange_s=exchange_s, left_out=left_out))
    return merged


def averaging_line(averaging: AveragingSummary) -> str:
    """Returns what stands below a comparison."""
    last = averaging.meetings[-1]
    return (
        f"{_meetings(averaging)}, the last period {_rounds(last.period)} ({last.why}); drift mean "
        f"{short(averaging.mean_drift)}, largest {short(averaging.furthest.drift)}"
    )


def averaging_rows(averaging: AveragingSummary) -> list[tuple[str, str]]:
    """Returns what is worth saying of a run's meetings, as names and values in words."""
    last, furthest = averaging.meetings[-1], averaging.furthest
    mean_s = sum(each.exchange_s for each in averaging.meetings) / len(averaging.meetings)
    rows = [
        ("averaging", f"{_meetings(averaging)}, {duration(mean_s)} each; the last period is {_rounds(last.period)}"),
        ("period because", last.why),
        (
            "drift",
            f"mean {short(averaging.mean_drift)}, largest {short(furthest.drift)} of the parameters' norm, "
            f"after {_rounds(furthest.step)}",
        ),
    ]
    left_out = averaging.left_out
    if left_out:
        ranks = ", ".join(f"rank {rank} {count} ×" for rank, count in sorted(left_out.items()))
        rows.append(("left out", f"{ranks}: parameters that were not finite; they went on from the others' mean"))
    return rows


def averaging_plain(averaging: AveragingSummary) -> dict[str, Any]:
    """Returns the same and more as JSON values, with all digits."""
    return {
        "meetings": [to_plain(each) for each in averaging.meetings],
        "mean_rounds": averaging.mean_rounds,
        "mean_drift": averaging.mean_drift,
        "largest_drift": averaging.furthest.drift,
        "left_out": {str(rank): count for rank, count in sorted(averaging.left_out.items())},
    }


def _meetings(averaging: AveragingSummary) -> str:
    count = len(averaging.meetings)
    return f"{count} meeting{'s' * (count != 1)}, one in {short(averaging.mean_rounds)} rounds"


def _rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"
