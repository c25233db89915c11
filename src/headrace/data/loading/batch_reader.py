"""Reads a worker's parts of the global batches: inline, by threads, or by processes."""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain
from time import perf_counter

import torch

from headrace.data.loading.autotune import Autotuner, ReadMode, ReadModes
from headrace.data.loading.prefetcher import Prefetcher
from headrace.data.loading.processes import ReaderProcesses, ReaderStalled
from headrace.data.loading.reader import CpuBudget, ExampleReader, Part, ReadResult
from headrace.data.pipeline.pipeline import InputPipeline, visited
from headrace.data.pipeline.steps import Cache, writer
from headrace.errors import RunFailed
from headrace.machine.allocator import MOST_ARENAS, give_back, tune
from headrace.machine.limits import too_many_threads

_LITTLE = 1 / 16
"""Share of the memory limit that the allocator may keep for the reader threads."""
_PATIENCE_S, _UNASKED_PATIENCE_S = 120.0, 10.0
"""How long a reading process may make no progress: one that the user asked for, and one that is tried."""
_SOME = 64
"""Examples whose sizes are looked up to estimate the largest batch."""
_LOOKS = 3
"""Batches that are timed before reading ahead begins."""
_SLOW_S = 0.002
"""A batch that takes longer is timed only once."""


class BatchReader:
    """Reads parts in order and ahead. The pipeline's `parallel` says how; "auto" tries what is fastest.

    `parallel` is how it reads now, "inline", "threads" or "processes"; `prefetcher` reads ahead, or is None.
    """

    def __init__(self, pipeline: InputPipeline, reader: ExampleReader, cpu_budget: CpuBudget) -> None:
        self._pipeline = pipeline
        self._reading = pipeline.reading
        self._reader = reader
        self._cpu_budget = cpu_budget
        self._cores = max(1, cpu_budget.cores or len(os.sched_getaffinity(0)))
        self._sizes = _Sizes(pipeline)
        self.parallel = self._reading.parallel
        self._best: ReadMode | None = None
        self._said = ""
        self._little = math.inf
        # Why no processes read, "" where they may.
        self._no_processes = ""
        self.prefetcher: Prefetcher | None = None
        self._seed = 0

    @property
    def readers(self) -> int:
        """The number of threads or processes that read now; 1 if it is inline."""
        return 1 if self.prefetcher is None else max(1, self.prefetcher.readers)

    def run(self, parts: Iterator[Part], seed: int) -> Generator[tuple[Part, ReadResult], None, None]:
        """Yields each part with its batch, in order; `seed` is that of the processes that read, if any do."""
        self._seed = seed
        reading, sizes = self._reading, self._sizes
        first = next(parts, None)
        if first is None:
            return
        sizes.examples = len(first[1])
        parts = chain([first], parts)
        prefetcher = Prefetcher(
            parts,
            self._reader.read_part,
            sizes.estimate,
            sizes.measured,
            self._freed,
            reading.ahead,
            reading.memory_limit,
        )
        processes: list[ReaderProcesses] = []
        ends, forget = [partial(_end, prefetcher, processes, os.getpid())], atexit.unregister

        def end() -> None:
            while ends:
                ends.pop()()

        # A loop that a program leaves is collected after its end, when modules have lost their functions. In another
        # thread it may still read then, and is not collected.
        if threading.current_thread() is threading.main_thread():
            atexit.register(end)
        self.prefetcher = prefetcher
        try:
            modes = self._modes()
            self._best = self._best or (yield from self._begin(prefetcher, modes))
            tuner = Autotuner(self._best, modes, self._tell)
            mode = self._best
            self._switch(mode, prefetcher, processes)
            while (read := prefetcher.take()) is not None:
                read_s, waiting_s = sum(read[1].seconds), sum(read[1].waiting)
                yield read
                # A reference here would hold the batch until the next one has come.
                del read
                before = mode
                if self._no_processes and mode.parallel == "processes":
                    mode = self._best = tuner.exclude("processes")
                    self._say(mode, self._no_processes)
                elif not reading.count:
                    mode = tuner.update(perf_counter(), prefetcher.waited_s, read_s, read_s - waiting_s)
                if mode != before:
                    self._switch(mode, prefetcher, processes)
        finally:
            self.prefetcher = None
            forget(end)
            end()

    def _begin(self, prefetcher: Prefetcher, modes: ReadModes) -> Generator[tuple[Part, ReadResult], None, ReadMode]:
        """Times the first batches, which it yields, and returns the mode to begin with."""
        if "inline" not in modes.kinds:
            if "threads" in modes.kinds:
                # The size of one batch decides how the other threads allocate memory.
                self._share_memory(1)
                prefetcher.set_readers(1)
                if (read := prefetcher.take()) is not None:
                    yield read
                del read
            return ReadMode(modes.kinds[0], self._reading.count or modes.free)
        least = math.inf
        # The first batch may be slow because it is the first.
        for _ in range(_LOOKS):
            if (read := prefetcher.take()) is None:
                break
            least = min(least, sum(read[1].seconds))
            yield read
            del read
            if least > _SLOW_S:
                break
        mode = modes.first(least)
        if math.isfinite(least):
            self._say(mode, f"a batch takes {1000 * least:.3g} ms")
        return mode

    def _switch(self, mode: ReadMode, prefetcher: Prefetcher, processes: list[ReaderProcesses]) -> None:
        """Reads the parts that are handed out from now on in this mode."""
        if bool(processes) != (mode.parallel == "processes"):
            # No thread should read during a fork, and none should wait for processes that end.
            prefetcher.settle()
            prefetcher.read = self._reader.read_part
            _close(processes)
            if mode.parallel == "processes":
                prefetcher.read = self._start(processes)
        if mode.parallel == "threads":
            self._share_memory(mode.readers)
        prefetcher.set_readers(mode.readers)
        self.parallel = mode.parallel

    def _share_memory(self, readers: int) -> None:
        """Lets new threads share one arena of the allocator, if their own arenas would keep much memory.

        A thread's arena keeps the memory of its largest batch. If that is little, each thread has its own arena, since
        threads that share one wait for each other: text is encoded at half the speed then.
        """
        self._little = self._reading.memory_limit * _LITTLE / max(readers, self._cores)
        if self._sizes.expected() > self._little:
            tune(MOST_ARENAS, 1)
            give_back()
            self._little = math.inf

    def _freed(self, nbytes: int) -> None:
        """Returns memory to the system if a batch is larger than was expected."""
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

    def _modes(self) -> ReadModes:
        """Returns the modes to choose from."""
        training = self._cpu_budget.training
        free = max(1, self._cores - (torch.get_num_threads() if training is None else training))
        if self._reading.parallel != "auto":
            return ReadModes((self._reading.parallel,), free, self._cores)
        # A process ends with the thread that started it, so that workers that are threads start none unasked.
        may_fork = not self._no_processes and self._cores > 1 and threading.current_thread() is threading.main_thread()
        # With a cache in memory, each process would have its own, and miss most examples in the next epoch.
        may_fork &= not any(isinstance(step, Cache) and not step.folder for step in self._pipeline.steps)
        kinds = ("threads", "processes", "inline") if may_fork else ("threads", "inline")
        return ReadModes(kinds, free, self._cores)

    def _start(self, processes: list[ReaderProcesses]) -> Callable[[Part], ReadResult]:
        # All of them at once: the sooner this process forks, the less memory is copied.
        count = self._reading.count or max(2, self._cores)
        unasked = self._reading.parallel == "auto"
        try:
            patience_s = _UNASKED_PATIENCE_S if unasked else _PATIENCE_S
            readers = ReaderProcesses(self._reader.read, count, patience_s, self._seed)
        except OSError as error:
            if unasked:
                self._no_processes = f"the system starts no further process ({error.strerror})"
                return self._reader.read_part
            if isinstance(error, BlockingIOError):
                raise too_many_threads() from error
            raise
        processes.append(readers)
        given_up = threading.Event()

        def read(part: Part) -> ReadResult:
            try:
                # Parts handed out before the stall was noticed must not wait for it again.
                if not given_up.is_set():
                    return readers.read(part[0], part[1])
            except ReaderStalled as stalled:
                if not unasked:
                    raise RunFailed(str(stalled)) from stalled
                given_up.set()
                self._no_processes = "processes stood still, as forks of threads may"
            return self._reader.read_part(part)

        return read


