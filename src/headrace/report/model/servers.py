"""What the servers of a run did: staleness of updates, traffic, waiting times, and the most loaded server."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from msgspec import structs

from headrace.report.format import byte_count, duration, fixed
from headrace.report.model.events import Attempt, of_kind
from headrace.report.model.row_moves import RowMoveSummary, RowReadSummary, row_moves_of, row_reads_of
from headrace.report.model.training import STEPPED_PARTS, TrainingClock, step_began_s
from headrace.spec.events import BackupReady, ServerStarted, ServerStats, ShardStats, Stepped
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


def staleness_over_time(attempts: Iterable[Attempt], clock: TrainingClock) -> tuple[StalenessPoint, ...]:
    """Returns the differences between consecutive counts of the servers; times without an update have no point."""
    pieces = [piece for attempt in attempts for piece in _pieces(attempt, clock)]
    # Servers speak about once a second: finer than that there is nothing to see.
    width = max(1.0, max((seconds for seconds, _ in pieces), default=0.0) / _POINTS)
    bins: dict[int, list[tuple[float, Mapping[str, int]]]] = defaultdict(list)
    for seconds, counts in pieces:
        bins[int(seconds / width)].append((seconds, counts))
    points = [
        (max(seconds for seconds, _ in members), Staleness.of(counts for _, counts in members))
        for _, members in sorted(bins.items())
    ]
    return tuple(StalenessPoint(seconds, staleness) for seconds, staleness in points if staleness is not None)


def _pieces(attempt: Attempt, clock: TrainingClock) -> list[tuple[float, Mapping[str, int]]]:
    """Returns when each server wrote its counts, and what it had applied since the time before."""
    before: dict[int, Counter[str]] = defaultdict(Counter)
    pieces: list[tuple[float, Mapping[str, int]]] = []
    for event in attempt.events:
        if isinstance(event, ServerStarted):
            before.pop(event.rank, None)  # A replacement counts from 0.
        if not isinstance(event, ServerStats):
            continue
        now: Counter[str] = Counter()
        for counts in event.staleness.values():
            now.update(counts)
        pieces.append((clock.until(event.time_s), now - before[event.rank]))
        before[event.rank] = now
    return pieces


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
    processes = [process for attempt in attempts for process in _processes(attempt)]
    if not processes:
        return None
    by_rank: dict[int, ServerWork] = {}
    for began_s, served in processes:
        by_rank[served.rank] = _work(served, began_s, by_rank.get(served.rank))
    spoken = [served for _, served in processes]
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
        over_time=staleness_over_time(attempts, clock),
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
    """Returns lines on servers that carry much more than others of the same part of the model."""
    parts = sorted({plan.role(rank).stage for rank in served})
    # The servers of another part hold what the cut has left them.
    lines = (imbalance(each for rank, each in served.items() if plan.role(rank).stage == part) for part in parts)
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
    if not parts:
        return None
    return (
        f"uneven servers: {'; '.join(parts)}; remedy: smaller shards (sharding='max_size:...'), with placement='greedy'"
    )


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


def _processes(attempt: Attempt) -> list[tuple[float, ServerStats]]:
    """Returns of each server process when its training time began, and its last event.

    It began with the first step, or with the process if that started later. A replacement counts from 0.
    """
    first = min(map(step_began_s, chain.from_iterable(attempt.steps.values())), default=0.0)
    began: dict[int, float] = {}
    lasts: dict[int, ServerStats] = {}
    ended: list[tuple[float, ServerStats]] = []
    for event in attempt.events:
        if isinstance(event, ServerStarted):
            if event.rank in lasts:
                ended.append((began.get(event.rank, first), lasts.pop(event.rank)))
            began[event.rank] = max(first, event.time_s)
        elif isinstance(event, ServerStats):
            lasts[event.rank] = event
    return [*ended, *((began.get(rank, first), last) for rank, last in lasts.items())]


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
