"""How a worker's parts are read: by itself, by threads, or by processes."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor

from headrace.data.loading.autotune import Autotuner, ReadMode, ReadModes
from headrace.data.loading.prefetcher import Prefetcher
from headrace.data.loading.processes import ReaderProcesses, ReaderStalled
from headrace.data.loading.reader import ExampleReader, ReadResult
from headrace.data.pipeline.pipeline import InputPipeline, visited
from headrace.data.pipeline.source import ArraySource, DatasetSource
from headrace.data.pipeline.steps import Cache, Into, Map
from headrace.errors import RunFailed
from headrace.memory import MOST_ARENAS, give_back, tune

Part = tuple[int, Tensor, int]
"""What one worker reads for a round: the epoch, the indices, the length of the global batch."""

_LITTLE = 1 / 16
"""Of the memory limit: what the readers' threads may keep for themselves."""
_PATIENCE_S, _UNASKED_PATIENCE_S = 120.0, 10.0
"""How long a process that reads may do nothing: one that the user has asked for, and one that is tried."""
_SOME = 64
"""Examples whose sizes are asked for, to know what is to come."""
_LOOKS = 3
"""Batches that are looked at before it is read ahead, those that take no time."""
_SLOW_S = 0.002
"""What takes longer is looked at once."""


@dataclass(frozen=True)
class CpuBudget:
    """What a worker may read with.

    Attributes:
        cores: that are this worker's; None for all that this process may use.
        training: of those, how many it trains on; None for torch's threads.
        say: takes a line for the user.
    """

    cores: int | None = None
    training: int | None = None
    say: Callable[[str], object] = lambda line: None


