"""How many rounds workers go on by themselves before they meet: as many as the exchange costs, and the drift allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.errors import UsageError

_SOON = 4
"""Rounds before workers whose period adapts come to know of each other's."""


@dataclass(frozen=True)
class AutoPeriod:
    """Adapts the period.

    Attributes:
        exchange_share: of the time that the exchange may take at most; a longer period makes it less.
        drift: how far a worker may be from the mean of all, relative to the norm of the mean; a shorter period makes it
            less, and goes before `exchange_share`.
        longest: rounds that a period has at most.
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
    """What has been decided.

    Attributes:
        rounds: until the next meeting.
        why: in words.
        most: rounds that drift allows, as far as it is known.
    """

    rounds: int
    why: str
    most: int


@dataclass(frozen=True)
class Seen:
    """What a meeting has measured.

    Attributes:
        rounds: since the one before.
        train_s: that they took the slowest worker.
        exchange_s: that the last exchange took whoever waited for nobody; 0 where there was none.
        drift: see `AutoPeriod`.
    """

    rounds: int
    train_s: float
    exchange_s: float
    drift: float


def first_period(wish: int | AutoPeriod) -> Period:
    """Returns the period that a run begins with."""
    if isinstance(wish, AutoPeriod):
        return Period(1, "nothing is measured yet", wish.longest)
    return Period(wish, "as asked for", wish)


def next_period(now: Period, seen: Seen, wish: int | AutoPeriod) -> Period:
    """Returns the next period.

    It at most doubles, so that a drift that grows is seen in time, and at most halves, because one measurement may be
    wrong. Drift halves it, and what was too long once is not tried again before drift is below half of what is allowed.

    Args:
        now: the period that has just ended.
        seen: what it has shown.
        wish: how long it should be.
    """
    if not isinstance(wish, AutoPeriod):
        return now
    if seen.drift > wish.drift:
        shorter = max(1, now.rounds // 2)
        return Period(shorter, f"drift {seen.drift:.3g} is above {wish.drift:g}", shorter)
    most = min(wish.longest, 2 * now.most) if seen.drift < wish.drift / 2 else now.most
    if not (seen.exchange_s and seen.train_s):
        return replace(now, most=most)
    share = seen.exchange_s / (seen.exchange_s + seen.train_s)
    # So many rounds that the exchange takes its share of them and itself.
    exact = seen.exchange_s * seen.rounds / seen.train_s * (1 / wish.exchange_share - 1)
    enough = max(math.ceil(min(exact, wish.longest)), now.rounds // 2)
    costs = f"the exchange takes {share:.1%} of the time"
    if wish.exchange_share / 2 <= share <= wish.exchange_share:
        return Period(min(now.rounds, most), f"{costs}, at most {wish.exchange_share:.0%} is allowed", most)
    rounds = max(1, min(enough, most, 2 * now.rounds))
    held = f", and drift allows {most}" * (rounds == most < min(enough, 2 * now.rounds))
    return Period(rounds, f"{costs}, at most {wish.exchange_share:.0%} is allowed{held}", most)


def first_stretch(wish: int | AutoPeriod, post_local: int, first: int, until: int) -> tuple[int, int]:
    """Returns the round of the first fence of a run whose period changes at fences alone, and its period until there.

    Args:
        wish: how long the period should be.
        post_local: rounds at the beginning after each of which workers meet.
        first: the round that the run begins with.
        until: the round of the first fence, whatever the period.
    """
    if first < post_local:
        return min(until, post_local), 1
    if isinstance(wish, AutoPeriod):
        return min(until, first + _SOON), 1
    return until, wish


def next_stretch(now: Period, wish: int | AutoPeriod, post_local: int, done: int, until: int) -> tuple[int, int]:
    """Returns the same for the fence where `done` rounds are done.

    A period that adapts gets a fence where the rounds of the run have doubled, so that it can double, too.
    """
    if done < post_local:
        return min(until, post_local), 1
    if isinstance(wish, AutoPeriod):
        until = min(until, max(_SOON, 1 << done.bit_length()))
    return until, now.rounds
