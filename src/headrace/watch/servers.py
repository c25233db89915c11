"""What the servers of a run say of themselves, as curves: traffic, load, and the staleness of updates."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

from headrace.report.format import clean
from headrace.report.model.servers import ServerCounts, ServerSample, Staleness, moved_bytes
from headrace.spec.events import Event, RowsHeld

_POINTS = 256


class ServersSeen:
    """All servers of a run."""

    def __init__(self) -> None:
        self._counts = ServerCounts(_POINTS)
        self._tables: dict[int, RowsHeld] = {}

    def add(self, event: Event) -> bool:
        """Takes an event; returns whether a server has something to show by it."""
        if isinstance(event, RowsHeld):
            self._tables[event.server] = event
        return self._counts.add(event) or isinstance(event, RowsHeld)

    def message(self) -> dict[str, Any]:
        """Returns what the page shows of the servers."""
        lasts = self._counts.lasts.values()
        total = Staleness.of(counts for last in lasts for counts in last.staleness.values())
        refused: Counter[str] = Counter()
        for last in lasts:
            refused.update(last.refused)
        return {
            "servers": [self._shown(rank) for rank in sorted(self._counts.samples.keys() | self._tables)],
            "staleness": self._staleness(),
            "histogram": [] if total is None else list(total.counts.items())[:64],
            "updates": 0 if total is None else total.updates,
            "mean": None if total is None else total.mean,
            "p99": None if total is None else total.percentile(99),
            "largest": None if total is None else total.largest,
            "refused": {clean(why): count for why, count in refused.items()},
        }

    def _pieces(self, rank: int) -> list[tuple[ServerSample, ServerSample]]:
        pairs = self._counts.pieces(rank)
        return [(old, new) for old, new in pairs if old is not None and new.time_s > old.time_s]

    def _shown(self, rank: int) -> dict[str, Any]:
        pieces = self._pieces(rank)
        rates = [(new.time_s, (new.moved_bytes - old.moved_bytes) / (new.time_s - old.time_s)) for old, new in pieces]
        busy = None
        if pieces:
            old, new = pieces[-1]
            busy = min(1.0, (new.busy_s - old.busy_s) / (new.time_s - old.time_s))
        lasts = [served for (other, _), served in sorted(self._counts.lasts.items()) if other == rank]
        last = lasts[-1] if lasts else None
        moved = sum(moved_bytes(shard) for each in lasts for shard in each.shards)
        tables = self._tables[rank].tables if rank in self._tables else ()
        return {
            "rank": rank,
            "traffic": rates,
            "busy": busy,
            "moved": moved if last else None,
            "queue_mean": last.queue_mean if last else None,
            "queue_longest": max((each.queue_longest for each in lasts), default=None),
            "shards": len(last.shards) if last else None,
            "rows": [[clean(each.name), each.held, each.evicted] for each in tables],
        }

    def _staleness(self) -> list[tuple[float, float]]:
        """Returns the mean staleness of updates over time: of all servers, between samples of the first."""
        pieces = [piece for rank in self._counts.samples for piece in self._pieces(rank)]
        if not pieces:
            return []
        begin, end = min(old.time_s for old, _ in pieces), max(new.time_s for _, new in pieces)
        width = max(1.0, (end - begin) / _POINTS)
        edges = [begin + width * index for index in range(int((end - begin) // width) + 2)]
        sums = [[0, 0] for _ in edges]
        for old, new in pieces:
            slot = sums[min(bisect_left(edges, new.time_s), len(sums) - 1)]
            added = new.staleness - old.staleness
            slot[0] += sum(staleness * count for staleness, count in added.items())
            slot[1] += added.total()
        return [(edge, total / count) for edge, (total, count) in zip(edges, sums, strict=True) if count > 0]
