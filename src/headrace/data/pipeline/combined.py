"""Several pipelines as one, mixed by weights or interleaved; and batches that were read as a pipeline."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.loading.reader import ExampleReader
from headrace.data.pipeline.order import ExampleOrder
from headrace.data.pipeline.pipeline import InputPipeline, require_pipeline
from headrace.data.pipeline.source import Epoch, Source, require_whole
from headrace.data.pipeline.steps import Batching, Cache, Filter, Reading
from headrace.errors import DataError, UsageError
from headrace.trees import map_leaves, map_tensors

_LONGEST_PATTERN = 10_000
_DEFAULT = Reading()


def mix(*pipelines: InputPipeline, weights: Sequence[float] | None = None) -> InputPipeline:
    """Returns a pipeline that takes its examples from several, in proportion to weights, exactly.

    An epoch is as long as all of them together. A pipeline that ends before begins a new epoch of its own, in a new
    order if it is shuffled; the examples of one that does not end come in the next epoch. Each keeps its transforms;
    steps chained to the result apply to all. What makes a batch and what leaves out examples is said of the result.

        a b a a b a a b a a        weights=(2, 1)

    Args:
        pipelines: at least one.
        weights: of each, above 0; None to let them follow each other, every example exactly once: `mix(a, b).shuffle()`
            mixes them evenly.

    Raises:
        UsageError: there are more or fewer weights than pipelines, or one is not above 0; or a part has a filter,
            `batch` or `on_error("skip")`, or is to be read in another way than another;
            or two caches have one folder.

    Examples:
        >>> news, books = (hr.data.from_arrays(torch.zeros(count)) for count in (10, 30))
        >>> len(hr.data.mix(news, books, weights=[1, 3]))
        40
    """
    if not pipelines:
        raise UsageError("mix takes at least one pipeline")
    require_pipeline("mix", *pipelines)
    reading = _reading_of(pipelines)
    if weights is None:
        return InputPipeline(_Chained(pipelines), reading=reading)
    chosen = list(weights)
    if len(chosen) != len(pipelines):
        raise UsageError(f"{len(pipelines)} pipelines need as many weights, got {len(chosen)}")
    if not all(isinstance(weight, int | float) and math.isfinite(weight) and weight > 0 for weight in chosen):
        raise UsageError(f"weights are finite numbers above 0, got {chosen}")
    return InputPipeline(_Mixed(pipelines, _pattern(chosen)), reading=reading)


def interleave(*pipelines: InputPipeline, block: int = 1) -> InputPipeline:
    """Returns a pipeline that takes from several in turn, until each is used up: every example exactly once.

        a b a b a b b b        the first is shorter

    Args:
        pipelines: at least one.
        block: examples that are taken from each at a time.

    Raises:
        UsageError: there is no pipeline, or `block` is below 1; or as of `mix`.

    Examples:
        >>> one, other = (hr.data.from_arrays(torch.arange(3) + start) for start in (0, 10))
        >>> both = hr.data.interleave(one, other)
        >>> [both.source.example(index, hr.data.Epoch(0, 0))[0].item() for index in range(6)]
        [0, 10, 1, 11, 2, 12]
    """
    if not pipelines:
        raise UsageError("interleave takes at least one pipeline")
    require_pipeline("interleave", *pipelines)
    require_whole("block must be", block)
    return InputPipeline(_Interleaved(pipelines, block), reading=_reading_of(pipelines))


def _reading_of(pipelines: Sequence[InputPipeline]) -> Reading:
    """Returns how several are read as one: what the parts say, which must not contradict each other.

    A UsageError for what parts say of batches and of examples that are left out, which concerns the whole.
    """
    chosen: dict[str, Any] = {}
    for number, pipeline in enumerate(pipelines, 1):
        for what, behind in _of_the_whole(pipeline):
            raise UsageError(
                f"part {number} of {len(pipelines)} has {what}, and examples of all parts are read and batched "
                f"together; say it of the whole: {behind}"
            )
        for name in ("parallel", "count", "ahead", "memory_limit"):
            value = getattr(pipeline.reading, name)
            if value == getattr(_DEFAULT, name):
                continue
            if chosen.setdefault(name, value) != value:
                raise UsageError(
                    f"the parts are read as one, and say {name}={chosen[name]!r} and {name}={value!r} (of map and "
                    "prefetch); give them the same"
                )
    return dataclasses.replace(_DEFAULT, **chosen)


def _of_the_whole(pipeline: InputPipeline) -> Iterator[tuple[str, str]]:
    """Yields what a part of several says that concerns the whole, and how to say it there."""
    if pipeline.reading.on_error == "skip":
        yield 'on_error("skip")', 'hr.data.mix(...).on_error("skip")'
    if any(isinstance(step, Filter) for step in pipeline.steps):
        yield "a filter", "hr.data.mix(...).filter(fn)"
    if pipeline.clients:
        yield "clients", "hr.data.by_client(hr.data.mix(...), ids, rounds)"
    given, default = (vars(batching) for batching in (pipeline.batching, Batching()))
    if names := [name for name in given if given[name] is not default[name]]:
        yield f"batch({', '.join(f'{name}=...' for name in names)})", "hr.data.mix(...).batch(...)"
    if pipeline.processes is not None:
        yield (
            f"a DataLoader's num_workers={pipeline.processes.count}",
            'hr.data.mix(...).map(fn, parallel="processes") of parts hr.data.from_torch(loader.dataset)',
        )


def check_cache_folders(*pipelines: InputPipeline) -> None:
    """Raises a UsageError if two caches of other examples or other steps have the same folder."""
    caches: dict[str, Cache] = {}
    for cache in chain.from_iterable(map(_caches_of, pipelines)):
        if cache.folder is None:
            continue
        other = caches.setdefault(cache.folder, cache)
        if other.key != cache.key:
            raise UsageError(
                f"two pipelines keep their cache in {cache.folder}, of {other.about} and of {cache.about}, and each "
                f"would delete the other's; give each a folder of its own: .cache({cache.folder + '-2'!r})"
            )


def _caches_of(pipeline: InputPipeline) -> Iterator[Cache]:
    if isinstance(pipeline.source, _Several):
        yield from chain.from_iterable(map(_caches_of, pipeline.source.pipelines))
    yield from (step for step in pipeline.steps if isinstance(step, Cache))


class _Several(Source):
    """Examples of several pipelines, found by the pipeline and the place in it."""

    def __init__(self, pipelines: Sequence[InputPipeline]) -> None:
        if any(pipeline.hosts is not None for pipeline in pipelines):
            raise UsageError(
                "hr.data.local says that each host has other examples, and mix and interleave have no order of theirs; "
                "combine what this host has, and mark the whole: hr.data.local(hr.data.mix(first, second))"
            )
        check_cache_folders(*pipelines)
        self.pipelines = tuple(pipelines)
        self._length = sum(map(len, pipelines))
        self._orders: dict[tuple[int, int, int], ExampleOrder] = {}

    def __len__(self) -> int:
        return self._length

    def collate(self, examples: Sequence[Any]) -> Any:
        for number, pipeline in enumerate(self.pipelines, 1):
            if not pipeline.source.stacks:
                raise DataError(
                    f"part {number} of {len(self.pipelines)} has a collate function of its own, and a batch has "
                    "examples of all parts; say of the whole what makes a batch: hr.data.mix(...).batch(collate=fn)"
                )
        return super().collate(examples)

    @property
    def stacks(self) -> bool:
        return all(pipeline.source.stacks for pipeline in self.pipelines)

    @property
    def lasting(self) -> bool:
        return False

    @property
    def one_reader(self) -> bool:
        return any(pipeline.source.one_reader for pipeline in self.pipelines)

    def _take(self, which: int, place: int, seed: int, number: int) -> Any:
        pipeline = self.pipelines[which]
        pipeline_seed = seed if pipeline.seed is None else pipeline.seed
        key = (which, pipeline_seed, number)
        order = self._orders.get(key)
        if order is None:
            # Only the last epochs are used; two threads may make the same order.
            for old in [old for old in list(self._orders) if old[0] == which and old[2] < number - 1]:
                self._orders.pop(old, None)
            order = self._orders[key] = ExampleOrder(len(pipeline), pipeline_seed, number, pipeline.shuffled)
        return ExampleReader(pipeline, pipeline_seed).example(number, order.at(place))


class _Chained(_Several):
    def example(self, index: int, epoch: Epoch) -> Any:
        for which, pipeline in enumerate(self.pipelines):
            if index < len(pipeline):
                return self._take(which, index, epoch.seed, epoch.number)
            index -= len(pipeline)
        raise IndexError(index)


class _Mixed(_Several):
    """`pattern` repeats itself, and tells which pipeline has each place of it."""

    def __init__(self, pipelines: Sequence[InputPipeline], pattern: NDArray[np.int64]) -> None:
        super().__init__(pipelines)
        self._pattern = pattern.tolist()
        self._counts = [int((pattern == which).sum()) for which in range(len(pipelines))]
        seen = [0] * len(pipelines)
        self._before = []
        for which in self._pattern:
            self._before.append(seen[which])
            seen[which] += 1

    def example(self, index: int, epoch: Epoch) -> Any:
        whole = epoch.number * self._length + index
        repeats, at = divmod(whole, len(self._pattern))
        which = self._pattern[at]
        number, place = divmod(repeats * self._counts[which] + self._before[at], len(self.pipelines[which]))
        return self._take(which, place, epoch.seed, number)


class _Interleaved(_Several):
    """Places are found by stretches: within one, the same pipelines have examples left."""

    def __init__(self, pipelines: Sequence[InputPipeline], block: int) -> None:
        super().__init__(pipelines)
        self._block = block
        # Of each: the first place, the turns before it, the pipelines with examples left.
        self._stretches: list[tuple[int, int, list[int]]] = []
        turns, place = 0, 0
        while place < self._length:
            left = [which for which, pipeline in enumerate(pipelines) if len(pipeline) > turns * block]
            # Pipelines with less than a block left take part in one more turn.
            whole = min(len(pipelines[which]) // block for which in left)
            self._stretches.append((place, turns, left))
            if whole > turns:
                place += (whole - turns) * block * len(left)
                turns = whole
            else:
                place += sum(min(block, len(pipelines[which]) - turns * block) for which in left)
                turns += 1

    def example(self, index: int, epoch: Epoch) -> Any:
        first, turns, left = self._stretches[bisect_right(self._stretches, index, key=lambda stretch: stretch[0]) - 1]
        offset = index - first
        sizes = [min(self._block, len(self.pipelines[which]) - turns * self._block) for which in left]
        more, offset = divmod(offset, sum(sizes))
        for which, size in zip(left, sizes, strict=True):
            if offset < size:
                place = (turns + more) * self._block + offset
                return self._take(which, place, epoch.seed, epoch.number)
            offset -= size
        raise IndexError(index)


def _pattern(weights: Sequence[float]) -> NDArray[np.int64]:
    """Returns a pattern of pipelines in the weights' ratio; each place goes to the one furthest behind its share."""
    shares = [Fraction(weight).limit_denominator(_LONGEST_PATTERN) for weight in weights]
    whole = math.lcm(*(share.denominator for share in shares))
    counts = [int(share * whole) for share in shares]
    counts = [count // (math.gcd(*counts) or 1) for count in counts]
    if sum(counts) > _LONGEST_PATTERN or 0 in counts:
        raise UsageError(
            f"the weights {list(weights)} have no ratio of small whole numbers; round them, (3, 1) or (0.75, 0.25)"
        )
    total = sum(counts)
    pattern, taken = [], [0] * len(counts)
    for place in range(total):
        behind = [count * (place + 1) - done * total for count, done in zip(counts, taken, strict=True)]
        which = behind.index(max(behind))
        pattern.append(which)
        taken[which] += 1
    return np.array(pattern, dtype=np.int64)


def replayed(batches: Sequence[Any]) -> tuple[InputPipeline, int]:
    """Returns a pipeline over the examples of batches (trees of tensors) in their order, and its batch size.

    Batches whose shapes differ from the first one's beyond their first dim are left out; longer ones are cut.
    """
    alike: list[dict[str, Tensor]] = []
    for batch in batches:
        leaves: dict[str, Tensor] = {}
        map_leaves(lambda name, leaf: leaves.__setitem__(name, leaf), batch)  # noqa: B023  (at once)
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dim()}
        if tensors and all(map(len, tensors.values())) and (not alike or _form(tensors) == _form(alike[0])):
            alike.append(tensors)
    if not alike:
        raise DataError("no batch has a tensor with an example in it, so there is nothing to train on")
    size = min(len(leaf) for tensors in alike for leaf in tensors.values())
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for tensors in alike:
        for name, leaf in tensors.items():
            columns[name].append(leaf[:size])
    joined = {name: torch.cat(column) for name, column in columns.items()}
    tree = map_leaves(lambda name, leaf: joined.get(name, leaf), batches[0])
    return InputPipeline(_Replay(tree, len(alike) * size), reading=Reading(parallel="inline")), size


def _form(leaves: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in leaves.items()}


class _Replay(Source):
    """A tree of tensors `(examples, ...)`."""

    def __init__(self, tree: Any, length: int) -> None:
        self._tree = tree
        self._length = length

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, epoch: Epoch) -> Any:
        return map_tensors(lambda tensor: tensor[index], self._tree)

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        # The indices are consecutive, so that nothing is copied.
        first = int(indices[0]) if len(indices) else 0
        return map_tensors(lambda tensor: tensor[first : first + len(indices)], self._tree)
