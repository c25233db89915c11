"""How far behind the parameters were that gradients were made with: what servers have measured, over a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from headrace.report.format import byte_count, duration, ratio
from headrace.report.model.events import Attempt, of_kind
from headrace.report.model.training import TrainingClock
from headrace.spec.events import ServerStarted, ServerStats, ShardStats, Stepped

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


UNEVEN = 1.5
"""Above so many times the mean, a server or shard is worth a line."""

_TILTED = 1.1
"""A large shard is worth one where its server is above so many times the servers' mean; else it costs nobody."""

_LEAST_APPLY_S = 0.1
_LEAST_QUEUE = 2.0


@dataclass(frozen=True)
class ServerWork:
    """What one server did, in all attempts together.

    Attributes:
        busy_s: seconds in which it was not waiting for messages.
        seconds: from the begin of an attempt's first step until the server last spoke.
        queue_mean: messages that were there when it looked; of the last attempt.
        queue_longest: the most.
        shards: in the server's order.
    """

    busy_s: float
    seconds: float
    queue_mean: float
    queue_longest: int
    shards: tuple[ShardStats, ...]

    @property
    def busy_share(self) -> float:
        """The part of its time in which it was busy; 1 also where it was busy before the first step."""
        return min(1.0, self.busy_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def moved_bytes(self) -> int:
        """Pushed to it and pulled from it."""
        return sum(map(_moved, self.shards))

    @property
    def apply_s(self) -> float:
        """Seconds that its updates took."""
        return sum(shard.apply_s for shard in self.shards)


@dataclass(frozen=True)
class Waiting:
    """Where a worker's time went, over all its steps.

    Attributes:
        wait_s, compute_s, exchange_s, update_s: as in `Stepped`.
        answers_s: by server, the seconds from its requests' arrival to their answers, others' turns included. Requests
            are under way at the same time, so that these may add up to more than passed.
    """

    wait_s: float
    compute_s: float
    exchange_s: float
    update_s: float
    answers_s: Mapping[int, float]


@dataclass(frozen=True)
class ServerSummary:
    """All servers of a run. What a later attempt did again counts twice here: it was moved and applied twice.

    Attributes:
        by_rank: each server's work.
        staleness: by worker (`ROUNDS` where means of rounds were applied).
        over_time: of all workers.
        refused: reason to how many shards' pushes.
        waiting: by worker.
    """

    by_rank: Mapping[int, ServerWork]
    staleness: Mapping[int, Staleness]
    over_time: tuple[StalenessPoint, ...]
    refused: Mapping[str, int]
    waiting: Mapping[int, Waiting]

    @property
    def staleness_of_all(self) -> Staleness | None:
        """Of all workers; None without an update."""
        return Staleness.of(
            {str(staleness): count for staleness, count in each.counts.items()} for each in self.staleness.values()
        )

    @property
    def shards(self) -> tuple[tuple[int, ShardStats], ...]:
        """All shards, each with its server."""
        return tuple((rank, shard) for rank, work in self.by_rank.items() for shard in work.shards)

    @property
    def pushes(self) -> int:
        """Shards' gradients that came, refused ones too."""
        return sum(shard.pushes for _, shard in self.shards)

    @property
    def refused_share(self) -> float:
        """The part of the pushes that was refused."""
        return sum(self.refused.values()) / self.pushes if self.pushes else 0.0

    @property
    def busy_share(self) -> float:
        """The mean over the servers."""
        return sum(work.busy_share for work in self.by_rank.values()) / len(self.by_rank)

    @property
    def queue_longest(self) -> int:
        """On any server."""
        return max(work.queue_longest for work in self.by_rank.values())


def servers_of(attempts: Sequence[Attempt], clock: TrainingClock) -> ServerSummary | None:
    """Returns what the servers of a run did; None where there were none, or none has spoken yet."""
    lasts = [_last(of_kind(ServerStats, attempt.events)) for attempt in attempts]
    spoken = [served for last in lasts for served in last.values()]
    if not spoken:
        return None
    by_rank: dict[int, ServerWork] = {}
    for attempt, last in zip(attempts, lasts, strict=True):
        for rank, served in last.items():
            by_rank[rank] = _work(served, _began(attempt, rank), by_rank.get(rank))
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
    )


def to_mean(values: Sequence[float]) -> tuple[float, int]:
    """Returns how many times the mean the largest value is, and which it is; (1, 0) where all are 0."""
    mean = sum(values) / len(values)
    which = max(range(len(values)), key=values.__getitem__)
    return (values[which] / mean if mean > 0 else 1.0), which


