"""The definition of an input pipeline. Nothing is read, shuffled or copied before a `Loader` runs it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.pipeline.clients import Clients
from headrace.data.pipeline.collator import Collator
from headrace.data.pipeline.order import Hosts
from headrace.data.pipeline.source import ArraySource, Source, as_tensor, require_whole
from headrace.data.pipeline.steps import Batching, Filter, Map, Reading, Step, cached, takes_rng
from headrace.errors import DataError, UsageError

_STACKED = Batching()
_AUTO = Reading()


@dataclass(frozen=True)
class Processes:
    """Processes of a torch `DataLoader` that read ahead for one worker, and other options of the loader."""

    count: int
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class InputPipeline:
    """A data set and its processing, for any number of workers.

    Attributes:
        source: where examples come from.
        shuffled: whether every epoch has an order of its own; else the source's.
        seed: of the orders and the transforms' random numbers; None for the job's.
        steps: the transforms, filters and caches, in order.
        processes: that read, if a `DataLoader` was given.
        taken: which of the source's examples, by index; None for all.
        times: how often an epoch visits each.
        batching: how examples become a batch.
        reading: how a worker reads.
        hosts: the examples of each host, if each lists its own; None if all list the same.
        clients: whose each example is, where each worker trains on those of one client.

    Raises:
        DataError: the source is empty.

    Examples:
        >>> numbers = hr.data.from_arrays(torch.arange(100.0))
        >>> pipeline = numbers.shuffle(seed=1).map(lambda value: value * 2).take(10)
        >>> len(pipeline)
        10
    """

    source: Source
    shuffled: bool = False
    seed: int | None = None
    steps: tuple[Step, ...] = ()
    processes: Processes | None = None
    taken: range | None = None
    times: int = 1
    batching: Batching = _STACKED
    reading: Reading = _AUTO
    hosts: Hosts | None = None
    clients: Clients | None = None

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise DataError("the data set is empty: it has 0 examples; training needs at least 1")
        if self.clients and self.hosts:
            raise UsageError("hosts that list examples of their own have clients of their own; leave out hr.data.local")
        if self.clients and self.batching.lengths is not None:
            raise UsageError("batch(lengths=...) sorts the examples of all clients by length; leave it out")

    def __len__(self) -> int:
        return len(visited(self)) * self.times

    def shuffle(self, seed: int | None = None) -> InputPipeline:
        """Gives every epoch an order of its own, over the whole data set.

        Args:
            seed: of the orders; None for the job's.

        Raises:
            UsageError: the seed is no whole number.
        """
        if seed is not None and not isinstance(seed, int | np.integer):
            raise UsageError(f"the seed of shuffle must be a whole number, or None for the job's, got {seed!r:.60}")
        return dataclasses.replace(self, shuffled=True, seed=None if seed is None else int(seed))

    def map(
        self,
        fn: Callable[..., Any],
        *,
        field: int | str | None = None,
        batched: bool = False,
        parallel: str | int | None = None,
    ) -> InputPipeline:
        """Applies a function to every example.

        Args:
            fn: takes one example, a tuple or a dict as the data has it, and returns one. If it has a
                parameter `rng`, it gets a `numpy.random.Generator` there that depends on (seed, epoch,
                index) alone, so that augmentation is the same for any number of workers.
            field: the part of the example that it takes and replaces, by number or name.
            batched: whether it takes a list of examples, and returns a list of as many; then `rng` is a list, too.
            parallel: how this pipeline is read: "inline", "threads", "processes", a number of threads, or "auto", which
                tries what is fastest; None for the last choice before, or "auto".

        Raises:
            UsageError: there is no such way to read.
        """
        chosen = self.reading
        if isinstance(parallel, int):
            chosen = dataclasses.replace(chosen, parallel="threads", count=parallel)
        elif parallel is not None:
            chosen = dataclasses.replace(chosen, parallel=parallel, count=None)
        step = Map(fn, takes_rng(fn), field, batched)
        return dataclasses.replace(self, steps=(*self.steps, step), reading=chosen)

    def filter(self, fn: Callable[..., Any]) -> InputPipeline:
        """Leaves out the examples for which a function returns something false.

        Its batch is shorter by those examples, and every other example stays in its batch.

        Args:
            fn: takes one example; `rng` as of `map`.
        """
        return dataclasses.replace(self, steps=(*self.steps, Filter(fn, takes_rng(fn))))

    def cache(
        self, where: str | os.PathLike[str], limit: int | None = None, *, key: str | None = None
    ) -> InputPipeline:
        """Caches the examples: the steps before run once, the steps after in every epoch.

        Examples that a filter before leaves out stay left out. The steps after get copies, which they may change.

        Args:
            where: "memory" of each process, or a folder, which all processes of a host share and later runs find again.
            limit: bytes; examples beyond it are made anew in every epoch. None for 1 GiB of memory, or for the whole
                disk.
            key: identifies the folder's content, if the source and the functions before it cannot be fingerprinted.

        Raises:
            UsageError: a step before draws random numbers or is a cache, too; the source mixes pipelines; a number is
                out of range; or a key is needed.
        """
        return dataclasses.replace(self, steps=(*self.steps, cached(self.source, self.steps, where, limit, key)))

    def batch(
        self,
        size: int | None = None,
        *,
        pad: float | None = None,
        pad_to: int | None = None,
        lengths: Any = None,
        window: int = 64,
        collate: Callable[..., Any] | None = None,
        drop_last: bool = False,
    ) -> InputPipeline:
        """Says how examples become a batch.

        Args:
            size: of a batch for `hr.data.batches`; a job has its own.
            pad: value that shorter examples are filled up with along their first dim, to the longest of the batch; None
                refuses examples of different lengths.
            pad_to: the length that all are filled up to.
            lengths: of all examples of the source, `(examples,)`: examples of about one length share a batch.
            window: batches of the order within which examples are sorted by length.
            collate: takes a list of examples and returns their batch, in place of stacking or padding; None for the
                last one given. If it has a parameter `rng`, it gets a generator as in `map`, of the batch's first
                example.
            drop_last: leaves out the last batch of an epoch where it is short; evaluations have it.

        Raises:
            UsageError: a number is out of range, there are more or fewer lengths than examples, or `collate` is no
                function or does not go with `pad`.
        """
        for name, value in (("size", size), ("pad_to", pad_to), ("window", window)):
            if value is not None:
                require_whole(f"{name} must be", value)
        if pad_to is not None and pad is None:
            raise UsageError("pad_to says how far to fill up; say with what, too: pad=0")
        measured = None if lengths is None else np.asarray(lengths, dtype=np.int64)
        if measured is not None and measured.shape != (len(self.source),):
            raise UsageError(f"lengths must be ({len(self.source)},), one for each example, got {measured.shape}")
        collator = self.batching.collate
        if collate is not None:
            if not callable(collate):
                raise UsageError(f"collate must be a function of a list of examples, got {collate!r:.60}")
            collator = Collator(collate, takes_rng(collate))
        if pad is not None and collator is not None:
            raise UsageError("pad and a collator both say how examples of different lengths are padded; give one")
        return dataclasses.replace(self, batching=Batching(size, pad, pad_to, measured, window, collator, drop_last))

    def take(self, count: int) -> InputPipeline:
        """Keeps the first examples, in the order of the data; `repeat`, before or after, repeats those.

        Raises:
            UsageError: `count` is below 1.
        """
        require_whole("take takes", count)
        return dataclasses.replace(self, taken=visited(self)[:count])

    def repeat(self, times: int) -> InputPipeline:
        """Makes an epoch visit every example `times` times; augmentation differs each time.

        Raises:
            UsageError: `times` is below 1.
        """
        require_whole("repeat takes", times, remedy="; epochs are the job's")
        return dataclasses.replace(self, times=self.times * times)

    def split(self, rank: int, world: int) -> InputPipeline:
        """Keeps every `world`-th example, from the `rank`-th on: disjoint parts, whose union is the whole.

        Workers of a strategy need none: they take their shares of every batch.

        Raises:
            UsageError: there is no such part.
        """
        whole = isinstance(rank, int | np.integer) and isinstance(world, int | np.integer)
        if not whole or not 0 <= rank < world:
            raise UsageError(f"split takes a rank from 0 to world - 1, got rank {rank!r} of {world!r}")
        return dataclasses.replace(self, taken=visited(self)[rank::world])

    def prefetch(self, batches: int | None = None, *, memory_limit: int | None = None) -> InputPipeline:
        """Limits how much is read ahead.

        Args:
            batches: how many; None for as many as the memory allows.
            memory_limit: bytes of all batches that are being read or wait, for each worker.

        Raises:
            UsageError: a number is out of range.
        """
        limit = self.reading.memory_limit if memory_limit is None else memory_limit
        return dataclasses.replace(self, reading=dataclasses.replace(self.reading, ahead=batches, memory_limit=limit))

    def on_error(self, action: str, most: int = 100) -> InputPipeline:
        """Says what to do with an example that cannot be read.

        Args:
            action: "raise" ends the run with its key; "skip" leaves it out and counts it.
            most: most examples that each worker may leave out in an epoch; one more ends the run.

        Raises:
            UsageError: it is neither.
        """
        return dataclasses.replace(self, reading=dataclasses.replace(self.reading, on_error=action, most_skipped=most))


Pipeline = InputPipeline
"""The public name; `hr.Pipeline` is a strategy."""


def require_pipeline(function: str, *pipelines: object) -> None:
    """Raises UsageError for what is no pipeline, where a function takes these."""
    for each in pipelines:
        if not isinstance(each, InputPipeline):
            raise UsageError(
                f"hr.data.{function} takes a pipeline, got {type(each).__name__}; write hr.data.from_arrays(*arrays), "
                "or hr.data.from_torch(dataset)"
            )


def visited(pipeline: InputPipeline) -> range:
    """Returns the indices of the source's examples that an epoch visits."""
    return range(len(pipeline.source)) if pipeline.taken is None else pipeline.taken


