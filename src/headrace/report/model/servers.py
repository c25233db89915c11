"""What the servers of a run did: staleness of updates, traffic, waiting times, and the most loaded server."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

from msgspec import structs

from headrace.report.format import byte_count, duration, fixed
from headrace.report.model.events import Attempt, of_kind
from headrace.report.model.row_moves import RowMoveSummary, RowReadSummary, row_moves_of, row_reads_of
from headrace.report.model.training import STEPPED_PARTS, TrainingClock, step_began_s
from headrace.spec.events import (
    LAUNCHER,
    BackupReady,
    Event,
    RunStarted,
    ServerStarted,
    ServerStats,
    ShardStats,
    Stepped,
)
from headrace.spec.plan import Plan

ROUNDS = -1
"""The key of the mean of a round, to which many workers contribute."""

_POINTS = 200
"""Most points over time."""


@dataclass(frozen=True)
class Staleness:
    """How many updates had each staleness, in ascending order: one count for each shard of an update, at least one."""

    counts: Mapping[int, int]

    @staticmethod
    def of(counts: Iterable[Mapping[str, int] | Mapping[int, int]]) -> Staleness | None:
        """Returns the sum of what servers have counted; None if they have updated nothing."""
        total: Counter[int] = Counter()
        for each in counts:
            total.update({int(staleness): count for staleness, count in each.items()})
        kept = {staleness: count for staleness, count in sorted(total.items()) if count > 0}
        return Staleness(kept) if kept else None

    @property
    def updates(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        return sum(staleness * count for staleness, count in self.counts.items()) / self.updates

    @property
    def largest(self) -> int:
        return max(self.counts)

    def percentile(self, percent: int) -> int:
        """Returns the least staleness that `percent` of 100 updates do not exceed."""
        needed, seen = percent * self.updates, 0
        for staleness, count in self.counts.items():
            seen += count
            if seen * 100 >= needed:
                return staleness
        return self.largest


@dataclass(frozen=True)
class StalenessPoint:
    """The staleness of all updates since the point before; `seconds` of training so far, without evaluations."""

    seconds: float
    staleness: Staleness


@dataclass(frozen=True)
class ServerSample:
    """What a process of a server had counted at a time: bytes of all its shards, and updates by staleness."""

    time_s: float
    process_s: float
    moved_bytes: int
    busy_s: float
    staleness: Counter[int]


class ServerCounts:
    """What servers have counted, event by event: totals of each of their processes, and samples over time.

    A process counts from 0, and is named by when it has started, or its attempt if that was later.

    Args:
        most: samples of a server that are kept; every other one goes where there are more. 0 for all.

    Attributes:
        lasts: what each process said last, by rank and process.
        samples: by rank, in the order of time.
    """

    def __init__(self, most: int = 0) -> None:
        self.lasts: dict[tuple[int, float], ServerStats] = {}
        self._most = most
        self._starts: list[RunStarted | ServerStarted] = []
        self.samples: dict[int, list[ServerSample]] = defaultdict(list)

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether a server has counted."""
        if isinstance(event, RunStarted | ServerStarted):
            self._starts.append(event)
        if not isinstance(event, ServerStats):
            return False
        # A start of the launcher's is one of all servers.
        starts = (each.time_s for each in self._starts if each.rank in (LAUNCHER, event.rank))
        process_s = max((time_s for time_s in starts if time_s <= event.time_s), default=-math.inf)
        staleness = Staleness.of(event.staleness.values())
        counts = Counter(staleness.counts if staleness is not None else {})
        moved = sum(map(moved_bytes, event.shards))
        samples = self.samples[event.rank]
        insort(samples, ServerSample(event.time_s, process_s, moved, event.busy_s, counts), key=attrgetter("time_s"))
        if self._most and len(samples) > self._most:
            # They count from the start: what lies between two of them is not lost without one.
            del samples[1:-1:2]
        last = self.lasts.get((event.rank, process_s), event)
        self.lasts[event.rank, process_s] = max(event, last, key=attrgetter("time_s"))
        return True

    def pieces(self, rank: int) -> Iterator[tuple[ServerSample | None, ServerSample]]:
        """Yields the samples of a server by time, each with the one before it of the same process."""
        samples = self.samples.get(rank, [])
        for before, sample in zip([None, *samples], samples, strict=False):
            yield (before if before is not None and before.process_s == sample.process_s else None), sample


