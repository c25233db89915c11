"""How a worker's parts are read: by itself, by threads, or by processes."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from headrace.data.ahead import Ahead
from headrace.data.choosing import QUICK_S, WAITING, Choice, Chooser, Tuner
from headrace.data.pipeline import Pipeline, visited
from headrace.data.processes import Readers
from headrace.data.reader import Read, Reader
from headrace.data.source import ArraySource, DatasetSource
from headrace.data.steps import Cache, Into, Map

__all__ = ["Means", "Part", "Running"]

Part = tuple[int, Tensor, int]
"""What one worker reads for a round: the epoch, the indices, the length of the global batch."""

_MOST_ARENAS = -8
"""What `mallopt` calls them: pieces of memory that threads take theirs from (malloc.h)."""
_PATIENCE_S = 0.5
"""After so long it is measured again whether a worker that waits had better not read by itself; then twice as long."""


@dataclass(frozen=True)
class Means:
    """What a worker may read with.

    Attributes:
        cores: that are this worker's; None for all that this process may use.
        training: of those, how many it trains on; None for torch's threads.
        say: takes a line for the user.
    """

    cores: int | None = None
    training: int | None = None
    say: Callable[[str], object] = lambda line: None


class Running:
    """Reads parts, one after the other; `parallel` of the pipeline says how, "auto" by measuring once.

    Args:
        pipeline: what.
        reader: reads a batch of it.
        means: what it may read with.

    Attributes:
        parallel: how it reads, "inline", "threads" or "processes".
        ahead: what reads ahead now; None where nothing does.
    """

    def __init__(self, pipeline: Pipeline, reader: Reader, means: Means) -> None:
        self._pipeline = pipeline
        self._reading = pipeline.reading
        self._reader = reader
        self._means = means
        self._cores = max(1, means.cores or len(os.sched_getaffinity(0)))
        self._sizes = _Sizes(pipeline)
        self.parallel = "inline" if self._reads_nothing_ahead() else self._reading.parallel
        self._readers = 0
        self._said = ""
        self._chooser = Chooser()
        self.ahead: Ahead[Part] | None = None

    @property
    def readers(self) -> int:
        """How many threads or processes read now, or this one."""
        return 1 if self.ahead is None else max(1, self.ahead.readers)

    def run(self, parts: Iterator[Part]) -> Generator[tuple[Part, Read], None, None]:
        """Yields each part with what was read of it, in order.

        Raises:
            DataError: an example cannot be had.
        """
        return self.alone(parts) if self.parallel == "inline" else self._run_ahead(parts)

    def alone(self, parts: Iterator[Part]) -> Generator[tuple[Part, Read], None, None]:
        """Yields each part with what was read of it, when it is asked for.

        Raises:
            DataError: an example cannot be had.
        """
        for part in parts:
            yield part, self.read(part)

    def read(self, part: Part) -> Read:
        """Reads a part.

        Raises:
            DataError: an example cannot be had.
        """
        return self._reader.read(part[0], part[1])

    def _run_ahead(self, parts: Iterator[Part]) -> Generator[tuple[Part, Read], None, None]:
        reading = self._reading
        ahead = Ahead(parts, self.read, self._sizes.estimate, self._sizes.measured, reading.ahead, reading.memory_limit)
        processes: list[Readers] = []
        self.ahead = ahead
        _take_memory_from_one_place()
        patience = _PATIENCE_S
        try:
            if self.parallel == "processes":
                ahead.read = self._start(processes)
            ended = False
            while not ended:
                if self.parallel == "auto":
                    self._choose(ahead, processes)
                if self.parallel == "inline":
                    ended = yield from self._read_inline(ahead, patience)
                else:
                    ended = yield from self._take(ahead, patience)
                self.parallel = self.parallel if ended else "auto"
                patience *= 2
        finally:
            self.ahead = None
            # The threads may be waiting for them.
            for each in processes:
                each.end()
            ahead.close()
            _close(processes)

    def _take(self, ahead: Ahead[Part], patience: float) -> Generator[tuple[Part, Read], None, bool]:
        """Yields what is read ahead; returns whether that was all.

        Args:
            ahead: has the parts.
            patience: seconds after which it is measured again who had better read, if training waits.
        """
        count = self._reading.count
        self._readers = self._readers or count or self._free()
        tuner = Tuner(self._readers, count or self._cores, ahead.waiting())
        ahead.set_readers(self._readers)
        began, waited_s = perf_counter(), ahead.waited_s
        while (found := ahead.take()) is not None:
            yield found
            # It must not be kept until the next one is there.
            del found
            now = perf_counter()
            self._readers = tuner.look(now, ahead.waited_s)
            ahead.set_readers(self._readers)
            if self._reading.parallel == "auto" and now - began > patience:
                if ahead.waited_s - waited_s > WAITING * (now - began):
                    return False
                began, waited_s = now, ahead.waited_s
        return True

    def _read_inline(self, ahead: Ahead[Part], patience: float) -> Generator[tuple[Part, Read], None, bool]:
        """Yields what was read to measure, then reads when asked; returns whether that was all.

        Args:
            ahead: has the parts.
            patience: seconds after which it is measured again, if training waits.
        """
        ahead.set_readers(0)
        while (found := ahead.take(fill=False)) is not None:
            yield found
            del found
        began, reading_s, batches = perf_counter(), 0.0, 0
        while (part := ahead.next()) is not None:
            asked = perf_counter()
            read = self.read(part)
            reading_s, batches = reading_s + perf_counter() - asked, batches + 1
            yield part, read
            del read
            passed = perf_counter() - began
            if passed > patience:
                if reading_s > WAITING * passed and reading_s > QUICK_S * batches:
                    return False
                began, reading_s, batches = perf_counter(), 0.0, 0
        return True

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
        training = self._means.training
        return max(1, self._cores - (torch.get_num_threads() if training is None else training))

    def _choose(self, ahead: Ahead[Part], processes: list[Readers]) -> None:
        # A process ends with the thread that started it; where workers are threads, none starts processes unasked.
        may_fork = self._cores > 1 and threading.current_thread() is threading.main_thread()
        # What a process keeps in its own memory, no other one finds there.
        may_fork &= not any(isinstance(step, Cache) and not step.folder for step in self._pipeline.steps)
        # Each would have a cache of its own, and the next epoch's examples would mostly be in another's.
        may_fork &= not any(isinstance(step, Cache) and step.folder is None for step in self._pipeline.steps)
        # What was handed out before is read by whoever reads now.
        ahead.settle()
        ahead.read = self.read
        choice = self._chooser.choose(ahead, functools.partial(self._start, processes) if may_fork else None)
        if choice.parallel != "processes":
            _close(processes)
        self.parallel = choice.parallel
        self._readers = self._readers or self._free()
        if choice.parallel != self._said:
            self._said = choice.parallel
            self._means.say(self._sentence(choice))

    def _sentence(self, choice: Choice) -> str:
        if choice.parallel == "inline":
            return f"data: the worker reads by itself: {choice.why}"
        one = {"threads": "1 thread reads", "processes": "1 process reads"}[choice.parallel]
        some = one if self._readers == 1 else f"{self._readers} {choice.parallel} read"
        return f"data: {some} ahead (at most {self._cores}): {choice.why}"

    def _start(self, processes: list[Readers]) -> Callable[[Part], Read]:
        # All that there may be, at once: the sooner this process is forked, the less of it is copied.
        count = self._reading.count or max(2, self._cores)
        readers = processes[0] if processes else Readers(self._reader.read, count)
        processes[:] = [readers]
        return lambda part: readers.read(part[0], part[1])


@functools.cache
def _take_memory_from_one_place() -> None:
    """Lets new threads take memory from where all do.

    Else each keeps for itself what its largest batch took, and the process has more than the batches that are there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Not every C library has it.
    if mallopt is not None:
        mallopt(_MOST_ARENAS, 1)


