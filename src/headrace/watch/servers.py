"""What the servers of a run say of themselves, as curves: traffic, load, and the staleness of updates."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.report.format import clean
from headrace.report.model.servers import Staleness, moved_bytes
from headrace.spec.events import Event, RowsHeld, ServerStarted, ServerStats

_POINTS = 256


@dataclass(frozen=True, order=True)
class _Sample:
    """A server's counts since its process started, at a time."""

    time_s: float
    process_s: float
    moved: int
    busy_s: float
    staleness: int
    updates: int


@dataclass
class _Server:
    """One server: its counts over time, and what each of its processes said last, by the time when that started.

    `starts` are those of its processes, ascending; more may be added to it.
    """

    starts: Sequence[float]
    samples: list[_Sample] = field(default_factory=list)
    lasts: dict[float, ServerStats] = field(default_factory=dict)
    tables: RowsHeld | None = None

    @property
    def last(self) -> ServerStats | None:
        """What the newest process said last."""
        return self.lasts[max(self.lasts)] if self.lasts else None

    def add(self, event: ServerStats) -> None:
        counts: Counter[int] = Counter()
        for each in event.staleness.values():
            counts.update({int(staleness): count for staleness, count in each.items()})
        total = sum(staleness * count for staleness, count in counts.items())
        process_s = [-math.inf, *self.starts][bisect_right(self.starts, event.time_s)]
        moved = sum(map(moved_bytes, event.shards))
        insort(self.samples, _Sample(event.time_s, process_s, moved, event.busy_s, total, counts.total()))
        if len(self.samples) > _POINTS:
            # They count from the start: what lies between two of them is not lost without one.
            del self.samples[1:-1:2]
        before = self.lasts.get(process_s)
        if before is None or event.time_s >= before.time_s:
            self.lasts[process_s] = event

    def pieces(self) -> list[tuple[_Sample, _Sample]]:
        """Returns consecutive samples of one process: counts of the next one begin at 0."""
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return [(old, new) for old, new in pairs if new.time_s > old.time_s and new.process_s == old.process_s]


class ServersSeen:
    """All servers of a run."""

    def __init__(self) -> None:
        self._servers: dict[int, _Server] = {}
        self._starts: defaultdict[int, list[float]] = defaultdict(list)

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether a server has something to show by it."""
        match event:
            case ServerStarted():
                insort(self._starts[event.rank], event.time_s)
            case RowsHeld():
                self._server(event.server).tables = event
            case ServerStats():
                self._server(event.rank).add(event)
        return isinstance(event, RowsHeld | ServerStats)

    def message(self) -> dict[str, Any]:
        """Returns what the page shows of the servers."""
        servers = [self._shown(rank, each) for rank, each in sorted(self._servers.items())]
        lasts = [last for each in self._servers.values() for last in each.lasts.values()]
        total = Staleness.of(counts for last in lasts for counts in last.staleness.values())
        refused: Counter[str] = Counter()
        for last in lasts:
            refused.update(last.refused)
        return {
            "servers": servers,
            "staleness": self._staleness(),
            "histogram": [] if total is None else list(total.counts.items())[:64],
            "updates": 0 if total is None else total.updates,
            "mean": None if total is None else total.mean,
            "p99": None if total is None else total.percentile(99),
            "largest": None if total is None else total.largest,
            "refused": {clean(why): count for why, count in refused.items()},
        }

    def _server(self, rank: int) -> _Server:
        return self._servers.setdefault(rank, _Server(self._starts[rank]))

    def _shown(self, rank: int, server: _Server) -> dict[str, Any]:
        pieces = server.pieces()
        rates = [(new.time_s, (new.moved - old.moved) / (new.time_s - old.time_s)) for old, new in pieces]
        busy = None
        if pieces:
            old, new = pieces[-1]
            busy = min(1.0, (new.busy_s - old.busy_s) / (new.time_s - old.time_s))
        moved = sum(moved_bytes(shard) for each in server.lasts.values() for shard in each.shards)
        last, tables = server.last, server.tables.tables if server.tables else ()
        return {
            "rank": rank,
            "traffic": rates,
            "busy": busy,
            "moved": moved if last else None,
            "queue_mean": last.queue_mean if last else None,
            "queue_longest": max((each.queue_longest for each in server.lasts.values()), default=None),
            "shards": len(last.shards) if last else None,
            "rows": [[clean(each.name), each.held, each.evicted] for each in tables],
        }

    def _staleness(self) -> list[tuple[float, float]]:
        """Returns the mean staleness of updates over time: of all servers, between samples of the first."""
        pieces = [piece for server in self._servers.values() for piece in server.pieces()]
        if not pieces:
            return []
        begin, end = min(old.time_s for old, _ in pieces), max(new.time_s for _, new in pieces)
        width = max(1.0, (end - begin) / _POINTS)
        edges = [begin + width * index for index in range(int((end - begin) // width) + 2)]
        sums = [[0, 0] for _ in edges]
        for old, new in pieces:
            slot = sums[min(bisect_left(edges, new.time_s), len(sums) - 1)]
            slot[0] += new.staleness - old.staleness
            slot[1] += new.updates - old.updates
        return [(edge, total / count) for edge, (total, count) in zip(edges, sums, strict=True) if count > 0]