def from_arrays(*arrays: Any) -> InputPipeline:
    """Returns a pipeline over tensors or numpy arrays with one entry an example, or over one dict of them.

    An example of `from_arrays(images, labels)` is a tuple `(image, label)`; of a dict it is a dict.

    Args:
        arrays: `(examples, ...)` each. They are used where they are, so leave them unchanged meanwhile.

    Raises:
        DataError: their lengths differ, they are empty, or are neither tensors nor arrays.

    Examples:
        >>> pipeline = hr.data.from_arrays(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0]))
        >>> pipeline.source.example(1, hr.data.Epoch(0, 0))
        (tensor([2., 3.]), tensor(1))
    """
    if len(arrays) == 1 and isinstance(arrays[0], Mapping):
        named = {str(key): as_tensor(value, f"the array {key!r}") for key, value in arrays[0].items()}
        return InputPipeline(ArraySource(named))
    numbered = (as_tensor(value, f"array {position}") for position, value in enumerate(arrays))
    return InputPipeline(ArraySource(tuple(numbered)))


def local(pipeline: InputPipeline) -> InputPipeline:
    """Marks a pipeline as only this host's part of the data; every host of the job lists its own.

    Each host shuffles and reads its own part only. In every round it takes examples in proportion to its part, so that
    all parts end together and each example weighs the same, even if the parts are unequal.

    Args:
        pipeline: of this host's examples; at least one.

    Returns:
        The same, marked; with only one host, nothing changes.

    Examples:
        >>> own_part = hr.data.from_arrays(torch.arange(10.0))
        >>> pipeline = hr.data.local(own_part)
    """
    require_pipeline("local", pipeline)
    return dataclasses.replace(pipeline, hosts=Hosts())


