"""How long workers that meet through servers go on by themselves: what each has seen, and what all make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.averaging.period import AutoPeriod, Period, Seen, first_period, next_period, next_stretch
from headrace.collectives.base import ProcessGroup
from headrace.training.synchronization import SyncResult


class PeriodController:
    """The period changes where all workers meet, because a lease is as long for all.

    Args:
        wish: how long it should be.
        post_local: rounds at the beginning after each of which workers meet.
        group: the workers.
    """

    def __init__(self, wish: int | AutoPeriod, post_local: int, group: ProcessGroup) -> None:
        self._wish = wish
        self._post_local = post_local
        self._group = group
        self._period = first_period(wish)
        self._known = False
        self._seen: list[Seen] = []

    def saw(self, seen: Seen, span: int, number: int, left_out: tuple[int, ...]) -> SyncResult:
        """Notes a meeting; returns what is to be said of it.

        Args:
            seen: of it.
            span: rounds of a lease now.
            number: of the meeting.
            left_out: this worker, if its parameters were not finite.
        """
        self._seen.append(seen)
        why = self._period.why if span == self._period.rounds else f"post_local={self._post_local}"
        return SyncResult(seen.rounds, span, why, seen.drift, left_out, number, seen.exchange_s)

    def stretch(self, done: int, until: int) -> tuple[int, int]:
        """Says how all go on from a fence; all call it. See `next_stretch`."""
        if isinstance(self._wish, AutoPeriod) and done >= self._post_local:
            self._period = self._group.together(self._agreed)
        self._seen.clear()
        return next_stretch(self._period, self._wish, self._post_local, done, until)

    def settings(self) -> dict[str, Any]:
        """Returns the period as JSON values."""
        return {"period": self._period.rounds, "most": self._period.most, "why": self._period.why}

    def load(self, settings: Mapping[str, Any] | None) -> None:
        """Takes up what `settings` returned; of a run that did not average there is nothing."""
        saved = (settings or {}).get("averaging")
        if saved and isinstance(self._wish, AutoPeriod):
            self._period = Period(int(saved["period"]), str(saved["why"]), int(saved["most"]))
            self._known = True

    def _agreed(self) -> Period:
        """Returns the next period: whoever has come meanwhile knows nothing, and learns it from the others."""
        rank, world, seen = self._group.rank, self._group.world, self._seen
        told = [0.0] * (6 * world)
        known = (self._period.rounds, self._period.most) if self._known else (0, 0)
        mine = (
            max((each.rounds for each in seen), default=0),
            # Whoever is late has no part in what an exchange costs, and all of them wait for the last.
            max((each.train_s for each in seen), default=0.0),
            min((each.exchange_s for each in seen), default=0.0),
            max((each.drift for each in seen), default=0.0),
        )
        told[6 * rank : 6 * rank + 6] = *known, *mine
        told = self._group.sum(told)
        rounds, most = int(max(told[0::6])), int(max(told[1::6]))
        now = Period(rounds, self._period.why, most) if rounds else self._period
        self._known = True
        span = int(max(told[2::6]))
        if not span:
            return now
        exchange_s = min(each for each, had in zip(told[4::6], told[2::6], strict=True) if had)
        # What there was of a stretch may have been shorter than the period.
        seen_all = Seen(span, max(told[3::6]), exchange_s, max(told[5::6]))
        return next_period(now, seen_all, self._wish)
