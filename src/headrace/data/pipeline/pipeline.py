"""What the data is: definitions. Nothing is read, shuffled or copied before a `Loader` runs them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.pipeline.order import Hosts
from headrace.data.pipeline.source import ArraySource, Source, as_tensor
from headrace.data.pipeline.steps import Batching, Filter, Map, Reading, Step, cached, takes_rng
from headrace.errors import DataError, UsageError

_STACKED = Batching()
_AUTO = Reading()


@dataclass(frozen=True)
class Processes:
    """Processes that read ahead for one worker, as a torch `DataLoader` was told to have.

    Attributes:
        count: how many; at least 1.
        prefetch_factor: batches that each may be ahead.
        start_method: how they begin, "fork" or "spawn"; None for Python's own choice.
        worker_init_fn: what each calls first, with its number.
        timeout_s: longest wait for a batch; 0 for no limit.
    """

    count: int
    prefetch_factor: int | None = None
    start_method: str | None = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout_s: float = 0.0


@dataclass(frozen=True, eq=False)
class InputPipeline:
    """A data set and what is done to it, for any number of workers.

    Attributes:
        source: where examples come from.
        shuffled: whether every epoch has an order of its own; else the source's.
        seed: what the orders and the transforms' random numbers follow; None for the job's.
        steps: what every example goes through, in turn.
        processes: who reads, if not the worker itself.
        taken: which of the source's examples, by index; None for all.
        times: how often an epoch visits each.
        batching: how they become a batch.
        reading: how a worker reads.
        hosts: who has how much, where each host lists its own; None where all list the same.

    Raises:
        DataError: the source is empty.
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

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise DataError("the data set is empty: it has 0 examples; training needs at least 1")

    def __len__(self) -> int:
        return len(visited(self)) * self.times

    def shuffle(self, seed: int | None = None) -> InputPipeline:
        """Gives every epoch an order of its own, over the whole data set.

        Args:
            seed: what the orders follow; None for the job's.
        """
        return dataclasses.replace(self, shuffled=True, seed=seed)

    def map(
        self,
        fn: Callable[..., Any],
        *,
        field: int | str | None = None,
        batched: bool = False,
        parallel: str | int | None = None,
    ) -> InputPipeline:
        """Lets every example go through a function.

        Args:
            fn: takes one example, a tuple or a dict as the data has it, and returns one. If it has a
                parameter `rng`, it gets a `numpy.random.Generator` there that depends on (seed, epoch,
                index) alone, so that augmentation is the same for any number of workers.
            field: the part of the example that it takes and replaces, by number or name.
            batched: whether it takes a list of examples, and returns a list of as many; then `rng` is a list, too.
            parallel: how this pipeline is read: "inline", "threads", "processes", so many threads, or "auto", which
                tries what is fastest; None for what was said before, or "auto".

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

        What is left out is missing from its batch, so that every other example stays where it is.

        Args:
            fn: takes one example; `rng` as of `map`.
        """
        return dataclasses.replace(self, steps=(*self.steps, Filter(fn, takes_rng(fn))))

    def cache(
        self, where: str | os.PathLike[str], limit: int | None = None, *, key: str | None = None
    ) -> InputPipeline:
        """Keeps the examples that have come so far: what stands before is done once, what stands behind each time.

        What a filter before leaves out stays left out. What is handed on is a copy, that may be changed.

        Args:
            where: "memory" of each process, or a folder, which all processes of a host share and later runs find again.
            limit: bytes; whatever is made when it is reached is made anew in every epoch. None for 1 GiB of memory, for
                all that the disk has.
            key: says what the folder holds, where that cannot be seen from the source and the functions before it.

        Raises:
            UsageError: what stands before draws random numbers, mixes pipelines or is a cache, too; a number is out of
                range; or nobody can know whether the folder still holds this, and there is no key.
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
    ) -> InputPipeline:
        """Says how examples become a batch.

        Args:
            size: of a batch, where the pipeline is iterated over by hand; a job has its own.
            pad: what shorter examples are filled up with along their first dim, so that those of a batch are as long as
                its longest; None refuses examples of different lengths.
            pad_to: the length that all are filled up to.
            lengths: of all examples of the source, `(examples,)`: those of about one length come into one batch.
            window: batches of the order within which examples are sorted by length.

        Raises:
            UsageError: a number is out of range, or there are more or fewer lengths than examples.
        """
        for name, value in (("size", size), ("pad_to", pad_to), ("window", window)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        if pad_to is not None and pad is None:
            raise UsageError("pad_to says how far to fill up; say with what, too: pad=0")
        measured = None if lengths is None else np.asarray(lengths, dtype=np.int64)
        if measured is not None and measured.shape != (len(self.source),):
            raise UsageError(f"lengths must be ({len(self.source)},), one for each example, got {measured.shape}")
        return dataclasses.replace(self, batching=Batching(size, pad, pad_to, measured, window))

    def take(self, count: int) -> InputPipeline:
        """Keeps the first examples, in the order of the data.

        Raises:
            UsageError: `count` is below 1.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"take takes a whole number of at least 1, got {count!r}")
        return dataclasses.replace(self, taken=visited(self)[:count])

    def repeat(self, times: int) -> InputPipeline:
        """Lets an epoch visit every example so often; augmentation differs each time.

        Raises:
            UsageError: `times` is below 1.
        """
        if not isinstance(times, int) or isinstance(times, bool) or times < 1:
            raise UsageError(f"repeat takes a whole number of at least 1, got {times!r}; epochs are the job's")
        return dataclasses.replace(self, times=self.times * times)

    def split(self, rank: int, world: int) -> InputPipeline:
        """Keeps every `world`-th example, from the `rank`-th on: disjoint parts, whose union is the whole.

        Workers of a strategy need none: they take their shares of every batch.

        Raises:
            UsageError: there is no such part.
        """
        if not 0 <= rank < world:
            raise UsageError(f"split takes a rank from 0 to world - 1, got rank {rank} of {world}")
        return dataclasses.replace(self, taken=visited(self)[rank::world])

    def prefetch(self, batches: int | None = None, *, memory_limit: int | None = None) -> InputPipeline:
        """Says how much may be read before it is asked for.

        Args:
            batches: how many; None for what the memory allows.
            memory_limit: bytes that all batches may take that are being read or wait, of each worker.

        Raises:
            UsageError: a number is out of range.
        """
        limit = self.reading.memory_limit if memory_limit is None else memory_limit
        return dataclasses.replace(self, reading=dataclasses.replace(self.reading, ahead=batches, memory_limit=limit))

    def on_error(self, action: str, most: int = 100) -> InputPipeline:
        """Says what becomes of an example that cannot be had.

        Args:
            action: "raise" ends the run with its key; "skip" leaves it out and counts it.
            most: so many may be left out in an epoch, by each worker; one more ends the run.

        Raises:
            UsageError: it is neither.
        """
        return dataclasses.replace(self, reading=dataclasses.replace(self.reading, on_error=action, most_skipped=most))


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
    """
    if len(arrays) == 1 and isinstance(arrays[0], Mapping):
        named = {str(key): as_tensor(value, f"the array {key!r}") for key, value in arrays[0].items()}
        return InputPipeline(ArraySource(named))
    numbered = (as_tensor(value, f"array {position}") for position, value in enumerate(arrays))
    return InputPipeline(ArraySource(tuple(numbered)))


def local(pipeline: InputPipeline) -> InputPipeline:
    """Says that a pipeline lists only what this host stores; every host lists its own, under the same name of a job.

    Each host shuffles its own part and reads nothing of the others'. In every round it takes what is in proportion to
    its part, so that all parts end together, and each example weighs the same, however unequal they are.

    Args:
        pipeline: of this host's examples; at least one.

    Returns:
        The same, marked. Where there is only one host, nothing changes.
    """
    return dataclasses.replace(pipeline, hosts=Hosts())