def staleness_over_time(counted: ServerCounts, clock: TrainingClock) -> tuple[StalenessPoint, ...]:
    """Returns the differences between consecutive counts of the servers; times without an update have no point."""
    pieces = [
        (clock.until(now.time_s), now.staleness - (before.staleness if before is not None else Counter()))
        for rank in counted.samples
        for before, now in counted.pieces(rank)
    ]
    # Servers speak about once a second: finer than that there is nothing to see.
    width = max(1.0, max((seconds for seconds, _ in pieces), default=0.0) / _POINTS)
    bins: dict[int, list[tuple[float, Counter[int]]]] = defaultdict(list)
    for seconds, counts in pieces:
        bins[int(seconds / width)].append((seconds, counts))
    points = [
        (max(seconds for seconds, _ in members), Staleness.of(counts for _, counts in members))
        for _, members in sorted(bins.items())
    ]
    return tuple(StalenessPoint(seconds, staleness) for seconds, staleness in points if staleness is not None)


UNEVEN = 1.5
"""Above so many times the mean, a server or shard is worth a line."""

_TILTED = 1.1
"""A large shard is worth a line where its server is above so many times the servers' mean; else it costs no time."""

_LEAST_BYTES = 1e6
_LEAST_APPLY_S = 0.1
_LEAST_QUEUE = 2.0