def imbalance(served: Iterable[ServerStats]) -> str | None:
    """Returns a line for the user where one server carries much more than the others; None where none does.

    It speaks of servers whose traffic, apply time or mean queue is above `UNEVEN` times the servers' mean, and of
    shards whose traffic or apply time is above that of the shards' where they tilt their server.

    Args:
        served: of all servers of one attempt, by time; the last of each counts.
    """
    works = {rank: _work(each, 0.0, None) for rank, each in sorted(_last(served).items())}
    if len(works) < 2:
        return None
    said = [
        *_uneven(works, "moves", "of the bytes", lambda work: work.moved_bytes, _moved, byte_count, 1.0),
        *_uneven(works, "needs", "of the time to apply", _apply_s, _apply_s, duration, _LEAST_APPLY_S),
    ]
    factor, which = to_mean([work.queue_mean for work in works.values()])
    rank = list(works)[which]
    if factor > UNEVEN and works[rank].queue_mean >= _LEAST_QUEUE:
        said.append(f"server {rank} has {ratio(factor)} × the mean queue ({works[rank].queue_mean:.1f} messages)")
    if not said:
        return None
    return f"uneven servers: {'; '.join(said)}; remedy: smaller shards (max_size), or placement by bytes (greedy)"


def _uneven(
    works: Mapping[int, ServerWork],
    verb: str,
    what: str,
    of_server: Callable[[ServerWork], float],
    of_shard: Callable[[ShardStats], float],
    words: Callable[[float], str],
    least: float,
) -> Iterable[str]:
    """Says which server carries much more of something than the mean, and which of its shards does."""
    loads = {rank: of_server(work) for rank, work in works.items()}
    factor, which = to_mean(list(loads.values()))
    rank = list(loads)[which]
    if loads[rank] < least or factor <= _TILTED:
        return
    shards = [(home, shard) for home, work in works.items() for shard in work.shards]
    share, heaviest = to_mean([of_shard(shard) for _, shard in shards])
    home, shard = shards[heaviest]
    own = home == rank and share > UNEVEN
    if factor > UNEVEN or own:
        because = f", its shard {shard.name} {ratio(share)} × the shards' mean" if own else ""
        yield f"server {rank} {verb} {ratio(factor)} × the mean {what} ({words(loads[rank])}){because}"


def _moved(shard: ShardStats) -> int:
    return shard.pushed_bytes + shard.pulled_bytes


def _apply_s(of: ServerWork | ShardStats) -> float:
    return of.apply_s


def _last(served: Iterable[ServerStats]) -> dict[int, ServerStats]:
    """Returns what each server said last: its counts grow from its begin to its end."""
    return {event.rank: event for event in served}


def _began(attempt: Attempt, rank: int) -> float:
    """When a server's training time began: with the first step, or with the server where it came later."""
    started = max((e.time_s for e in of_kind(ServerStarted, attempt.events) if e.rank == rank), default=0.0)
    steps = chain.from_iterable(attempt.steps.values())
    first = min((s.time_s - (s.wait_s + s.compute_s + s.exchange_s + s.update_s) for s in steps), default=0.0)
    return max(started, first)


def _work(served: ServerStats, began_s: float, before: ServerWork | None) -> ServerWork:
    """Returns one server's work, added to what it did in attempts before."""
    work = ServerWork(
        served.busy_s,
        max(0.0, served.time_s - began_s),
        served.queue_mean,
        served.queue_longest,
        served.shards,
    )
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
    return ShardStats(
        name=shard.name,
        bytes=shard.bytes,
        pushes=shard.pushes + before.pushes,
        pulls=shard.pulls + before.pulls,
        steps=shard.steps + before.steps,
        apply_s=shard.apply_s + before.apply_s,
        pushed_bytes=shard.pushed_bytes + before.pushed_bytes,
        pulled_bytes=shard.pulled_bytes + before.pulled_bytes,
    )


def _waiting(attempts: Sequence[Attempt], spoken: Sequence[ServerStats]) -> dict[int, Waiting]:
    steps: dict[int, list[Stepped]] = defaultdict(list)
    for attempt in attempts:
        for rank, each in attempt.steps.items():
            steps[rank] += each
    answers: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for served in spoken:
        for worker, seconds in served.waited_s.items():
            answers[int(worker)][served.rank] += seconds
    return {
        rank: Waiting(
            wait_s=sum(step.wait_s for step in own),
            compute_s=sum(step.compute_s for step in own),
            exchange_s=sum(step.exchange_s for step in own),
            update_s=sum(step.update_s for step in own),
            answers_s=dict(sorted(answers[rank].items())),
        )
        for rank, own in sorted(steps.items())
    }
