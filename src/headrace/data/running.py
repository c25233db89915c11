"""How a worker's parts are read: by itself, by threads, or by processes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from headrace.data.ahead import Ahead
from headrace.data.choosing import Choice, Tuner, choose
from headrace.data.pipeline import Pipeline, visited
from headrace.data.processes import Readers
from headrace.data.reader import Read, Reader
from headrace.data.source import ArraySource
from headrace.data.steps import Into, Map

__all__ = ["Means", "Part", "Running"]

Part = tuple[int, Tensor, int]
"""What one worker reads for a round: the epoch, the indices, the length of the global batch."""


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
        self.ahead: Ahead[Part] | None = None

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
        start = functools.partial(self._start, processes)
        try:
            if self.parallel == "auto":
                self._choose(ahead, start)
            elif self.parallel == "processes":
                ahead.read = start()
            if self.parallel != "processes":
                _end(processes)
            self._readers = self._readers or reading.count or self._free()
            tuner = Tuner(self._readers, reading.count or self._cores, ahead.waiting())
            ahead.set_readers(0 if self.parallel == "inline" else self._readers)
            self.ahead = ahead
            while (found := ahead.take(fill=self.parallel != "inline")) is not None:
                yield found
                # What the consumer has done with must not be kept until the next one is there.
                del found
                if self.parallel != "inline":
                    self._readers = tuner.look(perf_counter(), ahead.waited_s)
                    ahead.set_readers(self._readers)
            if self.parallel == "inline":
                yield from self.alone(ahead.rest())
        finally:
            self.ahead = None
            for each in processes:
                each.end()
            ahead.close()
            _end(processes)

    def _reads_nothing_ahead(self) -> bool:
        # Of arrays in memory a batch is one look at them.
        in_memory = isinstance(self._pipeline.source, ArraySource) and not self._pipeline.steps
        return self._reading.ahead == 0 or (self._reading.parallel == "auto" and in_memory)

    def _free(self) -> int:
        """Returns the cores that training leaves, at least one."""
        training = self._means.training
        return max(1, self._cores - (torch.get_num_threads() if training is None else training))

    def _choose(self, ahead: Ahead[Part], start: Callable[[], Callable[[Part], Read]]) -> None:
        # A process ends with the thread that started it; where workers are threads, none starts processes unasked.
        may_fork = self._cores > 1 and threading.current_thread() is threading.main_thread()
        choice = choose(ahead, start if may_fork else None)
        self.parallel = choice.parallel
        self._readers = self._free()
        self._means.say(self._sentence(choice))

    def _sentence(self, choice: Choice) -> str:
        if choice.parallel == "inline":
            return f"data: the worker reads by itself: {choice.why}"
        one = {"threads": "1 thread reads", "processes": "1 process reads"}[choice.parallel]
        some = one if self._readers == 1 else f"{self._readers} {choice.parallel} read"
        return f"data: {some} ahead (at most {self._cores}): {choice.why}"

    def _start(self, processes: list[Readers]) -> Callable[[Part], Read]:
        # All that there may be, at once: later, when training has begun, this process must not be forked.
        count = self._reading.count or max(2, self._cores)
        readers = Readers(self._reader.read, count)
        processes.append(readers)
        return lambda part: readers.read(part[0], part[1])


def _end(processes: list[Readers]) -> None:
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