class BatchReader:
    """Reads parts, one after the other; `parallel` of the pipeline says how, "auto" by trying.

    Attributes:
        parallel: how it reads, "inline", "threads" or "processes".
        ahead: what reads ahead now; None where nothing does.
    """

    def __init__(self, pipeline: InputPipeline, reader: ExampleReader, cpu_budget: CpuBudget) -> None:
        self._pipeline = pipeline
        self._reading = pipeline.reading
        self._reader = reader
        self._cpu_budget = cpu_budget
        self._cores = max(1, cpu_budget.cores or len(os.sched_getaffinity(0)))
        self._sizes = _Sizes(pipeline)
        self._by_itself = self._reads_nothing_ahead()
        self.parallel = "inline" if self._by_itself else self._reading.parallel
        self._best: ReadMode | None = None
        self._said = ""
        self._little = math.inf
        self._stalled = False
        self.prefetcher: Prefetcher[Part] | None = None

    @property
    def readers(self) -> int:
        """How many threads or processes read now, or this one."""
        return 1 if self.prefetcher is None else max(1, self.prefetcher.readers)

    def run(self, parts: Iterator[Part]) -> Generator[tuple[Part, ReadResult], None, None]:
        """Yields each part with what was read of it, in order."""
        return self.alone(parts) if self._by_itself else self._run_ahead(parts)

    def alone(self, parts: Iterator[Part]) -> Generator[tuple[Part, ReadResult], None, None]:
        """Yields each part with what was read of it, when it is asked for."""
        for part in parts:
            yield part, self.read(part)

    def read(self, part: Part) -> ReadResult:
        """Reads a part."""
        return self._reader.read(part[0], part[1])

    def _run_ahead(self, parts: Iterator[Part]) -> Generator[tuple[Part, ReadResult], None, None]:
        reading, sizes = self._reading, self._sizes
        first = next(parts, None)
        if first is None:
            return
        sizes.examples = len(first[1])
        parts = chain([first], parts)
        ahead = Prefetcher(
            parts, self.read, sizes.estimate, sizes.measured, self._freed, reading.ahead, reading.memory_limit
        )
        processes: list[ReaderProcesses] = []
        self.prefetcher = ahead
        try:
            modes = self._modes()
            self._best = self._best or (yield from self._begin(ahead, modes))
            tuner = Autotuner(self._best, modes, self._tell)
            mode = self._best
            self._adopt(mode, ahead, processes)
            while (found := ahead.take()) is not None:
                read_s, waiting_s = sum(found[1].seconds), sum(found[1].waiting)
                yield found
                # It must not be kept until the next one is there.
                del found
                before = mode
                if self._stalled and mode.parallel == "processes":
                    mode = self._best = tuner.leave_out("processes")
                    self._say(mode, "processes stood still, as forks of threads may")
                elif not reading.count:
                    mode = tuner.look(perf_counter(), ahead.waited_s, read_s, read_s - waiting_s)
                if mode != before:
                    self._adopt(mode, ahead, processes)
        finally:
            self.prefetcher = None
            # The threads may be waiting for them.
            for each in processes:
                each.end()
            ahead.close()
            _close(processes)

    def _begin(self, ahead: Prefetcher[Part], modes: ReadModes) -> Generator[tuple[Part, ReadResult], None, ReadMode]:
        """Yields what is read to find out what to begin with, and returns that."""
        if "inline" not in modes.kinds:
            if "threads" in modes.kinds:
                # How large a batch is says where the other threads take their memory from.
                self._share_memory(1)
                ahead.set_readers(1)
                if (found := ahead.take()) is not None:
                    yield found
                del found
            return ReadMode(modes.kinds[0], self._reading.count or modes.free)
        least = math.inf
        # The first one may be slow because it is the first.
        for _ in range(_LOOKS):
            found = ahead.take()
            if found is None:
                break
            least = min(least, sum(found[1].seconds))
            yield found
            del found
            if least > _SLOW_S:
                break
        mode = modes.first(least)
        if math.isfinite(least):
            self._say(mode, f"a batch takes {1000 * least:.3g} ms")
        return mode

    def _adopt(self, mode: ReadMode, ahead: Prefetcher[Part], processes: list[ReaderProcesses]) -> None:
        """Lets what is handed out from now on be read that mode."""
        if bool(processes) != (mode.parallel == "processes"):
            # A fork should find no thread in the middle of something, and nobody should wait for those that end.
            ahead.settle()
            ahead.read = self.read
            _close(processes)
            if mode.parallel == "processes":
                ahead.read = self._start(processes)
        if mode.parallel == "threads":
            self._share_memory(mode.readers)
        ahead.set_readers(mode.readers)
        self.parallel = mode.parallel

    def _share_memory(self, readers: int) -> None:
        """Lets threads that begin now take memory from where all do, if what each would keep for itself is much.

        A thread keeps what its largest batch took. Where that is little it has a place of its own, since threads that
        take their memory from one place wait for each other: text is encoded at half the speed then.
        """
        self._little = self._reading.memory_limit * _LITTLE / max(readers, self._cores)
        if self._sizes.expected() > self._little:
            tune(MOST_ARENAS, 1)
            give_back()
            self._little = math.inf

    def _freed(self, nbytes: int) -> None:
        """Gives back what a batch took, if it is larger than was expected."""
        if nbytes > self._little:
            give_back()

    def _tell(self, mode: ReadMode, before: float, now: float) -> None:
        self._best = mode
        if mode.parallel != self._said:
            self._say(mode, f"that gives {now:.3g} batches a second, {before:.3g} before")

    def _say(self, mode: ReadMode, why: str) -> None:
        self._said = mode.parallel
        verb = "read" if mode.readers > 1 else "reads"
        how = f"{mode} {verb} ahead (at most {self._cores})" if mode.readers else "the worker reads by itself"
        self._cpu_budget.say(f"data: {how}: {why}")

    def _reads_nothing_ahead(self) -> bool:
        if self._reading.parallel != "auto":
            return self._reading.parallel == "inline" or self._reading.ahead == 0
        source = self._pipeline.source
        # Of arrays in memory a batch is one look at them. A data set of the user's own may hold an open file, which two
        # threads or processes would read at one place: who knows that it does not says how many.
        alone = isinstance(source, DatasetSource) or (isinstance(source, ArraySource) and not self._pipeline.steps)
        return alone or self._reading.ahead == 0

    def _free(self) -> int:
        """Returns the cores that training leaves, at least one."""
        training = self._cpu_budget.training
        return max(1, self._cores - (torch.get_num_threads() if training is None else training))

    def _modes(self) -> ReadModes:
        """Returns how it may be read."""
        parallel = self._reading.parallel
        if parallel != "auto":
            return ReadModes((parallel,), self._free(), self._cores)
        # A process ends with the thread that started it; where workers are threads, none starts processes unasked.
        may_fork = not self._stalled and self._cores > 1 and threading.current_thread() is threading.main_thread()
        # What a process keeps in its own memory, no other one finds there: each would have a cache of its own, and the
        # next epoch's examples would mostly be in another's.
        may_fork &= not any(isinstance(step, Cache) and not step.folder for step in self._pipeline.steps)
        return ReadModes(
            ("threads", "processes", "inline") if may_fork else ("threads", "inline"), self._free(), self._cores
        )

    def _start(self, processes: list[ReaderProcesses]) -> Callable[[Part], ReadResult]:
        # All that there may be, at once: the sooner this process is forked, the less of it is copied.
        count = self._reading.count or max(2, self._cores)
        unasked = self._reading.parallel == "auto"
        readers = ReaderProcesses(self._reader.read, count, _UNASKED_PATIENCE_S if unasked else _PATIENCE_S)
        processes.append(readers)

        given_up = threading.Event()

        def read(part: Part) -> ReadResult:
            try:
                # What was handed out before anybody knew is not waited for once more.
                if not given_up.is_set():
                    return readers.read(part[0], part[1])
            except ReaderStalled as stalled:
                if not unasked:
                    raise RunFailed(str(stalled)) from stalled
                given_up.set()
                self._stalled = True
            return self.read(part)

        return read