def _end(prefetcher: Prefetcher, processes: list[ReaderProcesses], pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork, where these are not its own
    # The prefetcher's threads may wait for the processes.
    for process in processes:
        process.end()
    prefetcher.close()
    _close(processes)


def _close(processes: list[ReaderProcesses]) -> None:
    while processes:
        processes.pop().close()


class _Sizes:
    """Estimates the bytes that reading a part takes, from the batches read so far; for any number of threads."""

    def __init__(self, pipeline: InputPipeline) -> None:
        self._source = pipeline.source
        self._visited = visited(pipeline)
        # The single examples are in memory, too, when they are collated.
        self._copies = 1 if writer(pipeline.steps) or not pipeline.steps else 2
        self.examples = 0
        self._largest: int | None = None
        self._ratio: float | None = None
        self._lock = threading.Lock()

    def estimate(self, part: Part) -> int | None:
        """Returns about how many bytes reading a part takes; None before the first has been read."""
        source = self._source_bytes(part[1].tolist())
        with self._lock:
            return self._estimate(source)

    def expected(self) -> int:
        """Returns about how many bytes the largest batch will take."""
        some = range(0, len(self._visited), max(1, len(self._visited) // _SOME))
        sizes = [self._source_bytes([place]) for place in some]
        known = [size for size in sizes if size is not None]
        with self._lock:
            if len(known) < len(sizes):
                return self._estimate(None) or 0
            source = self.examples * max(known)
            # Before the first batch, its size is taken to be that of its source.
            return self._estimate(source) or (1 + self._copies) * source

    def measured(self, part: Part, nbytes: int) -> None:
        """Records how many bytes the batch of a part has."""
        source = self._source_bytes(part[1].tolist())
        with self._lock:
            self._largest = max(self._largest or 0, nbytes)
            if source:
                self._ratio = max(self._ratio or 0.0, nbytes / source)

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
