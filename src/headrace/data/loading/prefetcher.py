"""Reads batches ahead of training: in order, and within a budget of bytes.

parts ──► reserve ──► readers: one batch each ──► in order ──► training
             ▲                                                    │
             └───────────── bytes released ◄──────────────────────┘

A reader is a thread that reads itself, or waits for its reading process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter

from headrace.data.loading.reader import Part, ReadResult

_BEYOND = 2
"""Batches besides those that are being read, by default: one waits, one is being trained on."""


@dataclass(eq=False)
class _Job:
    """A part to read, the function that reads it, and the bytes reserved for it."""

    part: Part
    read: Callable[[Part], ReadResult]
    bytes: int
    future: Future[ReadResult] = field(default_factory=Future)


class Prefetcher:
    """Hands out parts to reader threads, and their batches to training, in order.

    Only the training thread calls its methods, and closes it at the end. Reader threads call `read`, `estimate` (bytes
    that reading a part takes; None if unknown) and `measured` (with the bytes it took); `freed` gets the bytes of
    each batch that is no longer used. At most `most` batches are read or wait, by default 2 more than readers.

    `read` may be replaced for the parts that are handed out from then on. `waited_s` is how long training has waited.
    """

    def __init__(
        self,
        parts: Iterator[Part],
        read: Callable[[Part], ReadResult],
        estimate: Callable[[Part], int | None],
        measured: Callable[[Part, int], None],
        freed: Callable[[int], None],
        most: int | None,
        memory_limit: int,
    ) -> None:
        self.read = read
        self.readers = 0
        self.budget = MemoryBudget(memory_limit)
        self.waited_s = 0.0
        self._parts = parts
        self._estimate = estimate
        self._measured = measured
        self._freed = freed
        self._most = most
        self._next: Part | None = None
        self._jobs: deque[_Job] = deque()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._held: deque[int] = deque()

    def set_readers(self, count: int) -> None:
        """Changes the number of readers; without any, `take` reads the part itself."""
        while self.readers < count:
            # A daemon: an interpreter that exits in the middle of a loop must not wait for a batch.
            thread = threading.Thread(target=self._work, name="headrace-data", daemon=True)
            self._threads.append(thread)
            thread.start()
            self.readers += 1
        while self.readers > count:
            self._queue.put(None)
            self.readers -= 1

    def fill(self) -> None:
        """Hands out parts as long as there is room."""
        most = self.readers + _BEYOND if self._most is None else max(1, self._most)
        while len(self._jobs) < most:
            if (part := self._next_part()) is None:
                break
            needed = self._estimate(part)
            if not self.budget.reserve(needed):
                self._next = part
                break
            job = _Job(part, self.read, needed or 0)
            self._jobs.append(job)
            self._queue.put(job)

    def settle(self) -> None:
        """Waits until all parts that were handed out have been read or have failed."""
        wait([job.future for job in self._jobs])

    def ready(self) -> int:
        """Returns the number of batches that wait to be taken."""
        return sum(job.future.done() for job in self._jobs)

    def take(self) -> tuple[Part, ReadResult] | None:
        """Returns the next part with its batch; None after the last."""
        # Training holds the batch before until it has this one.
        while len(self._held) > 1:
            nbytes = self._held.popleft()
            self._freed(nbytes)
            self.budget.add(-nbytes)
        if self.readers:
            self.fill()
        began = perf_counter()
        if not self._jobs:
            if (part := self._next_part()) is None:
                return None
            read = self.read(part)
            self._measured(part, read.nbytes)
            self.waited_s += perf_counter() - began
            return part, read
        job = self._jobs.popleft()
        read = job.future.result()
        self.waited_s += perf_counter() - began
        self.budget.hand_over()
        self._held.append(job.bytes)
        return job.part, read

    def _next_part(self) -> Part | None:
        """Returns the next part that has not been handed out; None after the last."""
        part, self._next = self._next, None
        return next(self._parts, None) if part is None else part

    def close(self) -> None:
        """Ends the readers after the parts that they are reading; drops batches that were not taken."""
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()
        self.set_readers(0)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    read = job.read(job.part)
                    nbytes = read.nbytes
                    self._measured(job.part, nbytes)
                except BaseException as error:  # raised by `take`
                    job.future.set_exception(error)
                else:
                    self.budget.add(nbytes - job.bytes)
                    job.bytes = nbytes
                    job.future.set_result(read)
                    # Else it would hold its batch until the next part comes.
                    del read
            del job


class MemoryBudget:
    """Bytes reserved for batches that are read, wait or are trained on; for any number of threads.

    If no batch is being read or waits, any reservation is granted: else a batch larger than the limit would never come.
    `reserved` is the sum now, `most` its maximum.
    """

    def __init__(self, limit: int) -> None:
        self.reserved = 0
        self.most = 0
        self._limit = limit
        self._open = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int | None) -> bool:
        """Reserves bytes for a batch and returns True, if they fit; a batch of unknown size (None) is read alone."""
        with self._lock:
            if self._open and (nbytes is None or self.reserved + nbytes > self._limit):
                return False
            self._open += 1
            self._add(nbytes or 0)
            return True

    def add(self, nbytes: int) -> None:
        """Reserves more bytes, or releases some: where a batch has another size than was estimated, or is not used."""
        with self._lock:
            self._add(nbytes)

    def hand_over(self) -> None:
        """Counts a batch as taken by training, which still holds its bytes."""
        with self._lock:
            self._open -= 1

    def _add(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most = max(self.most, self.reserved)
