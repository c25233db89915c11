"""A process's share of every batch of a user's loader, in the order that the script alone would take.

the loader's batch sampler   | 4 0 7 2 | 6 1 9 3 | 8 5 |    drawn alike on every rank
rank 0 reads                 | 4 0     | 6 1     | 8   |    by a loader with the user's data set, collate function
rank 1 reads                 |     7 2 |     9 3 |   5 |    and reading processes
"""

from __future__ import annotations

import copy
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from headrace.api.plain_script.given.deliveries import Delivery
from headrace.api.plain_script.given.watched import SaidBatch, WatchedCollate
from headrace.api.plain_script.meeting import ITERATION, Meeting
from headrace.data.pipeline.collator import count_in
from headrace.data.pipeline.source import emptied
from headrace.errors import UsageError
from headrace.policies.roles import bounds
from headrace.trees import map_tensors

_DRAW_FIRST = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw a whole epoch's order when they are first asked."""

_OPTIONS = (
    *("num_workers", "pin_memory", "timeout"),
    *("worker_init_fn", "multiprocessing_context", "persistent_workers"),
)
_Part = tuple[int, int, int]
"""Of a batch: this rank's examples, those of all ranks, and a digest of which they are."""
_MARKED = 64
"""Numbers of each tensor of an example that count for its digest."""


class ShareLoader:
    """Iterates over this process's share of every batch of a `DataLoader`; has the loader's other attributes, too.

    Attributes:
        loader: the user's own. Its samplers may be told an epoch, or anything else, between two iterations.
    """

    def __init__(self, loader: DataLoader[Any], meeting: Meeting | None = None) -> None:
        _require_batches(loader, meeting is not None)
        self.loader = loader
        self._meeting = meeting
        self._parts = _Parts(self)
        self._seeds = torch.Generator()
        self._reader: DataLoader[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        # Before there is a loader, as when it is unpickled, nothing has attributes.
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loader" or name.startswith("_"):
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader) if self._is_stream else len(self._batch_sampler())

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.loader.dataset, IterableDataset)

    def __iter__(self) -> Iterator[Any]:
        if self._meeting is None:
            return iter(self.loader) if self._replaced() is None else iter(self._new_reader(self._batch_sampler()))
        meeting = self._meeting
        if self._is_stream:
            return self._stream(meeting)
        batches = self._batch_sampler()
        with meeting.begin_common(ITERATION):
            chosen, seed = iter(batches), self._base_seed()
        self._seeds.manual_seed(meeting.reader_seed(seed))
        parts = deque[_Part]()
        self._parts.next = self._divide(chosen, parts, meeting)
        if self._reader is None or not self.loader.persistent_workers:
            looks = meeting.rank == 0 and self._reader is None
            watched = WatchedCollate(self.loader.collate_fn, self.loader.dataset) if looks else None
            self._reader = self._new_reader(self._parts, watched)
        return self._give(iter(self._reader), parts, meeting)

    def _stream(self, meeting: Meeting) -> Iterator[Any]:
        """Reads all examples on every rank, and all random numbers as in the script alone."""
        if self._reader is None or not self.loader.persistent_workers:
            looks = meeting.rank == 0 and self._reader is None
            watched = WatchedCollate(self.loader.collate_fn) if looks else self.loader.collate_fn
            divide = _ShareOfStream(watched, meeting.rank, meeting.world)
            options = {**self._options(), "collate_fn": divide, "drop_last": self.loader.drop_last}
            self._reader = DataLoader(
                self.loader.dataset, self.loader.batch_size, generator=self.loader.generator, **options
            )
        with meeting.begin_common(ITERATION):
            batches = iter(self._reader)
        parts = deque[_Part]()

        def shares() -> Iterator[Any]:
            while True:
                with meeting.drawing():
                    taken = next(batches, None)
                if taken is None:
                    return
                parts.append(taken[1])
                yield taken[0]

        return self._give(shares(), parts, meeting)

    def _give(self, shares: Iterator[Any], parts: deque[_Part], meeting: Meeting) -> Iterator[Any]:
        deliveries, given = meeting.deliveries, list[Delivery]()
        epoch, index, before = deliveries.begin(), 0, (meeting.passes, meeting.gathers)
        trains = threading.current_thread() is meeting.thread
        try:
            for batch in shares:
                if isinstance(batch, SaidBatch):
                    meeting.say(batch.line)
                    batch = batch.batch
                # A script that never calls backward may train in a way that no process tells the others.
                if trains and index and not meeting.passes and index.bit_count() == 1:
                    meeting.compare()
                examples, of, order = parts.popleft()
                if of < meeting.world:
                    meeting.say(
                        f"batch {index} of iteration {epoch} has {of} examples, and the shares of ranks {of} and up "
                        "have none: there a mean is not a number, and len(batch) is 0. Give the loader drop_last=True, "
                        "or another batch size"
                    )
                if examples == 0:
                    batch = emptied(batch)
                elif self.loader.collate_fn is not default_collate:
                    examples, said = count_in(batch, examples, examples)
                    if said:
                        meeting.say(said)
                share = Delivery(examples, of, batch)
                deliveries.add(share, epoch, index, order)
                given = [*(one for one in given if one.lives), share]
                index += 1
                yield batch
                del batch
        except GeneratorExit:
            deliveries.leave(given)
            raise
        deliveries.end(given)
        if not trains or not index or meeting.passes != before[0]:
            return
        meeting.compare()
        if meeting.gathers == before[1]:
            meeting.say(
                "an iteration over a divided loader had no backward pass: what the script computes there (a metric, "
                "statistics of a copy of the model) is of each process's share. hr.processes().mean(value, examples) "
                "gives that of all, whole(outputs) has those of all, and a loader that hr.setup is not given has all "
                "examples in every process"
            )

    def _divide(self, batches: Iterator[Any], parts: deque[_Part], meeting: Meeting) -> Iterator[list[Any]]:
        sampler: Any = self.loader.batch_sampler
        often = not (type(sampler) is BatchSampler and type(sampler.sampler) in _DRAW_FIRST)
        first = True
        while True:
            with meeting.drawing() if first or often else nullcontext():
                taken = next(batches, None)
            if taken is None:
                return
            first = False
            batch = list(taken)
            start, stop = bounds(len(batch), (1,) * meeting.world)[meeting.rank]
            parts.append((stop - start, len(batch), zlib.crc32(repr(batch).encode())))
            # An empty batch has the form of one with an example.
            yield batch[start:stop] or batch[:1]

    def _base_seed(self) -> int:
        """Draws what a `DataLoader` draws when an iteration begins, so that samplers draw what follows."""
        if self._reader is not None and self.loader.persistent_workers:
            return int(self._seeds.initial_seed())
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator).item())

    def _new_reader(self, batches: Any, collate: Callable[[list[Any]], Any] | None = None) -> DataLoader[Any]:
        options = {**self._options(), "collate_fn": collate or self.loader.collate_fn}
        return DataLoader(self.loader.dataset, batch_sampler=batches, generator=self._seeds, **options)

    def _options(self) -> dict[str, Any]:
        names = (*_OPTIONS, "prefetch_factor") if self.loader.num_workers else _OPTIONS
        return {name: getattr(self.loader, name) for name in names}

    def _batch_sampler(self) -> Any:
        replaced = self._replaced()
        if replaced is None:
            return self.loader.batch_sampler
        return BatchSampler(replaced, self.loader.batch_size or 1, self.loader.drop_last)

    def _replaced(self) -> DistributedSampler[Any] | None:
        """Returns a sampler that takes all examples in the order of one that takes a rank's part; None for others."""
        sampler: Any = self.loader.sampler
        if type(self.loader.batch_sampler) is not BatchSampler or type(sampler) is not DistributedSampler:
            return None
        every = copy.copy(sampler)
        every.num_replicas, every.rank = 1, 0
        every.num_samples = every.total_size = len(self.loader.dataset)  # type: ignore[arg-type]
        return every


