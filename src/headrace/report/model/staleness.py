"""How far behind the parameters were that gradients were made with: what servers have measured, over a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.report.model.attempts import Attempt, of_kind
from headrace.report.model.training_clock import TrainingClock
from headrace.spec.events import ServerStats

ROUNDS = -1
"""Stands for the worker where the mean of a round was applied, which is of many."""

_POINTS = 200
"""Most points over time."""


@dataclass(frozen=True)
class Staleness:
    """How often an update was so stale: at least one update.

    Attributes:
        counts: staleness to updates, one for each shard that was updated; in order.
    """

    counts: Mapping[int, int]

    @staticmethod
    def of(counts: Iterable[Mapping[str, int]]) -> Staleness | None:
        """Returns what servers have counted, added up; None if they have updated nothing."""
        total: Counter[int] = Counter()
        for each in counts:
            total.update({int(staleness): count for staleness, count in each.items()})
        kept = {staleness: count for staleness, count in sorted(total.items()) if count > 0}
        return Staleness(kept) if kept else None

    @property
    def updates(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Over all updates."""
        return sum(staleness * count for staleness, count in self.counts.items()) / self.updates

    @property
    def largest(self) -> int:
        """Of any update."""
        return max(self.counts)

    def percentile(self, percent: int) -> int:
        """Returns the least staleness that so many in a hundred updates do not exceed."""
        needed, seen = percent * self.updates, 0
        for staleness, count in self.counts.items():
            seen += count
            if seen * 100 >= needed:
                return staleness
        return self.largest


@dataclass(frozen=True)
class StalenessPoint:
    """What was applied since the point before.

    Attributes:
        seconds: trained so far, without evaluations.
        staleness: of all workers on all servers.
    """

    seconds: float
    staleness: Staleness


def staleness_over_time(attempts: Iterable[Attempt], clock: TrainingClock) -> tuple[StalenessPoint, ...]:
    """Returns the differences between what servers said one after the other; times without an update have no point."""
    pieces = [piece for attempt in attempts for piece in _pieces(attempt, clock)]
    # Servers speak about once a second: finer than that there is nothing to see.
    width = max(1.0, max((seconds for seconds, _ in pieces), default=0.0) / _POINTS)
    bins: dict[int, list[tuple[float, Mapping[str, int]]]] = defaultdict(list)
    for seconds, counts in pieces:
        bins[int(seconds / width)].append((seconds, counts))
    points = []
    for _, members in sorted(bins.items()):
        staleness = Staleness.of(counts for _, counts in members)
        if staleness is not None:
            points.append(StalenessPoint(max(seconds for seconds, _ in members), staleness))
    return tuple(points)


def _pieces(attempt: Attempt, clock: TrainingClock) -> list[tuple[float, Mapping[str, int]]]:
    """Returns when each server spoke, and what it had applied since it spoke before."""
    before: dict[int, Counter[str]] = defaultdict(Counter)
    pieces: list[tuple[float, Mapping[str, int]]] = []
    for event in of_kind(ServerStats, attempt.events):
        now: Counter[str] = Counter()
        for counts in event.staleness.values():
            now.update(counts)
        pieces.append((clock.until(event.time_s), now - before[event.rank]))
        before[event.rank] = now
    return pieces