@dataclass(frozen=True)
class ServerWork:
    """What one server did, all its processes together; `queue_mean` is that of the last one.

    A process's `seconds` run from its attempt's first step, or from its own start if that was later, to its last event.
    """

    busy_s: float
    seconds: float
    queue_mean: float
    queue_longest: int
    shards: tuple[ShardStats, ...]

    @property
    def busy_share(self) -> float:
        """The part of its time in which it was busy; at most 1, since it can be busy before the first step."""
        return min(1.0, self.busy_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def moved_bytes(self) -> int:
        return sum(map(moved_bytes, self.shards))

    @property
    def apply_s(self) -> float:
        return sum(shard.apply_s for shard in self.shards)


@dataclass(frozen=True)
class Waiting:
    """Where a worker's time went, over all its steps.

    `answers_s`, by server, runs from the arrival of the worker's requests to their answers. Several requests are under
    way at the same time, so these may add up to more time than passed.
    """

    wait_s: float
    compute_s: float
    exchange_s: float
    update_s: float
    answers_s: Mapping[int, float]


@dataclass(frozen=True)
class ServerSummary:
    """All servers of a run. Work that a later attempt repeated counts twice: it was moved and applied twice.

    `staleness` is by worker (`ROUNDS` where the mean of a round was applied); `refused` counts shards' pushes by
    reason; `row_moves` is None where rows of tables do not move, `row_reads` where no worker keeps some near;
    `unguarded_s` has, for each time a backup became ready, how long its server had none.
    """

    by_rank: Mapping[int, ServerWork]
    staleness: Mapping[int, Staleness]
    over_time: tuple[StalenessPoint, ...]
    refused: Mapping[str, int]
    waiting: Mapping[int, Waiting]
    row_moves: RowMoveSummary | None = None
    row_reads: RowReadSummary | None = None
    unguarded_s: tuple[float, ...] = ()

    @property
    def staleness_of_all(self) -> Staleness | None:
        return Staleness.of(each.counts for each in self.staleness.values())

    @property
    def shards(self) -> tuple[tuple[int, ShardStats], ...]:
        return tuple((rank, shard) for rank, work in self.by_rank.items() for shard in work.shards)

    @property
    def pushes(self) -> int:
        """Gradients that shards received, the refused ones too."""
        return sum(shard.pushes for _, shard in self.shards)

    @property
    def refused_share(self) -> float:
        return sum(self.refused.values()) / self.pushes if self.pushes else 0.0

    @property
    def busy_share(self) -> float:
        return sum(work.busy_share for work in self.by_rank.values()) / len(self.by_rank)

    @property
    def queue_longest(self) -> int:
        return max(work.queue_longest for work in self.by_rank.values())


def servers_of(attempts: Sequence[Attempt], clock: TrainingClock) -> ServerSummary | None:
    """Returns what the servers of a run did; None without servers, or before the first has written an event."""
    counted = ServerCounts()
    for attempt in attempts:
        for event in attempt.events:
            counted.add(event)
    if not counted.lasts:
        return None
    # Training time of a process runs from its attempt's first step, or from its own start if that was later.
    firsts = [
        (attempt.started.time_s, min(map(step_began_s, chain.from_iterable(attempt.steps.values())), default=0.0))
        for attempt in attempts
    ]
    by_rank: dict[int, ServerWork] = {}
    for (rank, process_s), served in sorted(counted.lasts.items()):
        first_s = next((first for begun_s, first in reversed(firsts) if begun_s <= process_s), firsts[0][1])
        by_rank[rank] = _work(served, max(first_s, process_s), by_rank.get(rank))
    spoken = tuple(counted.lasts.values())
    counts: dict[int, list[Mapping[str, int]]] = defaultdict(list)
    refused: Counter[str] = Counter()
    for served in spoken:
        refused.update(served.refused)
        for worker, each in served.staleness.items():
            counts[int(worker)].append(each)
    staleness = {worker: Staleness.of(each) for worker, each in sorted(counts.items())}
    return ServerSummary(
        by_rank=dict(sorted(by_rank.items())),
        staleness={worker: each for worker, each in staleness.items() if each is not None},
        over_time=staleness_over_time(counted, clock),
        refused=dict(sorted(refused.items())),
        waiting=_waiting(attempts, spoken),
        row_moves=row_moves_of(attempts),
        row_reads=row_reads_of(attempts),
        unguarded_s=tuple(ready.unguarded_s for attempt in attempts for ready in of_kind(BackupReady, attempt.events)),
    )


def to_mean(values: Sequence[float]) -> tuple[float, int]:
    """Returns the ratio of the largest value to the mean, and its index; (1, 0) where all are 0."""
    mean = sum(values) / len(values)
    which = max(range(len(values)), key=values.__getitem__)
    return (values[which] / mean if mean > 0 else 1.0), which


def imbalances(plan: Plan, served: Mapping[int, ServerStats]) -> list[str]:
    """Returns lines on servers that carry much more than others of the same part: the cut decides what a part holds."""
    servers = dict(zip(plan.backups, plan.servers, strict=False))
    # A process that has taken a lost one's place has counted less than the other one of its server.
    by_bytes = sorted(served.values(), key=lambda each: sum(map(moved_bytes, each.shards)))
    whole = {servers.get(each.rank, each.rank): each for each in by_bytes}
    parts = sorted({plan.role(rank).stage for rank in whole})
    lines = (imbalance(each for rank, each in whole.items() if plan.role(rank).stage == part) for part in parts)
    return [line for line in lines if line]


def imbalance(served: Iterable[ServerStats]) -> str | None:
    """Returns a line for the user where one server carries much more than the others; None where none does.

    It compares each server's traffic, apply time and mean queue with the servers' mean, and names a shard above
    `UNEVEN` times the shards' mean where its server is above the mean too. `served` are one attempt's events by time.
    """
    # Counts grow from a server's start to its end.
    lasts = {event.rank: event for event in served}
    works = {rank: _work(each, 0.0, None) for rank, each in sorted(lasts.items())}
    if len(works) < 2:
        return None
    parts = [
        *_uneven(works, "moves", "of the bytes", moved_bytes, byte_count, _LEAST_BYTES),
        *_uneven(works, "needs", "of the time to apply", lambda shard: shard.apply_s, duration, _LEAST_APPLY_S),
    ]
    factor, which = to_mean([work.queue_mean for work in works.values()])
    rank = list(works)[which]
    if factor > UNEVEN and works[rank].queue_mean >= _LEAST_QUEUE:
        parts.append(f"server {rank} has {fixed(factor)} × the mean queue ({works[rank].queue_mean:.1f} messages)")
    remedy = "smaller shards (sharding='max_size:...'), with placement='greedy'"
    return f"uneven servers: {'; '.join(parts)}; remedy: {remedy}" if parts else None


def _uneven(
    works: Mapping[int, ServerWork],
    verb: str,
    what: str,
    load: Callable[[ShardStats], float],
    words: Callable[[float], str],
    least: float,
) -> Iterable[str]:
    """Yields which server carries much more of something than the mean, and which of its shards does."""
    loads = {rank: sum(map(load, work.shards)) for rank, work in works.items()}
    factor, which = to_mean(list(loads.values()))
    rank = list(loads)[which]
    if loads[rank] < least or factor <= _TILTED:
        return
    shards = [(home, shard) for home, work in works.items() for shard in work.shards]
    share, heaviest = to_mean([load(shard) for _, shard in shards])
    home, shard = shards[heaviest]
    own = home == rank and share > UNEVEN
    if factor > UNEVEN or own:
        because = f", its shard {shard.name} {fixed(share)} × the shards' mean" if own else ""
        yield f"server {rank} {verb} {fixed(factor)} × the mean {what} ({words(loads[rank])}){because}"


def moved_bytes(shard: ShardStats) -> int:
    """Returns the bytes that workers pushed to a shard and pulled from it."""
    return shard.pushed_bytes + shard.pulled_bytes


def _work(served: ServerStats, began_s: float, before: ServerWork | None) -> ServerWork:
    """Returns the work of one server process, added to that of the processes before it."""
    seconds = max(0.0, served.time_s - began_s)
    work = ServerWork(served.busy_s, seconds, served.queue_mean, served.queue_longest, served.shards)
    if before is None:
        return work
    earlier = {shard.name: shard for shard in before.shards}
    return replace(
        work,
        busy_s=work.busy_s + before.busy_s,
        seconds=work.seconds + before.seconds,
        queue_longest=max(work.queue_longest, before.queue_longest),
        shards=tuple(_sum(shard, earlier.pop(shard.name, None)) for shard in work.shards) + tuple(earlier.values()),
    )


def _sum(shard: ShardStats, before: ShardStats | None) -> ShardStats:
    if before is None:
        return shard
    counts = ("pushes", "pulls", "steps", "apply_s", "pushed_bytes", "pulled_bytes")
    return structs.replace(shard, **{name: getattr(shard, name) + getattr(before, name) for name in counts})


def _waiting(attempts: Sequence[Attempt], spoken: Sequence[ServerStats]) -> dict[int, Waiting]:
    steps: dict[int, list[Stepped]] = defaultdict(list)
    for attempt in attempts:
        for rank, each in attempt.steps.items():
            steps[rank] += each
    answers: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for served in spoken:
        for worker, seconds in served.waited_s.items():
            answers[int(worker)][served.rank] += seconds
    waiting = {}
    for rank, own in sorted(steps.items()):
        times: dict[str, Any] = {part: sum(getattr(step, part) for step in own) for part in STEPPED_PARTS}
        waiting[rank] = Waiting(**times, answers_s=dict(sorted(answers[rank].items())))
    return waiting