class _Parts:
    """The batch sampler of a rank's own reader: each iteration of it takes what `next` is then."""

    def __init__(self, shares: ShareLoader) -> None:
        self.next: Iterator[list[Any]] = iter(())
        self._shares = weakref.ref(shares)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.next

    def __len__(self) -> int:
        shares = self._shares()
        return len(shares) if shares is not None else 0


class _ShareOfStream:
    """Takes this rank's examples of each batch, of examples that have no index, before they become tensors.

    Returns them with their number, that of the batch, and a digest of its first example.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, world: int) -> None:
        self._collate, self._rank, self._world = collate, rank, world

    def __call__(self, batch: list[Any]) -> tuple[Any, _Part]:
        start, stop = bounds(len(batch), (1,) * self._world)[self._rank]
        # An empty batch has the form of one with an example.
        share = self._collate(batch[start:stop] or batch[:1])
        return share, (stop - start, len(batch), _mark(batch[0]))


def _mark(example: Any) -> int:
    """Returns a digest of an example, which all ranks must have."""
    numbers: list[Any] = []
    map_tensors(lambda tensor: numbers.append(tensor.flatten()[:_MARKED].tolist()), example)
    return zlib.crc32(repr(numbers or example).encode())


def let_others_draw(meeting: Meeting) -> None:
    """Lets loaders that are not divided, as those of test data, draw what they draw in the script alone.

    Every iteration draws a seed, and a shuffled one another, from the generators that the order of a divided loader
    comes from.
    """
    plain_loader, plain_sampler = DataLoader.__iter__, RandomSampler.__iter__

    def draws(generator: torch.Generator | None) -> AbstractContextManager[None]:
        mine = generator is None and threading.current_thread() is meeting.thread
        return meeting.drawing() if mine else nullcontext()

    def iterate(loader: DataLoader[Any]) -> Any:
        with draws(loader.generator):
            return plain_loader(loader)

    def sample(sampler: RandomSampler) -> Iterator[int]:
        order = plain_sampler(sampler)
        with draws(sampler.generator):
            taken = list(islice(order, 1))
        yield from chain(taken, order)

    setattr(DataLoader, "__iter__", iterate)  # noqa: B010
    setattr(RandomSampler, "__iter__", sample)  # noqa: B010


def _require_batches(loader: Any, divides: bool) -> None:
    """Raises a UsageError for a loader whose batches cannot be divided."""
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"the loader is a {type(loader).__name__}, and setup divides the batches of a torch DataLoader; give one, "
            "or None where every process makes batches of its own"
        )
    if loader.batch_sampler is None:
        raise UsageError("the loader has no batch_size, so there is no global batch to split; give it one")
    if not divides:
        return
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(loader).__name__} iterates in a way of its own, which setup would leave out, because it divides "
            "the batches of a torch DataLoader; give a DataLoader, and put what it adds into the loop"
        )
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler) and (
        type(sampler) is not DistributedSampler or type(loader.batch_sampler) is not BatchSampler
    ):
        raise UsageError(
            f"{type(sampler).__name__} takes one rank's part of the data, and setup divides every batch itself: half "
            "of the data would be left out. Give the loader a sampler of all examples"
        )
