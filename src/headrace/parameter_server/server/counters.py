"""What a server counts: the evidence of its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import mul

from headrace.parameter_server.wire.layout import ShardLayout
from headrace.spec.events import ServerStats, ShardStats


class ServerCounters:
    """Counts since the server began.

    Args:
        form: of the shards.

    Attributes:
        busy_s: seconds in which it was not waiting for mail.
    """

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
        self._staleness: dict[int, Counter[int]] = {}
        self._refused: Counter[str] = Counter()
        self._waited_s: dict[int, float] = {}
        self._queued = 0
        self._longest = 0
        self._turns = 0

    def queued(self, count: int) -> None:
        """Notes how many messages were there at once."""
        if count:
            self._turns += 1
            self._queued += count
            self._longest = max(self._longest, count)

    def stepped(self, shards: Sequence[int], worker: int, staleness: int, seconds: float) -> None:
        """Notes an update of some shards; its time is theirs in proportion to their size."""
        lengths, per_byte = self._lengths, seconds
        if len(shards) > 1:
            per_byte /= sum([lengths[shard] for shard in shards]) or 1
        for shard in shards:
            self._steps[shard] += 1
            self._apply_s[shard] += per_byte * lengths[shard] if len(shards) > 1 else seconds
        self._staleness.setdefault(worker, Counter())[staleness] += len(shards)

    def refused(self, reason: str) -> None:
        """Notes a shard that did not take a gradient."""
        self._refused[reason] += 1

    def answered(self, worker: int, pushed: Sequence[int], pulled: Sequence[int], seconds: float) -> None:
        """Notes a request that has got its answer, `seconds` after it came; `pulled` are shards that were given."""
        for shard in pushed:
            self._pushes[shard] += 1
        for shard in pulled:
            self._pulls[shard] += 1
        self._waited_s[worker] = self._waited_s.get(worker, 0.0) + seconds

    @property
    def moved_bytes(self) -> int:
        """Payload that was pushed and pulled."""
        moved = (*map(mul, self._pushed_lengths, self._pushes), *map(mul, self._pulled_lengths, self._pulls))
        return int(sum(moved))

    def event(self, rank: int, time_s: float) -> ServerStats:
        """Returns the counts as they are now."""
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
            shards=tuple(map(ShardStats, *columns)),
        )