def _close(processes: list[Readers]) -> None:
    for each in processes:
        each.close()
    processes.clear()


class _Sizes:
    """What batches take while they are read, in bytes, judged by those that have been read.

    Several threads may call it at the same time.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._source = pipeline.source
        self._visited = visited(pipeline)
        last = pipeline.steps[-1] if pipeline.steps else None
        written_in_place = isinstance(last, Map) and isinstance(last.function, Into)
        # Else its examples are there, too, when they are put together.
        self._copies = 1 if written_in_place or not pipeline.steps else 2
        self._largest: int | None = None
        self._ratio: float | None = None
        self._lock = threading.Lock()

    def estimate(self, part: Part) -> int | None:
        """Returns about how many bytes it takes to read a part; None before the first has been read."""
        source = self._source_bytes(part)
        with self._lock:
            if source is not None and self._ratio is not None:
                return source + int(self._copies * self._ratio * source)
            return None if self._largest is None else self._copies * self._largest

    def measured(self, part: Part, found: int) -> None:
        """Takes up how many bytes the batch of a part has."""
        source = self._source_bytes(part)
        with self._lock:
            self._largest = max(self._largest or 0, found)
            if source:
                self._ratio = max(self._ratio or 0.0, found / source)

    def _source_bytes(self, part: Part) -> int | None:
        total = 0
        for place in part[1].tolist():
            size = self._source.nbytes(self._visited[place % len(self._visited)])
            if size is None:
                return None
            total += size
        return total
