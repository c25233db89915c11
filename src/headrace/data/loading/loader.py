"""The loader: one worker's share of every global batch, from any round on, and where the time of reading goes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.data.loading.reader import CpuBudget, ExampleReader, Part, ReadResult
from headrace.data.pipeline.clients import ClientOrder
from headrace.data.pipeline.order import Bucketed, ExampleOrder, Rounds, derived
from headrace.data.pipeline.pipeline import InputPipeline, require_pipeline, visited
from headrace.data.pipeline.source import ArraySource
from headrace.errors import DataError, UsageError
from headrace.policies.roles import bounds
from headrace.spec.events import InputStageStats, InputStats
from headrace.spec.job import Share

if TYPE_CHECKING:
    from headrace.data.loading.batch_reader import BatchReader

_ANY = CpuBudget()


class Loader:
    """Reads one worker's share of every global batch.

    Round `r` of an epoch takes the examples at `order[r * B : (r + 1) * B]` of the epoch's global order, and
    each worker a contiguous part of them. The order is the same for any number of workers:

        order    | 4 0 7 2 | 6 1 9 3 | 8 5 |     B = 4, the last batch is short
        worker 0 | 4 0     | 6 1     | 8   |
        worker 1 |     7 2 |     9 3 |   5 |

    Args:
        pipeline: what is read.
        seed: of orders and transforms, where the pipeline has none of its own.
        global_batch_size: examples that all workers take in one round.
        shares: relative weights by which a batch is split, one a worker; if hosts list examples of their own,
            those of this host's workers.
        data_rank: the index of this worker's share.
        ordered: visits the examples in the source's order, as evaluations do.
        cpu_budget: the cores that reading may use.
        tell: called about once a second with `counters`.

    Attributes:
        full_batch: examples of a round, except the last of an epoch.
        counters: how much was read, and how long each stage took.
        stays: whether processes read that are to stay for the whole run, `persistent_workers=True` of a `DataLoader`.
        drops: whether a share may have fewer examples than its part of the batch, because some are left out.

    Raises:
        UsageError: there is no such worker, or the batch size is below 1.

    Examples:
        >>> numbers = hr.data.from_arrays(torch.arange(10))
        >>> loader = hr.data.Loader(numbers, seed=0, global_batch_size=4, shares=[1, 1], data_rank=1)
        >>> [share.batch[0].tolist() for share in loader.rounds(0, 3)]
        [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        pipeline: InputPipeline,
        seed: int,
        global_batch_size: int,
        shares: Sequence[int],
        data_rank: int,
        ordered: bool = False,
        cpu_budget: CpuBudget = _ANY,
        tell: Callable[[InputCounters], None] | None = None,
    ) -> None:
        if global_batch_size < 1:
            raise UsageError(f"global_batch_size must be at least 1, got {global_batch_size}")
        if not 0 <= data_rank < len(shares):
            raise UsageError(f"data_rank must be 0 to {len(shares) - 1}, got {data_rank}")
        self._pipeline = pipeline
        self._seed = seed if pipeline.seed is None else pipeline.seed
        self._rounds = Rounds(
            len(pipeline), pipeline.hosts, global_batch_size, pipeline.batching.drop_last and not ordered
        )
        self._host = pipeline.hosts.mine if pipeline.hosts else 0
        self._data_rank = data_rank
        self.assign(shares)
        self._ordered = ordered
        self._shuffled = pipeline.shuffled and not ordered
        self.rounds_per_epoch = len(self._rounds)
        self.full_batch = min(self._rounds.total, global_batch_size)
        self._epoch = -1
        self._epoch_order: ExampleOrder | Bucketed | ClientOrder | None = None
        self._reader = ExampleReader(pipeline, seed)
        self.counters = InputCounters(self._reader.stages, self._reader.draws, pipeline.reading.most_skipped, tell)
        self._ahead = _reader_ahead(pipeline, self._reader, cpu_budget)
        self.drops = self._reader.drops
        self.stays = bool(pipeline.processes and pipeline.processes.options.get("persistent_workers"))

    def assign(self, shares: Sequence[int], data_rank: int | None = None) -> None:
        """Splits batches by other weights, in what is asked for from now on; takes a `data_rank` that changes, too."""
        if data_rank is not None:
            self._data_rank = data_rank
        rank, self._weights = self._data_rank, shares
        self._own = functools.cache(lambda count: bounds(count, shares)[rank])

    def rounds(self, start_round: int = 0, stop_round: int | None = None) -> Generator[Share, None, None]:
        """Yields this worker's share of every round.

        Args:
            start_round: the first, counted over the whole run; starting there costs one epoch's order.
            stop_round: the round before which it ends; None for no end.

        Raises:
            DataError: an example cannot be read.
        """
        if start_round < 0:
            raise UsageError(f"start_round must not be negative, got {start_round}")
        self.counters.begin()
        count = None if stop_round is None else max(0, stop_round - start_round)
        return self._shares(islice(self._parts(start_round), count), start_round)

    def sweep(self, alone: bool = False) -> Generator[Share, None, None]:
        """Yields this worker's share of every round of one epoch, from its beginning.

        Raises:
            DataError: an example cannot be read.
        """
        self.counters.begin()
        return self._shares(islice(self._parts(0), self.rounds_per_epoch), 0, alone)

    def spread(self) -> Generator[Share, None, None]:
        """Yields batches of examples from all over the data, each once: the first of a file may be all of one kind.

        Raises:
            DataError: an example cannot be read.
        """
        self.counters.begin()
        order = ExampleOrder(len(self._pipeline), self._seed, 0)
        for index in range(self.rounds_per_epoch):
            begin, end, of = self._rounds.span(index)
            yield self._read((0, torch.from_numpy(order.slice(begin, end)), of))

    def first(self, start: int, stop: int) -> Share:
        """Reads some of the first examples of `spread` as one batch.

        Raises:
            DataError: an example cannot be read.
        """
        order = ExampleOrder(len(self._pipeline), self._seed, 0)
        return self._read((0, torch.from_numpy(order.slice(start, stop)), stop - start))

    def portion(self, round_: int, part: int, parts: int) -> Share:
        """Reads one part of one round's batch, independent of what was read before.

        Raises:
            DataError: an example cannot be read.
        """
        if self._pipeline.clients and self._shuffled:
            raise UsageError(
                "the data is by_client, and parts of rounds are leased to workers as they come, so that none has a "
                "client of its own; use parameter_averaging via all_reduce, or leave out by_client"
            )
        epoch, index = divmod(round_, self.rounds_per_epoch)
        begin, end, of = self._rounds.span(index)
        start, stop = bounds(end - begin, (1,) * parts)[part]
        if self._epoch != epoch or self._epoch_order is None:
            self._epoch, self._epoch_order = epoch, self._order(epoch)
        return self._read((epoch, torch.from_numpy(self._epoch_order.slice(begin + start, begin + stop)), of))

    def nothing(self, round_: int) -> Share:
        """Returns an empty share of a round."""
        return self._read((round_ // self.rounds_per_epoch, torch.zeros(0, dtype=torch.int64), 0))

    def _parts(self, start_round: int) -> Iterator[Part]:
        epoch, first = divmod(start_round, self.rounds_per_epoch)
        while True:
            order = self._order(epoch)
            for index in range(first, self.rounds_per_epoch):
                begin, end, of = self._rounds.span(index)
                start, stop = self._own(end - begin)
                yield epoch, torch.from_numpy(order.slice(begin + start, begin + stop)), of
            epoch, first = epoch + 1, 0

    def _order(self, epoch: int) -> ExampleOrder | Bucketed | ClientOrder:
        length = len(self._pipeline)
        if self._pipeline.clients and self._shuffled:
            visits = np.tile(np.array(visited(self._pipeline)), self._pipeline.times)
            total, batch = self._rounds.total, self._rounds.batch
            return self._pipeline.clients.order(visits, self._weights, total, batch, self._seed, epoch)
        order = ExampleOrder(length, self._seed, epoch, self._shuffled)
        batching = self._pipeline.batching
        if batching.lengths is None or not self._shuffled:
            return order
        lengths = np.tile(batching.lengths[list(visited(self._pipeline))], self._pipeline.times)
        # Of all, those that are left out are the last before they are sorted.
        return Bucketed(order, self._rounds.own, lengths, self._rounds.batch, batching.window, self._seed, epoch)

    def _shares(self, parts: Iterator[Part], start_round: int, alone: bool = False) -> Generator[Share, None, None]:
        # Workers of other ranks and hosts, and evaluations, must not draw the same, nor a resumed run as its beginning.
        seed = derived(self._seed, self._host, self._data_rank, start_round, self._ordered)
        running: Generator[tuple[Part, ReadResult], None, None]
        if self._ahead is not None and not alone:
            running = self._ahead.run(parts, seed)
        elif self._pipeline.processes is not None and not alone:
            # Imported for those alone that have such a `DataLoader`.
            from headrace.data.loading.torch_processes import read_by_torch

            running = read_by_torch(self._reader, self._pipeline.processes, parts, seed)
            self.counters.parallel, self.counters.readers = "processes", self._pipeline.processes.count
        else:
            running = ((part, self._reader.read_part(part)) for part in parts)
        with closing(running):
            asked, ready = perf_counter(), 0
            for part, read in running:
                yield self._share(part, read, asked, ready)
                del read
                if self._ahead is not None:
                    self.counters.parallel, self.counters.readers = self._ahead.parallel, self._ahead.readers
                    ready = self._ahead.prefetcher.ready() if self._ahead.prefetcher else 0
                asked = perf_counter()

    def _read(self, part: Part) -> Share:
        asked = perf_counter()
        return self._share(part, self._reader.read_part(part), asked)

    def _share(self, part: Part, read: ReadResult, asked: float, ready: int = 0) -> Share:
        epoch, places, of = part
        self.counters.add(epoch, read, asked, ready)
        return Share(read.batch, read.examples, of, epoch, asked=len(places))


def _reader_ahead(pipeline: InputPipeline, reader: ExampleReader, cpu_budget: CpuBudget) -> BatchReader | None:
    """Returns what reads ahead of training; None where each batch is read when it is asked for."""
    source, reading = pipeline.source, pipeline.reading
    if pipeline.processes is not None or reading.ahead == 0 or reading.parallel == "inline":
        return None
    # A batch of arrays in memory is one lookup.
    inline = source.one_reader or (isinstance(source, ArraySource) and not pipeline.steps)
    if reading.parallel == "auto" and inline:
        return None
    # Imported for those alone that have something to read ahead.
    from headrace.data.loading.batch_reader import BatchReader

    return BatchReader(pipeline, reader, cpu_budget)


_TELL_EVERY_S = 1.0
_SHOWN = 3


class InputCounters:
    """What a loader has read since it was made, and how long each stage took; updated by the thread that takes batches.

    More than `most_skipped` unreadable examples in an epoch are an error; `shown` has the first of them with their
    reasons, `notices` has lines for the user.
    """

    def __init__(
        self,
        names: Sequence[str],
        draws: Sequence[bool],
        most_skipped: int,
        tell: Callable[[InputCounters], None] | None = None,
    ) -> None:
        self.parallel = "inline"
        self.readers = 1
        self.skipped = 0
        self.shown: list[str] = []
        self.examples = 0
        self.notices: list[str] = []
        self._names, self._draws = tuple(names), tuple(draws)
        self._most_skipped = most_skipped
        self._tell = tell
        self._busy = [0.0] * len(names)
        self._waiting = [0.0] * len(names)
        self._skips: Counter[int] = Counter()
        self._first: float | None = None
        self._last = self._told = self._waited = 0.0
        self._ready = self._batches = self._bytes = 0

    def begin(self) -> None:
        """Resets the count of skipped examples of each epoch, since epochs may be read again."""
        self._skips.clear()

    def add(self, epoch: int, read: ReadResult, asked: float, ready: int = 0) -> None:
        """Counts a batch that has just come; `asked` is when it was asked for, by `perf_counter`.

        `ready` is the number of batches that waited then. A DataError if too many examples of the epoch were skipped.
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
        for sums, new in ((self._busy, read.seconds), (self._waiting, read.waiting)):
            for stage, seconds in enumerate(new):
                sums[stage] += seconds
        if read.skipped:
            self.shown += read.skipped[: _SHOWN - len(self.shown)]
            self.skipped += len(read.skipped)
            self._skips[epoch] += len(read.skipped)
            if self._skips[epoch] > self._most_skipped:
                count = f"{self._skips[epoch]} example{'s' * (self._skips[epoch] != 1)}"
                raise DataError(
                    f"{count} of epoch {epoch} could not be had, and on_error('skip', most={self._most_skipped}) lets "
                    f"{self._most_skipped} be left out; repair them, or allow more. The first: {'; '.join(self.shown)}"
                )
        if self._tell is not None and self._last - self._told >= _TELL_EVERY_S:
            self._told = self._last
            self._tell(self)

    def event(self, rank: int, time_s: float) -> InputStats:
        """Returns the counts as an event."""
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
            stages=tuple(map(InputStageStats, self._names, self._busy, self._waiting, self._draws)),
        )


def batches(pipeline: InputPipeline, *, epoch: int = 0, seed: int = 0, start: int = 0) -> Iterator[Any]:
    """Yields the batches of one epoch, as a job with one worker would read them.

        for images, labels in hr.data.batches(pipeline.shuffle().batch(32), epoch=3):

    Args:
        pipeline: with a batch size, `.batch(32)`.
        epoch: counted from 0; each has its own order and augmentation.
        seed: of the order and the augmentation, unless the pipeline has its own.
        start: batches to leave out, to go on where an earlier iteration ended.

    Raises:
        UsageError: the pipeline has no batch size.
        DataError: an example cannot be read.

    Examples:
        >>> pipeline = hr.data.from_arrays(torch.arange(5)).batch(2)
        >>> [len(batch[0]) for batch in hr.data.batches(pipeline)]
        [2, 2, 1]
    """
    require_pipeline("batches", pipeline)
    size = pipeline.batching.size
    if size is None:
        raise UsageError("the pipeline has no batch size; chain .batch(32) to it")
    loader = Loader(pipeline, seed, size, (1,), 0)
    first = epoch * loader.rounds_per_epoch
    with closing(loader.rounds(first + start, first + loader.rounds_per_epoch)) as shares:
        for share in shares:
            yield share.batch
