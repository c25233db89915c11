"""A server's counters: the evidence of its work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from operator import mul

from msgspec.structs import replace

from headrace.parameter_server.wire import ShardLayout
from headrace.spec.events import Event, PushesApplied, ServerStats, ShardStats, TableStats


class ServerCounters:
    """Counts since the server started; `busy_s` is the time in which it did not wait for messages."""

    def __init__(self, layout: ShardLayout) -> None:
        self.busy_s = 0.0
        self._names = tuple(piece.name for piece in layout.pieces)
        self._lengths = layout.slots.lengths
        self._pushed_lengths = layout.push_slots.lengths
        self._pulled_lengths = (layout.reply_slots or layout.slots).lengths
        self._pushes = [0] * len(layout)
        self._pulls = [0] * len(layout)
        self._steps = [0] * len(layout)
        self._apply_s = [0.0] * len(layout)
        self._staleness: dict[int, Counter[int]] = defaultdict(Counter)
        self._refused: Counter[str] = Counter()
        self._waited_s: dict[int, float] = defaultdict(float)
        self._turns, self._queued, self._longest = 0, 0, 0
        # Of the rows of tables, which are of any number.
        self.rows: ShardStats | None = None
        self.tables: Callable[[], tuple[TableStats, ...]] = tuple
        self._order: list[tuple[int, int, int, int]] = []
        # More events, to be made from the server's rank and the time, and taken away when they are written.
        self.events: list[Callable[[int, float], Event]] = []

    def queued(self, count: int) -> None:
        """Counts the messages that were received together."""
        if count:
            self._turns += 1
            self._queued += count
            self._longest = max(self._longest, count)

    def stepped(self, shards: Sequence[int], worker: int, staleness: int, seconds: float) -> None:
        """Counts an update of some shards, and divides its time among them by size."""
        lengths = self._lengths
        per_byte = seconds / (sum([lengths[shard] for shard in shards]) or 1)
        for shard in shards:
            self._steps[shard] += 1
            self._apply_s[shard] += per_byte * lengths[shard] if len(shards) > 1 else seconds
        self._staleness[worker][staleness] += len(shards)

    def stepped_rows(self, worker: int, staleness: int, seconds: float) -> None:
        """Counts an update of rows."""
        self._staleness[worker][staleness] += 1
        self.moved_rows(steps=1, apply_s=seconds)

    def moved_rows(self, **more: float) -> None:
        """Adds to the counts of rows, by the names of `ShardStats`."""
        rows = self.rows
        assert rows is not None
        self.rows = replace(rows, **{name: getattr(rows, name) + number for name, number in more.items()})

    def applied(self, worker: int, lease: int, first: int, version: int) -> None:
        """Remembers that a push was applied to the shards from `first` on, which had `version` then."""
        self._order.append((worker, lease, first, version))

    def order(self, rank: int, time_s: float) -> PushesApplied | None:
        """Returns the pushes that were applied since the last call; None without any."""
        if not self._order:
            return None
        (workers, leases, firsts, versions), self._order = zip(*self._order, strict=True), []
        return PushesApplied(rank, time_s, workers, leases, firsts if any(firsts) else (), versions)

    def refused(self, reason: str) -> None:
        """Counts a shard that refused a gradient."""
        self._refused[reason] += 1

    def answered(self, worker: int, pushed: Sequence[int], pulled: Sequence[int], seconds: float) -> None:
        """Counts an answered request, which took `seconds`; `pulled` are the shards whose parameters were sent."""
        for shard in pushed:
            self._pushes[shard] += 1
        for shard in pulled:
            self._pulls[shard] += 1
        self._waited_s[worker] += seconds

    @property
    def moved_bytes(self) -> int:
        """Payload pushed and pulled."""
        moved = (*map(mul, self._pushed_lengths, self._pushes), *map(mul, self._pulled_lengths, self._pulls))
        return int(sum(moved)) + (self.rows.pushed_bytes + self.rows.pulled_bytes if self.rows else 0)

    def event(self, rank: int, time_s: float) -> ServerStats:
        """Returns the present counts."""
        pushed, pulled = map(mul, self._pushed_lengths, self._pushes), map(mul, self._pulled_lengths, self._pulls)
        columns = (self._names, self._lengths, self._pushes, self._pulls, self._steps, self._apply_s, pushed, pulled)
        return ServerStats(
            rank=rank,
            time_s=time_s,
            busy_s=self.busy_s,
            queue_mean=self._queued / self._turns if self._turns else 0.0,
            queue_longest=self._longest,
            staleness={
                str(worker): {str(staleness): count for staleness, count in sorted(counts.items())}
                for worker, counts in sorted(self._staleness.items())
            },
            waited_s={str(worker): seconds for worker, seconds in sorted(self._waited_s.items())},
            refused=dict(self._refused),
            shards=(*map(ShardStats, *columns), *([self.rows] if self.rows else [])),
        )