def _close(processes: list[ReaderProcesses]) -> None:
    for each in processes:
        each.close()
    processes.clear()


class _Sizes:
    """What batches take while they are read, in bytes, judged by those that have been read.

    Several threads may call it at the same time.

    Attributes:
        examples: of a batch.
    """

    def __init__(self, pipeline: InputPipeline) -> None:
        self._source = pipeline.source
        self._visited = visited(pipeline)
        last = pipeline.steps[-1] if pipeline.steps else None
        written_in_place = isinstance(last, Map) and isinstance(last.function, Into)
        # Else its examples are there, too, when they are put together.
        self._copies = 1 if written_in_place or not pipeline.steps else 2
        self.examples = 0
        self._largest: int | None = None
        self._ratio: float | None = None
        self._lock = threading.Lock()

    def estimate(self, part: Part) -> int | None:
        """Returns about how many bytes it takes to read a part; None before the first has been read."""
        source = self._source_bytes(part[1].tolist())
        with self._lock:
            return self._estimate(source)

    def expected(self) -> int:
        """Returns about what the largest batch will take, judged by those that were read and by some examples."""
        some = range(0, len(self._visited), max(1, len(self._visited) // _SOME))
        told = [self._source_bytes([place]) for place in some]
        known = [size for size in told if size is not None]
        with self._lock:
            if len(known) < len(told):
                return self._estimate(None) or 0
            source = self.examples * max(known)
            # Before there is a batch to judge by, it is taken to be as large as what it is made from.
            return self._estimate(source) or (1 + self._copies) * source

    def measured(self, part: Part, found: int) -> None:
        """Takes up how many bytes the batch of a part has."""
        source = self._source_bytes(part[1].tolist())
        with self._lock:
            self._largest = max(self._largest or 0, found)
            if source:
                self._ratio = max(self._ratio or 0.0, found / source)

    def _estimate(self, source: int | None) -> int | None:
        if source is not None and self._ratio is not None:
            return source + int(self._copies * self._ratio * source)
        return None if self._largest is None else self._copies * self._largest

    def _source_bytes(self, places: list[int]) -> int | None:
        total = 0
        for place in places:
            size = self._source.nbytes(self._visited[place % len(self._visited)])
            if size is None:
                return None
            total += size
        return total
