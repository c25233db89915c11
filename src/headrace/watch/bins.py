"""Sums over steps and over time in a bounded number of bins, each with the revision at which it last changed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.watch.steps import Floats, Ints, Steps

_LOSS_BINS = 512
_MOST_SETS = 8
_LANE_BINS = 256
_FIRST_WIDTH_S = 0.25
RECENT_BINS, RECENT_WIDTH_S = 120, 0.5
"""The last minute."""

_PARTS = 4
_COVERED, _EXAMPLES = 4, 5
"""The last columns of a lane's bin after the parts of a step: seconds that are accounted for, and examples."""

_MOST_RANKS = 1024


class LossBins:
    """The loss by step: weighted sums of consecutive steps, of all workers together.

    The number of steps in a bin doubles whenever there are too many bins. Where sets of parameters take turns, each has
    a loss of its own.
    """

    def __init__(self) -> None:
        self.width = 1
        self._examples = np.zeros(_LOSS_BINS)
        # By set, "" where there is one optimizer: the sums of the weights, and of the weighted losses.
        self._sums: dict[str, Floats] = {}
        self._time_s = np.full(_LOSS_BINS, -math.inf)
        self._changed = np.full(_LOSS_BINS, -1, dtype=np.int64)
        self.steps = 0

    @property
    def count(self) -> int:
        """The bins that are in use."""
        return -(-self.steps // self.width)

    @property
    def examples(self) -> int:
        return round(float(self._examples.sum()))

    def add(self, steps: Steps, revision: int) -> None:
        """Adds steps."""
        if not len(steps):
            return
        self.steps = max(self.steps, int(steps.step.max()) + 1)
        while self.count > _LOSS_BINS:
            self._fold(revision)
        bins = steps.step // self.width
        counts = np.isfinite(steps.loss) & np.isfinite(steps.weight) & (steps.weight > 0)
        weight = np.where(counts, steps.weight, 0.0)
        values = np.stack((weight, weight * np.where(counts, steps.loss, 0.0)), axis=1)
        np.add.at(self._examples, bins, steps.examples)
        for name in sorted(set(steps.turn.tolist())):
            if name not in self._sums and len(self._sums) == _MOST_SETS:
                continue
            own = steps.turn == name
            np.add.at(self._sums.setdefault(name, np.zeros((_LOSS_BINS, 2))), bins[own], values[own])
        np.maximum.at(self._time_s, bins, steps.time_s)
        self._changed[bins] = revision

    def changed(self, since: int, batch: int | None) -> dict[str, Any] | None:
        """Returns the points from the first that has changed since a revision on; None if none has.

        "losses" are by set, "" where there is one optimizer; NaN where a set had no turn.

        Args:
            batch: examples of a step where not all steps are known yet; None where they are.
        """
        new = np.flatnonzero(self._changed > since)
        if not len(new):
            return None
        count, first = self.count, int(new[0])
        if batch is None:
            seen = np.cumsum(self._examples[:count])
        else:
            seen = batch * np.minimum(np.arange(1, count + 1) * self.width, self.steps)
        times = np.maximum.accumulate(self._time_s[:count])
        return {
            "width": self.width,
            "count": count,
            "first": first,
            "examples": seen[first:].astype(np.int64),
            "time_s": times[first:],
            "losses": {name: _means(sums[first:count]).astype(np.float32) for name, sums in self._sums.items()},
        }

    def ends(self) -> tuple[float | None, float | None]:
        """Returns the losses of the first and the last bin that has one; None where sets have losses of their own."""
        if len(self._sums) != 1:
            return None, None
        (sums,) = self._sums.values()
        means = _means(sums[: self.count])
        known = means[np.isfinite(means)]
        return (float(known[0]), float(known[-1])) if len(known) else (None, None)

    def examples_at(self, time_s: float) -> int:
        """Returns the examples of all steps that have ended by a time, from whole bins."""
        return round(float(self._examples[: self.count][self._time_s[: self.count] <= time_s].sum()))

    def examples_until(self, step: int) -> int:
        """Returns the examples of all steps before one, from whole bins."""
        return round(float(self._examples[: min(self.count, -(-step // self.width))].sum()))

    def _fold(self, revision: int) -> None:
        half = _LOSS_BINS // 2
        self._examples = _folded(self._examples)
        self._sums = {name: _folded(sums) for name, sums in self._sums.items()}
        self._time_s = np.concatenate((self._time_s.reshape(half, 2).max(axis=1), np.full(half, -math.inf)))
        self.width *= 2
        self._changed[:] = -1
        self._changed[:half] = revision


def _folded(sums: Floats) -> Floats:
    """Returns sums over bins that are twice as wide."""
    half = sums.reshape(len(sums) // 2, 2, *sums.shape[1:]).sum(axis=1)
    return np.concatenate((half, np.zeros_like(half)))


def _means(sums: Floats) -> Floats:
    means = np.full(len(sums), np.nan)
    np.divide(sums[:, 1], sums[:, 0], out=means, where=sums[:, 0] > 0)
    return means


class LaneBins(ABC):
    """Where the time of each worker went, in bins of time, and how many examples it did."""

    def __init__(self, bins: int, width_s: float) -> None:
        self.width_s = width_s
        self._bins = bins
        self._sums = np.zeros((bins, 0, _EXAMPLES + 1))
        self._changed = np.full(bins, -1, dtype=np.int64)
        self.rows: dict[int, int] = {}

    @abstractmethod
    def _make_room(self, begin_s: float, end_s: float, revision: int) -> tuple[float, float]:
        """Makes room for a time until `end_s`; returns the times for which there are bins."""

    @abstractmethod
    def _order(self) -> Ints:
        """Returns the numbers of the bins that are in use, by time."""

    def add(self, steps: Steps, revision: int) -> None:
        """Adds steps: each part over the time that it took, examples over the whole step."""
        if not len(steps):
            return
        known, place = self._rows_of(steps.rank, revision)
        if not known.all():
            steps = steps.chosen(known)
        began = steps.began_s
        least, most = self._make_room(float(began.min(initial=0.0)), float(steps.time_s.max(initial=0.0)), revision)
        ends = began[:, None] + np.cumsum(steps.spent_s[:, [3, 0, 1, 2]], axis=1)
        starts = np.concatenate((began[:, None], ends[:, :-1]), axis=1)
        for column, part in enumerate((3, 0, 1, 2)):
            self._spread(starts[:, column], ends[:, column], place, part, (least, most), revision)
        covered = np.where(np.isfinite(steps.before_s), np.minimum(steps.before_s, steps.time_s), began)
        self._spread(covered, steps.time_s, place, _COVERED, (least, most), revision)
        # A step that took no time has happened at its end.
        start = np.minimum(covered, steps.time_s - 1e-6)
        rate = steps.examples / (steps.time_s - start)
        self._spread(start, steps.time_s, place, _EXAMPLES, (least, most), revision, rate)

    def changed(self, since: int) -> dict[str, Any] | None:
        """Returns the bins that have changed since a revision: their numbers, and by worker percent of the time.

        These are compute, exchange, update, waiting for data, and between steps; all 0 where nothing is known.
        """
        order = self._order()
        slots = order % self._bins
        new = self._changed[slots] > since
        if not new.any():
            return None
        sums = self._sums[slots[new]]
        covered = np.maximum(sums[..., _COVERED], sums[..., :_PARTS].sum(axis=-1))[..., None]
        parts = np.zeros((*sums.shape[:2], _PARTS + 1))
        np.divide(100.0 * sums[..., :_PARTS], covered, out=parts[..., :_PARTS], where=covered > 0)
        parts[..., _PARTS] = np.where(covered[..., 0] > 0, np.maximum(0, 100.0 - parts.sum(axis=-1)), 0)
        return {
            "width_s": self.width_s,
            "ranks": list(self.rows),
            "bins": order[new],
            "parts": np.rint(parts).astype(np.uint8).reshape(len(sums), -1),
        }

    def rates(self, complete: bool, until_s: float) -> tuple[Ints, Floats]:
        """Returns bins by time, and the examples a second of all workers in each; the last bin ends at `until_s`.

        Where not all steps are known, a worker's rate is that in what is known of the bin and of those beside it.
        """
        order = self._order()
        sums = self._sums[order % self._bins]
        if complete:
            length = np.clip(until_s - order * self.width_s, 0.0, self.width_s)
            long_enough = length > 0.3 * self.width_s
            return order[long_enough], (sums[..., _EXAMPLES].sum(axis=1) / np.maximum(length, 1e-9))[long_enough]
        around = np.pad(sums[..., _COVERED:], ((1, 1), (0, 0), (0, 0)))
        around = around[:-2] + around[1:-1] + around[2:]
        rates = np.zeros(around.shape[:2])
        np.divide(around[..., 1], around[..., 0], out=rates, where=around[..., 0] > 0)
        return order, rates.sum(axis=1)

    def shares(self) -> dict[int, list[float]]:
        """Returns each worker's percent of the time in all bins, in the order of `changed`."""
        sums = self._sums[self._order() % self._bins].sum(axis=0)
        found = {}
        for rank, row in self.rows.items():
            covered = max(float(sums[row, _COVERED]), float(sums[row, :_PARTS].sum()))
            if covered > 0:
                parts = [100.0 * float(each) / covered for each in sums[row, :_PARTS]]
                found[rank] = [*parts, max(0.0, 100.0 - sum(parts))]
        return found

    def _rows_of(self, ranks: Ints, revision: int) -> tuple[npt.NDArray[np.bool_], Ints]:
        """Returns which steps are of a worker with a row, and these rows."""
        for rank in np.unique(ranks).tolist():
            if rank not in self.rows and len(self.rows) < _MOST_RANKS:
                self.rows[rank] = len(self.rows)
        missing = len(self.rows) - self._sums.shape[1]
        if missing:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing), (0, 0)))
            # The form of every bin has changed.
            self._changed[self._changed >= 0] = revision
        place = np.array([self.rows.get(rank, -1) for rank in ranks.tolist()], dtype=np.int64)
        return place >= 0, place[place >= 0]

    def _spread(
        self,
        start: Floats,
        end: Floats,
        place: Ints,
        column: int,
        limits: tuple[float, float],
        revision: int,
        rate: Floats | None = None,
    ) -> None:
        """Adds to each bin its part of the times from `start` to `end`, times `rate`."""
        start, end = np.clip(start, *limits), np.clip(end, *limits)
        longer = end > start
        start, end, place = start[longer], end[longer], place[longer]
        rate = np.ones(len(start)) if rate is None else rate[longer]
        for bins, which, seconds in _overlaps(start, end, self.width_s):
            slots = bins % self._bins
            np.add.at(self._sums[:, :, column], (slots, place[which]), seconds * rate[which])
            self._changed[slots] = revision


def _overlaps(start: Floats, end: Floats, width: float) -> Iterator[tuple[Ints, npt.NDArray[np.bool_], Floats]]:
    """Yields bins, which of the times reach into them, and for how long; a time's next bin comes with the next."""
    if not len(start):
        return
    first, last = (start // width).astype(np.int64), (end // width).astype(np.int64)
    for offset in range(int((last - first).max()) + 1):
        bins = first + offset
        which = bins <= last
        bins = bins[which]
        yield bins, which, np.minimum(end[which], (bins + 1) * width) - np.maximum(start[which], bins * width)


class RunLanes(LaneBins):
    """Lanes of the whole run: bins become twice as wide whenever there are too many."""

    def __init__(self) -> None:
        super().__init__(_LANE_BINS, _FIRST_WIDTH_S)
        self._used = 0

    def _make_room(self, begin_s: float, end_s: float, revision: int) -> tuple[float, float]:
        half = self._bins // 2
        while end_s >= self._bins * self.width_s:
            shape = self._sums.shape
            folded = self._sums.reshape(half, 2, *shape[1:]).sum(axis=1)
            self._sums = np.concatenate((folded, np.zeros((half, *shape[1:]))))
            self.width_s *= 2
            self._used = -(-self._used // 2)
            self._changed[:] = -1
            self._changed[: self._used] = revision
        self._used = max(self._used, int(end_s // self.width_s) + 1)
        return 0.0, self._bins * self.width_s

    def _order(self) -> Ints:
        return np.arange(self._used, dtype=np.int64)


class RecentLanes(LaneBins):
    """Lanes of the last minute of a run."""

    def __init__(self) -> None:
        super().__init__(RECENT_BINS, RECENT_WIDTH_S)
        self._next = 0

    def _make_room(self, begin_s: float, end_s: float, revision: int) -> tuple[float, float]:
        after = int(end_s // self.width_s) + 1
        if after > self._next:
            empty = np.arange(max(self._next, after - self._bins), after) % self._bins
            self._sums[empty] = 0
            self._changed[empty] = revision
            self._next = after
        # An end on the border of the last bin stays in it.
        return max(0, self._next - self._bins) * self.width_s, self._next * self.width_s - 1e-9

    def _order(self) -> Ints:
        return np.arange(max(0, self._next - self._bins), self._next, dtype=np.int64)
