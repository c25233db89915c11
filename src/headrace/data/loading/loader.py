"""What runs for one worker: its share of every global batch, endless, from any round on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from time import perf_counter

import numpy as np
import torch

from headrace.data.loading.batch_reader import BatchReader, CpuBudget, Part
from headrace.data.loading.input_counters import InputCounters
from headrace.data.loading.reader import ExampleReader, ReadResult
from headrace.data.loading.torch_reading import read_by_torch
from headrace.data.pipeline.buckets import Bucketed
from headrace.data.pipeline.order import ExampleOrder
from headrace.data.pipeline.pipeline import InputPipeline, visited
from headrace.data.pipeline.rounds import Rounds
from headrace.errors import UsageError
from headrace.policies.batch_split import bounds
from headrace.spec.job import Share

_ANY = CpuBudget()


class Loader:
    """Reads one worker's share of every global batch.

    Round `r` of an epoch takes the examples at `order[r * B : (r + 1) * B]` of the epoch's global order, and
    each worker a contiguous part of them. The order is the same for any number of workers:

        order    | 4 0 7 2 | 6 1 9 3 | 8 5 |     B = 4, the last batch is short
        worker 0 | 4 0     | 6 1     | 8   |
        worker 1 |     7 2 |     9 3 |   5 |

    Args:
        pipeline: what to read.
        seed: the job's; a seed of the pipeline's own goes before it.
        global_batch_size: examples that all workers together take in one round.
        shares: relative weights by which a batch is split, one a worker; where hosts list examples of their own, of
            this host's workers.
        data_rank: which of these workers this is.
        ordered: keeps the order of the data, for evaluation.
        means: what it may read with.
        tell: called about once a second with `stages`.

    Attributes:
        rounds_per_epoch: how many there are.
        full_batch: examples of a round, but for an epoch's last one.
        stages: where the time went.
        drops: whether a share may have fewer examples than its part of the batch, because some are left out.

    Raises:
        UsageError: no such worker, or no batch size.
    """

    def __init__(
        self,
        pipeline: InputPipeline,
        seed: int,
        global_batch_size: int,
        shares: Sequence[int],
        data_rank: int,
        ordered: bool = False,
        means: CpuBudget = _ANY,
        tell: Callable[[InputCounters], None] | None = None,
    ) -> None:
        if global_batch_size < 1:
            raise UsageError(f"global_batch_size must be at least 1, got {global_batch_size}")
        if not 0 <= data_rank < len(shares):
            raise UsageError(f"data_rank must be 0 to {len(shares) - 1}, got {data_rank}")
        self._pipeline = pipeline
        self._seed = seed if pipeline.seed is None else pipeline.seed
        self._rounds = Rounds(pipeline, global_batch_size)
        self._own = functools.cache(lambda count: bounds(count, shares)[data_rank])
        self._data_rank = data_rank
        self._shuffled = pipeline.shuffled and not ordered
        self.rounds_per_epoch = len(self._rounds)
        self.full_batch = min(self._rounds.total, global_batch_size)
        self._epoch = -1
        self._epoch_order: ExampleOrder | Bucketed | None = None
        self._reader = ExampleReader(pipeline, seed)
        self.stages = InputCounters(self._reader.stages, pipeline.reading.most_skipped, tell)
        self._running = BatchReader(pipeline, self._reader, means)
        self.drops = self._reader.drops

    def rounds(self, start_round: int = 0, stop_round: int | None = None) -> Generator[Share, None, None]:
        """Yields this worker's share of every round.

        Args:
            start_round: the first, counted over the whole run; to begin there costs one epoch's order.
            stop_round: the one before which it ends, so that nothing is read in vain; None goes on without end.

        Raises:
            DataError: an example cannot be read.
        """
        if start_round < 0:
            raise UsageError(f"start_round must not be negative, got {start_round}")
        self.stages.begin()
        parts = self._parts(start_round)
        if stop_round is not None:
            parts = islice(parts, max(0, stop_round - start_round))
        return self._shares(parts, start_round)

    def sweep(self, alone: bool = False) -> Generator[Share, None, None]:
        """Yields this worker's share of every round of one epoch, from its beginning.

        Args:
            alone: without threads or processes, for the first few.

        Raises:
            DataError: an example cannot be read.
        """
        self.stages.begin()
        return self._shares(islice(self._parts(0), self.rounds_per_epoch), 0, alone)

    def portion(self, round_: int, part: int, parts: int) -> Share:
        """Reads one part of one round's batch, whatever was read before.

        Args:
            round_: counted over the whole run.
            part: which of the parts.
            parts: into how many equal ones the batch is cut.

        Raises:
            DataError: an example cannot be read.
        """
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

    def _order(self, epoch: int) -> ExampleOrder | Bucketed:
        length = len(self._pipeline)
        order = ExampleOrder(length, self._seed, epoch, self._shuffled)
        batching = self._pipeline.batching
        if batching.lengths is None or not self._shuffled:
            return order
        lengths = np.tile(batching.lengths[list(visited(self._pipeline))], self._pipeline.times)
        return Bucketed(order, length, lengths, self._rounds.batch, batching.window, self._seed, epoch)

    def _shares(self, parts: Iterator[Part], start_round: int, alone: bool = False) -> Generator[Share, None, None]:
        processes = self._pipeline.processes
        if processes is not None and not alone:
            # A run that goes on does not draw there what it drew at its begin.
            seed = self._seed + self._data_rank + (start_round << 32)
            running = read_by_torch(self._reader, processes, parts, seed)
            self.stages.parallel, self.stages.readers = "processes", processes.count
        else:
            running = self._running.alone(parts) if alone else self._running.run(parts)
        try:
            asked, ready = perf_counter(), 0
            for part, read in running:
                yield self._share(part, read, asked, ready)
                del read
                ready = self._look()
                asked = perf_counter()
        finally:
            running.close()

    def _look(self) -> int:
        """Takes note of how it is read now; returns how many batches are there."""
        if self._pipeline.processes is not None:
            return 0
        self.stages.parallel, self.stages.readers = self._running.parallel, self._running.readers
        return self._running.ahead.ready() if self._running.ahead else 0

    def _read(self, part: Part) -> Share:
        asked = perf_counter()
        return self._share(part, self._running.read(part), asked)

    def _share(self, part: Part, read: ReadResult, asked: float, ready: int = 0) -> Share:
        epoch, _, of = part
        self.stages.add(epoch, read, asked, ready)
        return Share(read.batch, read.examples, of, epoch)
