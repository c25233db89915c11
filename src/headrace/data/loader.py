"""What runs for one worker: its share of every global batch, endless, from any round on."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, tee
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headrace.data.ahead import Ahead, inline
from headrace.data.buckets import Bucketed
from headrace.data.budget import Budget
from headrace.data.order import Order
from headrace.data.pipeline import Pipeline, visited
from headrace.data.reader import Read, Reader
from headrace.data.stages import Stages
from headrace.errors import DataError, UsageError
from headrace.policies.split import bounds
from headrace.spec.share import Share
from headrace.trees import nbytes

__all__ = ["Loader"]

_Part = tuple[int, Tensor, int]
"""What one worker reads for a round: the epoch, the indices, the length of the global batch."""


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
        shares: relative weights by which a batch is split, one a worker.
        data_rank: which worker this is.
        ordered: keeps the order of the data, for evaluation.
        tell: called about once a second with `stages`.

    Attributes:
        rounds_per_epoch: how many global batches an epoch has.
        stages: where the time went.

    Attributes:
        rounds_per_epoch: how many there are.
        drops: whether a share may have fewer examples than its part of the batch, because some are left out.

    Raises:
        UsageError: no such worker, or no batch size.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        seed: int,
        global_batch_size: int,
        shares: Sequence[int],
        data_rank: int,
        ordered: bool = False,
        tell: Callable[[Stages], None] | None = None,
    ) -> None:
        if global_batch_size < 1:
            raise UsageError(f"global_batch_size must be at least 1, got {global_batch_size}")
        if not 0 <= data_rank < len(shares):
            raise UsageError(f"data_rank must be 0 to {len(shares) - 1}, got {data_rank}")
        self._pipeline = pipeline
        self._seed = seed if pipeline.seed is None else pipeline.seed
        self._length = len(pipeline)
        self._global_batch_size = global_batch_size
        self._data_rank = data_rank
        self._shuffled = pipeline.shuffled and not ordered
        self.rounds_per_epoch = -(-self._length // global_batch_size)
        last = self._length - (self.rounds_per_epoch - 1) * global_batch_size
        self._bounds = bounds(global_batch_size, shares)[data_rank]
        self._last_bounds = bounds(last, shares)[data_rank]
        self._epoch = -1
        self._epoch_order: Order | Bucketed | None = None
        self._reader = Reader(pipeline, seed)
        self.stages = Stages(self._reader.stages, pipeline.reading.most_skipped, tell)
        self._budget = Budget(pipeline.reading.memory_limit)
        self._largest = 0
        self.drops = self._reader.drops

    def rounds(self, start_round: int = 0) -> Generator[Share, None, None]:
        """Yields this worker's share of every round, without end.

        Args:
            start_round: the first, counted over the whole run; to begin there costs one epoch's order.

        Raises:
            DataError: an example cannot be read.
        """
        if start_round < 0:
            raise UsageError(f"start_round must not be negative, got {start_round}")
        self.stages.begin()
        return self._shares(self._parts(start_round), start_round)

    def sweep(self) -> Iterator[Share]:
        """Yields this worker's share of every round of one epoch, from its beginning.

        Raises:
            DataError: an example cannot be read.
        """
        self.stages.begin()
        return self._shares(islice(self._parts(0), self.rounds_per_epoch))

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
        begin = index * self._global_batch_size
        size = min(self._global_batch_size, self._length - begin)
        start, stop = bounds(size, (1,) * parts)[part]
        if self._epoch != epoch or self._epoch_order is None:
            self._epoch, self._epoch_order = epoch, self._order(epoch)
        return self._read((epoch, torch.from_numpy(self._epoch_order.slice(begin + start, begin + stop)), size))

    def nothing(self, round_: int) -> Share:
        """Returns an empty share of a round."""
        return self._read((round_ // self.rounds_per_epoch, torch.zeros(0, dtype=torch.int64), 0))

    def _parts(self, start_round: int) -> Iterator[_Part]:
        epoch, first = divmod(start_round, self.rounds_per_epoch)
        size = self._global_batch_size
        start, stop = self._bounds
        while True:
            order = self._order(epoch)
            for begin in range(first * size, self._length - size + 1, size):
                yield epoch, torch.from_numpy(order.slice(begin + start, begin + stop)), size
            short = self._length % size
            if short:
                begin = self._length - short
                start_of, stop_of = self._last_bounds
                yield epoch, torch.from_numpy(order.slice(begin + start_of, begin + stop_of)), short
            epoch, first = epoch + 1, 0

    def _order(self, epoch: int) -> Order | Bucketed:
        order = Order(self._length, self._seed, epoch, self._shuffled)
        batching = self._pipeline.batching
        if batching.lengths is None or not self._shuffled:
            return order
        lengths = np.tile(batching.lengths[list(visited(self._pipeline))], self._pipeline.times)
        size = self._global_batch_size
        return Bucketed(order, self._length, lengths, size, batching.window, self._seed, epoch)

    def _shares(self, parts: Iterator[_Part], start_round: int = 0) -> Generator[Share, None, None]:
        if self._pipeline.processes is not None:
            yield from self._read_ahead(parts, start_round)
            return
        reading = self._pipeline.reading
        ahead: Ahead[_Part] | None = None
        if reading.parallel == "threads":
            ahead = Ahead(self._fetch, self._estimate, nbytes, reading.count or 1, reading.ahead, self._budget)
            running = ahead.run(parts)
            self.stages.parallel, self.stages.readers = "threads", reading.count or 1
        else:
            running = inline(self._fetch, parts)
        try:
            asked, depth = perf_counter(), 0
            for part, read in running:
                ready = ahead.depth - depth if ahead else 0
                depth += ready
                yield self._share(part, read, asked, ready)
                asked = perf_counter()
        finally:
            running.close()

    def _read(self, part: _Part) -> Share:
        asked = perf_counter()
        return self._share(part, self._fetch(part), asked)

    def _fetch(self, part: _Part) -> Read:
        read = self._reader.read(part[0], part[1])
        self._largest = max(self._largest, read.nbytes)
        return read

    def _share(self, part: _Part, read: Read, asked: float, ready: int = 0) -> Share:
        epoch, _, of = part
        self.stages.add(epoch, read, asked, ready)
        return Share(read.batch, read.examples, of, epoch)

    def _estimate(self, part: _Part) -> int:
        """Returns about how many bytes a batch takes: as many as the largest so far."""
        return self._largest

    def _read_ahead(self, parts: Iterator[_Part], start_round: int) -> Iterator[Share]:
        """Yields the shares that other processes have read."""
        processes = self._pipeline.processes
        assert processes is not None
        reader = self._reader
        mine, theirs = tee(parts)
        loader = DataLoader(
            _Reading(reader),
            batch_size=None,
            sampler=_wanted(theirs),
            collate_fn=_as_it_is,
            num_workers=processes.count,
            prefetch_factor=processes.prefetch_factor,
            multiprocessing_context=processes.start_method,
            worker_init_fn=processes.worker_init_fn,
            timeout=processes.timeout_s,
            # The base of its processes' seeds comes from here, not from the generator that dropout draws on.
            # Nor does a run that goes on draw there what it drew at its begin.
            generator=torch.Generator().manual_seed((self._seed + self._data_rank + (start_round << 32)) % 2**63),
        )
        self.stages.parallel, self.stages.readers = "processes", processes.count
        batches = iter(loader)
        try:
            for epoch, indices, of in mine:
                asked = perf_counter()
                read = next(batches) if len(indices) else reader.read(epoch, indices)
                if isinstance(read, _Broken):
                    raise read.error()
                yield self._share((epoch, indices, of), read, asked)
        finally:
            # Its processes end with the last reference; a traceback that holds this frame must not be one.
            del batches


@dataclass(frozen=True)
class _Broken:
    """What a reading process sends in place of a batch that it could not read."""

    message: str
    traceback: str

    def error(self) -> DataError:
        """Returns the error, with the traceback of the other process as a note."""
        error = DataError(self.message)
        error.add_note(self.traceback)
        return error


class _Reading(Dataset[Any]):
    """A data set of whole batches, for the processes of a `DataLoader`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, part: Any) -> Any:
        epoch, indices = part
        try:
            return self._reader.read(epoch, torch.from_numpy(indices))
        except DataError as error:
            return _Broken(str(error), traceback.format_exc())


def _wanted(parts: Iterator[_Part]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for epoch, indices, _ in parts:
        if len(indices):
            # As an array, since tensors would cross to the other process through a file of their own each.
            yield epoch, indices.numpy()


def _as_it_is(batch: Any) -> Any:
    return batch
