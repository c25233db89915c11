"""The order of a real run, from its events: which push was applied when, and which parameters a step began with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from headrace.errors import UsageError
from headrace.prediction.rehearsal.order import PlannedStep, ServerAction, SyncInterval
from headrace.report.model.events import attempts, read_log
from headrace.spec.events import Event, Lost, PushesApplied, RunEnded, RunStarted, Stepped
from headrace.spec.plan import Plan

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Record:
    """What a real run has recorded.

    Attributes:
        steps: by worker, in order.
        pushes: by server, in order: the worker, its lease, the first shard, and the version that this shard had then.
    """

    started: RunStarted
    plan: Plan
    steps: tuple[tuple[Stepped, ...], ...]
    pushes: tuple[tuple[tuple[int, int, int, int], ...], ...]


def read_record(run_dir: Path | str) -> Record:
    """Reads a run's events.

    Raises:
        UsageError: it is no run, has not ended, was resumed or has lost processes, or has no recorded order.
    """
    events = read_log(run_dir).events
    starts = [event for event in events if isinstance(event, RunStarted)]
    if len(starts) != 1 or starts[0].resumed_step:
        raise UsageError(f"{run_dir} was resumed, and its order is in several pieces; rehearse a run of one attempt")
    ended = [event for event in events if isinstance(event, RunEnded)]
    if not ended or ended[-1].status != "ok":
        raise UsageError(f"{run_dir} has not run to its end; rehearse a run that has")
    lost = next((event for event in events if isinstance(event, Lost)), None)
    if lost is not None:
        raise UsageError(f"{run_dir} lost rank {lost.lost}, and what it did is not all recorded; rehearse another run")
    plan = attempts(events)[0].plan
    steps = tuple(_of_rank(events, Stepped, rank) for rank in range(plan.workers))
    pushes = []
    for rank in plan.servers:
        own = _of_rank(events, PushesApplied, rank)
        columns = ((e.workers, e.leases, e.firsts or (0,) * len(e.workers), e.versions) for e in own)
        pushes.append(tuple(chain.from_iterable(zip(*each, strict=True) for each in columns)))
    if plan.servers and not all(pushes):
        raise UsageError(
            f"{run_dir} has no recorded order: its servers have not written which push they applied when. Runs where "
            "every push is a step write it (parameter_server, downpour), not those where a round is one"
        )
    return Record(starts[0], plan, steps, tuple(pushes))


def _of_rank(events: Sequence[Event], kind: type[E], rank: int) -> tuple[E, ...]:
    return tuple(event for event in events if isinstance(event, kind) and event.rank == rank)


class RecordedOrder:
    """Gives the intervals of a record; `plan` is that of the rehearsal, with the owners of all shards."""

    def __init__(self, record: Record, plan: Plan) -> None:
        self._record, self._parts = record, len(plan.shares)
        self._shards = [sum(segment.owner == rank for segment in plan.segments) for rank in plan.servers]
        self._step = [0] * len(record.steps)
        self._push = [0] * len(record.pushes)
        self._fetches = [0] * len(record.steps)

    def interval(self, first: int, until: int, now_s: float, versions: Sequence[Sequence[int]]) -> SyncInterval:
        """Returns what happened from round `first` to the sync point before round `until`.

        Raises:
            UsageError: the record has other sync points, or lacks something.
        """
        steps: list[list[PlannedStep]] = []
        wanted: list[list[tuple[int, int, tuple[int, ...]]]] = []
        ended = 0.0
        for worker, every in enumerate(self._record.steps):
            mine = self._own(worker, every, until)
            planned, fetches = self._planned(worker, every, mine)
            steps.append(planned)
            wanted.append(fetches)
            ended = max([ended, *(each.ended_s for each in planned)])
        leases = {each.lease for own in steps for each in own if each.last}
        queues = [self._queue(server, leases, wanted, versions[server]) for server in range(len(self._record.pushes))]
        if not leases:
            raise UsageError(f"the record has no step of rounds {first} to {until}; is it of this job?")
        return SyncInterval(until, ended, steps, queues)

    def _own(self, worker: int, every: Sequence[Stepped], until: int) -> range:
        begin = self._step[worker]
        end = begin
        while end < len(every) and every[end].step < until:
            end += 1
        self._step[worker] = end
        return range(begin, end)

    def _planned(
        self, worker: int, every: Sequence[Stepped], mine: range
    ) -> tuple[list[PlannedStep], list[tuple[int, int, tuple[int, ...]]]]:
        """Returns the steps of a worker, and its fetches: worker, number, versions."""
        planned, fetches = [], []
        used = [index for index in mine if every[index].lease >= 0]
        for place, index in enumerate(used):
            event = every[index]
            following = every[used[place + 1]].lease if place + 1 < len(used) else -1
            number = -1
            if not (event.pulled or place):
                raise UsageError(
                    f"the record does not say with which parameters worker {worker} began step {event.step}; it is of "
                    "another version of headrace"
                )
            if event.pulled:
                number = self._fetches[worker]
                self._fetches[worker] += 1
                fetches.append((worker, number, event.pulled))
            planned.append(
                PlannedStep(
                    event.step,
                    event.lease % self._parts,
                    self._parts,
                    event.lease,
                    number,
                    event.lease != following,
                    event.time_s,
                    event.compute_s,
                    event.exchange_s,
                    event.update_s,
                )
            )
        return planned, fetches

    def _queue(
        self,
        server: int,
        leases: set[int],
        wanted: Sequence[Sequence[tuple[int, int, tuple[int, ...]]]],
        versions: Sequence[int],
    ) -> list[ServerAction]:
        """Returns a server's actions: every fetch comes when its shards have the versions that it had."""
        every, begin, count = self._record.pushes[server], self._push[server], self._shards[server]
        end = begin
        while end < len(every) and every[end][1] in leases:
            end += 1
        self._push[server] = end
        own = every[begin:end]
        firsts = sorted({push[2] for push in every})
        bucket = {first: tuple(range(first, stop)) for first, stop in zip(firsts, [*firsts[1:], count], strict=True)}
        # After so many pushes of this interval a shard has a version.
        reached = {(shard, version): 0 for shard, version in enumerate(versions)}
        for place, (_, _, first, version) in enumerate(own, 1):
            reached |= {(shard, version): place for shard in bucket[first]}
        at: dict[int, list[ServerAction]] = defaultdict(list)
        offset = sum(self._shards[:server])
        for worker, number, had in chain.from_iterable(wanted):
            mine = had * count if len(had) == 1 else had[offset : offset + count]
            parts = _by_place(reached, mine, worker, server)
            for place, shards in parts.items():
                about = tuple(shards) if len(parts) > 1 else ()
                at[place].append(ServerAction(False, worker, number, server, about))
        queue = list(at[0])
        single = len(firsts) == 1
        for place, (worker, lease, first, _) in enumerate(own, 1):
            queue.append(ServerAction(True, worker, lease, server, () if single else bucket[first]))
            queue += at[place]
        return queue


def _by_place(
    reached: Mapping[tuple[int, int], int], versions: Sequence[int], worker: int, server: int
) -> dict[int, list[int]]:
    """Returns after how many pushes shards have the versions that a worker has taken over: the shards by that."""
    parts: dict[int, list[int]] = defaultdict(list)
    for shard, version in enumerate(versions):
        place = reached.get((shard, version))
        if place is None:
            raise UsageError(
                f"the record has no push that gave shard {shard} of server {server} version {version}, with which "
                f"worker {worker} has computed; the run's files are not all of one run"
            )
        parts[place].append(shard)
    return parts
