"""Reads batches of a pipeline: all examples of a batch go through a step before the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.pipeline.collator import counted
from headrace.data.pipeline.order import generator
from headrace.data.pipeline.pipeline import InputPipeline, visited
from headrace.data.pipeline.source import SOURCE, Epoch, Source, emptied, padded, unreadable
from headrace.data.pipeline.steps import Absent, Cache, Filter, Map, Step, writer
from headrace.errors import DataError
from headrace.trees import nbytes

if TYPE_CHECKING:
    from headrace.data.cache.store import Store

_OF_HOST = 2**48
"""Addresses of the random numbers of a host's examples; more than it can list."""

Part = tuple[int, Tensor, int]
"""What one worker reads for a round: the epoch, the places of the examples, the length of the global batch."""


@dataclass(frozen=True)
class CpuBudget:
    """The cores that a worker may use for reading.

    Attributes:
        cores: the cores of this worker; None for all that this process may use.
        training: how many of them it trains on; None for the number of torch's threads.
        say: takes the line that says how few cores are left for reading.

    Examples:
        >>> hr.data.CpuBudget(cores=8, training=6).cores
        8
    """

    cores: int | None = None
    training: int | None = None
    say: Callable[[str], object] = lambda line: None


@dataclass(frozen=True)
class ReadResult:
    """A batch of so many `examples`; `skipped` names the unreadable ones with the reasons.

    `seconds` is the time of each stage (the source, each step, collating); `waiting` is the part of it that the thread
    did not compute (for a disk, a network, a lock or a core), empty if not measured. `notices` are lines for the user.
    """

    batch: Any
    examples: int
    skipped: tuple[str, ...]
    seconds: tuple[float, ...]
    waiting: tuple[float, ...] = ()
    notices: tuple[str, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return nbytes(self.batch)


@dataclass
class _Row:
    """An example on its way through the steps; `first` is the first step that it needs, -1 for the source."""

    index: int
    epoch: Epoch
    value: Any = None
    first: int = -1


class ExampleReader:
    """Reads examples and batches of a pipeline; for any number of threads.

    `stages` names what each of `ReadResult.seconds` is of; `drops` says whether a batch may lack examples.
    """

    def __init__(self, pipeline: InputPipeline, seed: int) -> None:
        self._pipeline = pipeline
        self._source = pipeline.source
        self._seed = seed if pipeline.seed is None else pipeline.seed
        self._skips = pipeline.reading.on_error == "skip"
        # A batch of a repeating pipeline may have examples of two epochs of the source.
        one_epoch = pipeline.times == 1 or pipeline.source.lasting
        self._collator = pipeline.batching.collate
        # Collators of others, and the tokenizers in them, are not made for several threads.
        self._collating = threading.Lock()
        stacks = pipeline.batching.pad is None and self._collator is None
        self._whole = not pipeline.steps and stacks and not self._skips and one_epoch
        # What a user's function leaves out of a batch is counted there.
        self._counts = stacks and not self._source.stacks and type(self._source).gather is Source.gather
        self._uncounted, self._notices = "", list[str]()
        self._into = writer(pipeline.steps) if self._collator is None and not self._counts else None
        self._plain = pipeline.taken is None and pipeline.times == 1
        self._cache = next((step for step in pipeline.steps if isinstance(step, Cache)), None)
        self._cached = pipeline.steps.index(self._cache) if self._cache else -1
        self._store_of: Callable[[Cache, int], Store] | None = None
        if self._cache is not None:
            # Imported for those alone that have a cache, and before processes are forked that read.
            from headrace.data.cache.store import store_of

            self._store_of = store_of
        cached_last = self._cache is not None and pipeline.steps[-1] is self._cache
        self._gathers = cached_last and stacks and self._source.stacks
        # Hosts that list examples of their own number them alike.
        self._first = _OF_HOST * pipeline.hosts.mine if pipeline.hosts else 0
        self.stages = ("source", *(step.name for step in pipeline.steps), "batch")
        self.draws = (False, *(step.draws for step in pipeline.steps), False)
        self.drops = self._skips or self._counts or any(isinstance(step, Filter) for step in pipeline.steps)

    def __reduce__(self) -> tuple[type[ExampleReader], tuple[InputPipeline, int]]:
        # A lock has no copy, and the processes of a `DataLoader` may be no forks.
        return ExampleReader, (self._pipeline, self._seed)

    def read_part(self, part: Part) -> ReadResult:
        """Returns the batch of what one worker reads for a round."""
        return self.read(part[0], part[1])

    def read(self, epoch: int, places: Tensor) -> ReadResult:
        """Returns the batch of the examples at `places`, `(examples,)` int64, each below the pipeline's length."""
        if self._whole:
            began, computed = perf_counter(), thread_time()
            indices, of = self._indices(places), Epoch(self._seed, epoch)
            if self._counts:
                batch, count = self._counted(self._source.many(indices.tolist(), of))
                batch = batch if count else self._nothing(epoch)
            else:
                batch, count = self._source.gather(indices, of), len(places)
            passed = perf_counter() - began
            waited = max(0.0, passed - (thread_time() - computed))
            return ReadResult(batch, count, (), (passed, 0.0), (waited, 0.0), self._take_notices())
        if self._gathers:
            # As a whole, from a cache that is the last step, if that is possible.
            spent = [(0.0, 0.0)] * (1 + self._cached)
            gathered = self._timed(spent, lambda: self._store().gather(self._indices(places).numpy()))
            if gathered is not None:
                batch, examples = gathered
                return self._read(batch, examples, (), [*spent, (0.0, 0.0)])
        spent = []
        skipped: list[str] = []
        rows, batch = self._through(epoch, places.tolist(), spent, skipped)
        if not rows:
            batch = self._nothing(epoch)
        return self._read(batch, len(rows), skipped, spent)

    def _through(
        self, epoch: int, places: Sequence[int], spent: list[tuple[float, float]], skipped: list[str]
    ) -> tuple[list[_Row], Any]:
        """Passes examples through all steps; returns those that are left, and their batch."""
        rows = self._missing([_Row(*self._locate(epoch, place)) for place in places])
        rows = self._timed(spent, lambda: self._fetch(rows, skipped))
        # The last step may write into the batch.
        inner = self._pipeline.steps[:-1] if self._into else self._pipeline.steps
        for position, step in enumerate(inner):
            rows = self._timed(spent, lambda: self._apply(position, step, rows, skipped))  # noqa: B023  (at once)
        batch = self._timed(spent, lambda: self._make(rows, skipped) if rows else None)
        if self._into:
            spent.append((0.0, 0.0))
        return rows, batch

    def example(self, epoch: int, place: int) -> Any:
        """Returns one example, for a pipeline that contains this one, which leaves out none."""
        skipped: list[str] = []
        rows = self._fetch(self._missing([_Row(*self._locate(epoch, place))]), skipped)
        for position, step in enumerate(self._pipeline.steps):
            rows = self._apply(position, step, rows, skipped)
        return rows[0].value

    def trace(self, epoch: int, place: int) -> Iterator[tuple[str, Any]]:
        """Yields each stage's name and result for one example, without the cache; ends early if it is left out."""
        skipped: list[str] = []
        rows = self._fetch([_Row(*self._locate(epoch, place))], skipped)
        for position, step in enumerate((None, *self._pipeline.steps)):
            if step is not None and not isinstance(step, Cache):
                rows = self._apply(position - 1, step, rows, skipped)
            if not rows:
                return
            yield self.stages[position], rows[0].value

    def key(self, place: int) -> str:
        """Returns the name of an example for messages."""
        return self._source.key(self._locate(0, place)[0])

    def _timed(self, spent: list[tuple[float, float]], work: Callable[[], Any]) -> Any:
        began, computed = perf_counter(), thread_time()
        result = work()
        passed = perf_counter() - began
        spent.append((passed, max(0.0, passed - (thread_time() - computed))))
        return result

    def _locate(self, epoch: int, place: int) -> tuple[int, Epoch]:
        if self._plain:
            return place, Epoch(self._seed, epoch)
        indices = visited(self._pipeline)
        copy, position = divmod(place, len(indices))
        return indices[position], Epoch(self._seed, epoch * self._pipeline.times + copy)

    def _indices(self, places: Tensor) -> Tensor:
        if self._plain:
            return places
        indices = visited(self._pipeline)
        return places % len(indices) * indices.step + indices.start

    def _read(
        self, batch: Any, examples: int, skipped: Sequence[str], spent: Sequence[tuple[float, float]]
    ) -> ReadResult:
        seconds, waiting = zip(*spent, strict=True)
        return ReadResult(batch, examples, tuple(skipped), seconds, waiting, self._take_notices())

    def _store(self) -> Store:
        assert self._cache is not None
        assert self._store_of is not None
        return self._store_of(self._cache, len(self._source))

    def _missing(self, rows: list[_Row]) -> list[_Row]:
        """Marks the examples that a cache has; returns all except those that it knows to be left out."""
        if self._cache is None or not rows:
            return rows
        states = self._store().find([row.index for row in rows])
        for row, absent in zip(rows, states, strict=True):
            row.first = -1 if absent is Absent.MISSING else self._cached
        return [row for row, absent in zip(rows, states, strict=True) if absent is not Absent.LEFT_OUT]

    def _keep(self, rows: list[_Row]) -> list[_Row]:
        """Takes the cached examples from the cache, and adds the others to it."""
        store = self._store()
        for row in rows:
            if row.first == self._cached:
                row.value = store.example(row.index)
        store.put([(row.index, row.value) for row in rows if row.first < self._cached])
        return rows

    def _fetch(self, rows: Sequence[_Row], skipped: list[str]) -> list[_Row]:
        def fetch(row: _Row) -> bool:
            if row.first < 0:
                row.value = self._source.example(row.index, row.epoch)
            return True

        return self._each(rows, SOURCE, fetch, skipped)

    def _apply(self, position: int, step: Step, rows: list[_Row], skipped: list[str]) -> list[_Row]:
        if isinstance(step, Cache):
            return self._keep(rows)
        if isinstance(step, Map) and step.batched:
            return self._apply_to_all(position, step, rows, skipped)

        def apply(row: _Row) -> bool:
            if row.first > position:
                return True
            given = {"rng": self._rng(row, position)} if step.draws else {}
            if isinstance(step, Map):
                result = step.function(step.given(row.value), **given)
                row.value = step.put(row.value, result)
                return True
            keeps = bool(step.function(row.value, **given))
            if not keeps and position < self._cached:
                self._store().put([(row.index, Absent.LEFT_OUT)])
            return keeps

        return self._each(rows, step.name, apply, skipped)

    def _apply_to_all(self, position: int, step: Map, rows: list[_Row], skipped: list[str]) -> list[_Row]:
        waiting = [row for row in rows if row.first <= position]
        if not waiting:
            return rows

        def apply(some: Sequence[_Row]) -> None:
            values = [step.given(row.value) for row in some]
            rngs = {"rng": [self._rng(row, position) for row in some]} if step.draws else {}
            results = list(step.function(values, **rngs))
            if len(results) != len(some):
                raise ValueError(f"it returned {len(results)} examples for {len(some)}")
            for row, result in zip(some, results, strict=True):
                row.value = step.put(row.value, result)

        try:
            apply(waiting)
            return rows
        except Exception as error:
            if not self._skips:
                keys = f"one of {self._source.key(waiting[0].index)} to {self._source.key(waiting[-1].index)}"
                raise unreadable(keys, step.name, error) from error

        def alone(row: _Row) -> bool:
            if row.first <= position:
                apply([row])
            return True

        return self._each(rows, step.name, alone, skipped)

    def _each(self, rows: Sequence[_Row], who: str, work: Callable[[_Row], bool], skipped: list[str]) -> list[_Row]:
        ready = []
        for row in rows:
            try:
                if work(row):
                    ready.append(row)
            except Exception as error:
                if not self._skips:
                    if who == SOURCE and isinstance(error, DataError):
                        # Its message names the example.
                        raise
                    raise unreadable(self._source.key(row.index), who, error) from error
                skipped.append(f"{self._source.key(row.index)}: {who} raised {type(error).__name__}: {error}")
        return ready

    def _rng(self, row: _Row, position: int) -> np.random.Generator:
        # A cache draws no numbers: the steps after it draw the same as without it.
        drawing = position - (0 <= self._cached < position)
        return generator(row.epoch.seed, row.epoch.number, self._first + row.index, drawing)

    def _make(self, rows: list[_Row], skipped: list[str]) -> Any:
        if self._into:
            return self._written(self._into, rows, skipped)
        if self._gathers:
            # Reading back what was just cached, row by row, takes no thread from training.
            gathered = self._store().gather(np.array([row.index for row in rows]))
            if gathered is not None:
                return gathered[0]
        if self._collator:
            keys = [self._source.key(row.index) for row in rows]
            drawing = len(self._pipeline.steps)
            with self._collating:
                return self._collator([row.value for row in rows], keys, lambda: self._rng(rows[0], drawing))
        if self._counts:
            batch, count = self._counted([row.value for row in rows])
            # Which of them are gone is not known; their number is what counts.
            del rows[count:]
            return batch
        return self._collated([row.value for row in rows])

    def _collated(self, values: Sequence[Any]) -> Any:
        batching = self._pipeline.batching
        if batching.pad is not None:
            return padded(values, batching.pad, batching.pad_to)
        return self._source.collate(values)

    def _counted(self, examples: Sequence[Any]) -> tuple[Any, int]:
        """Returns the batch of a user's collate function, and how many examples it holds."""
        batch, count, said = counted(self._source.collate, examples)
        if said and not self._uncounted:
            self._uncounted = said
            self._notices.append(said)
        return batch, count

    def _take_notices(self) -> tuple[str, ...]:
        taken, self._notices = self._notices, []
        return (*taken, *(self._store().take_notices() if self._cache else ()))

    def _written(self, step: Map, rows: list[_Row], skipped: list[str]) -> Any:
        """Makes a batch into which the last step writes its results; the other fields are collated."""
        function: Any = step.function
        tensor = torch.from_numpy(np.empty((len(rows), *function.shape), dtype=function.dtype))
        out: NDArray[Any] = tensor.numpy()
        place = 0

        def write(row: _Row) -> bool:
            nonlocal place
            function.into(step.given(row.value), out[place])
            place += 1
            return True

        rows[:] = self._each(rows, step.name, write, skipped)
        tensor = tensor[: len(rows)]
        if step.field is None or not rows:
            return tensor
        rest = [step.put(row.value, 0) for row in rows]
        return step.put(self._collated(rest), tensor)

    def _nothing(self, epoch: int) -> Any:
        """Returns an empty batch; its shapes are those of an example that went through all steps."""
        for place in range(len(self._pipeline)):
            rows, batch = self._through(epoch, [place], [], [])
            if rows:
                return emptied(batch)
        raise DataError("every example is left out")
