"""How many rounds workers step on their own before they synchronize: as many as the exchange costs and drift allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import UsageError

_SOON = 4
"""Rounds before workers whose period adapts first tell each other what they have measured."""


@dataclass(frozen=True)
class AutoPeriod:
    """Adapts the period.

    Attributes:
        exchange_share: of the time that the exchange may take at most; a longer period makes it less.
        drift: how far a worker may be from the mean of all, relative to the norm of the mean; a shorter period makes it
            less, and goes before `exchange_share`.
        longest: rounds that a period has at most.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterAveraging(workers=2, period=hr.AutoPeriod(longest=8))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    exchange_share: float = 0.05
    drift: float = 0.15
    longest: int = 1024

    def __post_init__(self) -> None:
        for name in ("exchange_share", "drift"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < (1 if name == "exchange_share" else math.inf):
                raise UsageError(
                    f"{name} of an automatic period must be a number above 0"
                    f"{' and below 1' * (name == 'exchange_share')}, got {value!r}"
                )
        if not isinstance(self.longest, int) or isinstance(self.longest, bool) or self.longest < 1:
            raise UsageError(f"longest must be a whole number of at least 1, got {self.longest!r}")


@dataclass(frozen=True)
class Period:
    """The present period: `rounds` until the next synchronization, of at most `most` that drift is known to allow."""

    rounds: int
    why: str
    most: int

    def settings(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {"period": self.rounds, "most": self.most, "why": self.why}

    @staticmethod
    def restored(settings: Mapping[str, Any] | None, target: int | AutoPeriod) -> Period | None:
        """Returns the period that an exchange's settings hold; None where they hold none, or it does not adapt."""
        saved = (settings or {}).get("averaging")
        if not saved or not isinstance(target, AutoPeriod):
            return None
        # The run that goes on may have another limit.
        period, most = (min(int(saved[key]), target.longest) for key in ("period", "most"))
        return Period(period, str(saved["why"]), most)


@dataclass(frozen=True)
class Measured:
    """What one synchronization has measured.

    The `rounds` since the one before took the slowest worker `train_s`; the last exchange took a worker that waited for
    no other `exchange_s`, 0 where there was none. `drift` is that of `AutoPeriod`.
    """

    rounds: int
    train_s: float
    exchange_s: float
    drift: float


def first_period(target: int | AutoPeriod) -> Period:
    """Returns the period that a run begins with."""
    if isinstance(target, AutoPeriod):
        return Period(1, "nothing is measured yet", target.longest)
    return Period(target, "as asked for", target)


def next_period(now: Period, measured: Measured, target: int | AutoPeriod) -> Period:
    """Returns the next period.

    It at most doubles, so that a drift that grows is seen in time, and at most halves, because one measurement may be
    wrong. Drift halves it, and what was too long once is not tried again before drift is below half of what is allowed.
    """
    if not isinstance(target, AutoPeriod):
        return now
    if measured.drift > target.drift:
        shorter = max(1, now.rounds // 2)
        return Period(shorter, f"drift {measured.drift:.3g} is above {target.drift:g}", shorter)
    most = min(target.longest, 2 * now.most) if measured.drift < target.drift / 2 else now.most
    if not (measured.exchange_s and measured.train_s):
        return replace(now, most=most)
    share = measured.exchange_s / (measured.exchange_s + measured.train_s)
    # So many rounds that the exchange takes its share of them and itself.
    exact = measured.exchange_s * measured.rounds / measured.train_s * (1 / target.exchange_share - 1)
    enough = max(math.ceil(min(exact, target.longest)), now.rounds // 2)
    costs = f"the exchange takes {share:.1%} of the time"
    if target.exchange_share / 2 <= share <= target.exchange_share:
        return Period(min(now.rounds, most), f"{costs}, at most {target.exchange_share:.0%} is allowed", most)
    rounds = max(1, min(enough, most, 2 * now.rounds))
    held = f", and drift allows {most}" * (rounds == most < min(enough, 2 * now.rounds))
    return Period(rounds, f"{costs}, at most {target.exchange_share:.0%} is allowed{held}", most)


def first_stretch(target: int | AutoPeriod, post_local: int, first: int, until: int) -> tuple[int, int]:
    """Returns the first sync point of a run whose period changes at sync points alone, and its period until there.

    The run begins with round `first`, and has a sync point at `until` whatever the period.
    """
    if first < post_local:
        return min(until, post_local), 1
    if isinstance(target, AutoPeriod):
        return min(until, first + _SOON), 1
    return until, target


def next_stretch(now: Period, target: int | AutoPeriod, post_local: int, done: int, until: int) -> tuple[int, int]:
    """Returns the same for the sync point where `done` rounds are done.

    A period that adapts gets a sync point where the rounds of the run have doubled, so that it can double, too.
    """
    if done < post_local:
        return min(until, post_local), 1
    if isinstance(target, AutoPeriod):
        until = min(until, max(_SOON, 1 << done.bit_length()))
    return until, now.rounds
