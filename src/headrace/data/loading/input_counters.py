"""Where the time of a worker's input goes: counts, stage by stage, at next to no cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

from headrace.data.loading.reader import ReadResult
from headrace.errors import DataError
from headrace.spec.events import InputStageStats, InputStats

_TELL_EVERY_S = 1.0
_SHOWN = 3


class InputCounters:
    """Counts since a loader began. Whoever takes the batches adds them, and nobody else.

    Args:
        names: of the stages, in their order.
        most_skipped: examples that may be left out in an epoch.
        tell: called about once a second while batches come.

    Attributes:
        parallel: how batches are read, "inline", "threads" or "processes".
        readers: how many threads or processes read.
        skipped: examples that could not be had and were left out.
        shown: the first of those, each with the reason.
        examples: that came.
        notices: lines for the user.
    """

    def __init__(
        self, names: Sequence[str], most_skipped: int, tell: Callable[[InputCounters], None] | None = None
    ) -> None:
        self.parallel = "inline"
        self.readers = 1
        self.skipped = 0
        self.shown: list[str] = []
        self.examples = 0
        self.notices: list[str] = []
        self._names = tuple(names)
        self._most_skipped = most_skipped
        self._tell = tell
        self._busy = [0.0] * len(names)
        self._waiting = [0.0] * len(names)
        self._skips: Counter[int] = Counter()
        self._first: float | None = None
        self._last = self._told = self._waited = 0.0
        self._ready = self._batches = self._bytes = 0

    def begin(self) -> None:
        """Forgets which epochs had examples left out: what follows may read them again."""
        self._skips.clear()

    def add(self, epoch: int, read: ReadResult, asked: float, ready: int = 0) -> None:
        """Counts a batch that has just come.

        Args:
            epoch: its.
            read: what was read.
            asked: when it was asked for, by `perf_counter`.
            ready: batches that were there then.

        Raises:
            DataError: more examples were left out in this epoch than may be.
        """
        self._last = perf_counter()
        if self._first is None:
            self._first = self._told = asked
        self._waited += self._last - asked
        self._ready += ready
        self._batches += 1
        self.examples += read.examples
        self._bytes += read.nbytes
        self.notices += read.notices
        for stage, seconds in enumerate(read.seconds):
            self._busy[stage] += seconds
        for stage, seconds in enumerate(read.waiting):
            self._waiting[stage] += seconds
        if read.skipped:
            self._skip(epoch, read.skipped)
        if self._tell is not None and self._last - self._told >= _TELL_EVERY_S:
            self._told = self._last
            self._tell(self)

    def event(self, rank: int, time_s: float) -> InputStats:
        """Returns the counts as they are now."""
        return InputStats(
            rank=rank,
            time_s=time_s,
            parallel=self.parallel,
            readers=self.readers,
            seconds=0.0 if self._first is None else self._last - self._first,
            waited_s=self._waited,
            ready=self._ready,
            batches=self._batches,
            examples=self.examples,
            bytes=self._bytes,
            skipped=self.skipped,
            stages=tuple(map(InputStageStats, self._names, self._busy, self._waiting)),
        )

    def _skip(self, epoch: int, reasons: Sequence[str]) -> None:
        self.shown += reasons[: _SHOWN - len(self.shown)]
        self.skipped += len(reasons)
        self._skips[epoch] += len(reasons)
        if self._skips[epoch] > self._most_skipped:
            count = f"{self._skips[epoch]} example{'s' * (self._skips[epoch] != 1)}"
            raise DataError(
                f"{count} of epoch {epoch} could not be had, and on_error('skip', most={self._most_skipped}) lets "
                f"{self._most_skipped} be left out; repair them, or allow more. The first: {'; '.join(self.shown)}"
            )
