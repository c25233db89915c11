"""The period of workers that average through servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.collectives.base import ProcessGroup
from headrace.policies.period import AutoPeriod, Measured, Period, first_period, next_period, next_stretch
from headrace.training.synchronization import SyncResult


class PeriodController:
    """The period of workers that average through servers; it changes at sync points, as leases are as long for all."""

    def __init__(self, target: int | AutoPeriod, post_local: int, group: ProcessGroup) -> None:
        self._target = target
        self._post_local = post_local
        self._group = group
        self._period = first_period(target)
        self._known = False
        self._measured: list[Measured] = []

    def note(self, measured: Measured, span: int, number: int, left_out: tuple[int, ...]) -> SyncResult:
        """Notes an average; returns its result.

        `span` is the rounds of a lease now, `left_out` this worker if its parameters were not finite.
        """
        self._measured.append(measured)
        why = self._period.why if span == self._period.rounds else f"post_local={self._post_local}"
        return SyncResult(measured.rounds, span, why, measured.drift, left_out, number, measured.exchange_s)

    def stretch(self, done: int, until: int) -> tuple[int, int]:
        """Returns how all go on from a sync point, where all call it; see `next_stretch`."""
        if isinstance(self._target, AutoPeriod) and done >= self._post_local:
            self._period = self._group.together(self._agree)
        self._measured.clear()
        return next_stretch(self._period, self._target, self._post_local, done, until)

    def settings(self) -> dict[str, Any]:
        """Returns the period as JSON values."""
        return self._period.settings()

    def load(self, settings: Mapping[str, Any] | None) -> None:
        """Loads what `settings` returned; a run that did not average has none of it."""
        if restored := Period.restored(settings, self._target):
            self._period, self._known = restored, True

    def _agree(self) -> Period:
        """Returns the next period; a worker that has joined since the last learns it from the others."""
        known = (self._period.rounds, self._period.most) if self._known else (0, 0)
        mine = (
            max((stretch.rounds for stretch in self._measured), default=0),
            # A worker that was late does not count in what an exchange costs, and all of them wait for the last.
            max((stretch.train_s for stretch in self._measured), default=0.0),
            min((stretch.exchange_s for stretch in self._measured), default=0.0),
            max((stretch.drift for stretch in self._measured), default=0.0),
        )
        rounds, most, spans, trained_s, exchanged_s, drifts = zip(
            *self._group.gather_numbers([*known, *mine]), strict=True
        )
        now = Period(int(max(rounds)), self._period.why, int(max(most))) if max(rounds) else self._period
        self._known = True
        if not max(spans):
            return now
        exchange_s = min(seconds for seconds, had in zip(exchanged_s, spans, strict=True) if had)
        # The rounds that were measured may be fewer than the period.
        measured = Measured(int(max(spans)), max(trained_s), exchange_s, max(drifts))
        return next_period(now, measured, self._target)