def by_client(pipeline: InputPipeline, ids: Any, rounds: int) -> InputPipeline:
    """Gives each worker the examples of one client, drawn anew every so many rounds: federated learning.

    As many clients take part at a time as there are workers, so that what a worker sees depends on their number. A
    client's examples come in an order that is drawn with it, and again in another when all have come. With
    `ParameterAveraging(period=rounds)` this is FedAvg (McMahan et al., 2017, algorithm 1) with clients drawn uniformly.
    An epoch has as many rounds as before, and visits some examples often and others not at all.

    Args:
        pipeline: the data of all clients.
        ids: the client of each example, `(examples,)` whole numbers: writers, users, or `dirichlet(...)`.
        rounds: the period of the averages.

    Returns:
        The same, whose batches go by clients.

    Raises:
        UsageError: the ids are not one whole number for each example, `rounds` is below 1, or hosts list examples of
            their own.

    Examples:
        >>> labels = torch.arange(100) % 10
        >>> clients = hr.data.dirichlet(labels, clients=20, alpha=0.3)
        >>> data = hr.data.by_client(hr.data.from_arrays(torch.randn(100, 4), labels), clients, rounds=5)
    """
    require_whole("rounds must be", rounds)
    require_pipeline("by_client", pipeline)
    given, count = np.asarray(ids), len(pipeline.source)
    if given.shape != (count,) or not np.issubdtype(given.dtype, np.integer):
        raise UsageError(f"ids must be ({count},) whole numbers, one an example, got {given.shape} {given.dtype}")
    return dataclasses.replace(pipeline, shuffled=True, clients=Clients(given.astype(np.int64), rounds))
