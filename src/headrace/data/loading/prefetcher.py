"""Batches read before they are asked for, in order, within a budget of bytes.

parts ──► reserve ──► readers: one batch each ──► in order ──► whoever trains
             ▲                                                     │
             └───────────── bytes given back ◄─────────────────────┘

A reader is a thread; it reads itself, or waits for a process of its own that does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from headrace.data.loading.reader import ReadResult
from headrace.spec.job import Share
from headrace.trees import map_tensors

Part = TypeVar("Part")

_BEYOND = 2
"""Batches beyond those that are being read, if nobody says how many: one waits, one is being trained on."""


class _Job(Generic[Part]):
    """A batch on its way."""

    def __init__(self, part: Part, read: Callable[[Part], ReadResult], reserved: int) -> None:
        self.part = part
        self.read = read
        self.bytes = reserved
        self.future: Future[ReadResult] = Future()


class Prefetcher(Generic[Part]):
    """Hands out parts to readers, and what they have read to whoever trains.

    Only one thread, which trains, calls its methods. It is to be closed.

    Attributes:
        read: see above; may be changed, for the parts that are handed out from then on.
        readers: how many there are.
        budget: of bytes.
        waited_s: how long whoever trains has waited for batches.
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
        self._jobs: deque[_Job[Part]] = deque()
        self._queue: SimpleQueue[_Job[Part] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._held: deque[int] = deque()

    def set_readers(self, count: int) -> None:
        """Lets so many parts be read at the same time; without readers, whoever takes a part reads it."""
        while self.readers < count:
            # A daemon, for an interpreter that ends in the middle of a loop waits for no batch.
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
            part = self._following()
            if part is None:
                break
            needed = self._estimate(part)
            if not self.budget.reserve(needed):
                self._next = part
                break
            job = _Job(part, self.read, needed or 0)
            self._jobs.append(job)
            self._queue.put(job)

    def settle(self) -> None:
        """Waits until all that was handed out has been read, or has failed."""
        for job in self._jobs:
            job.future.exception()

    def ready(self) -> int:
        """Returns how many batches have been read and wait."""
        return sum(job.future.done() for job in self._jobs)

    def take(self) -> tuple[Part, ReadResult] | None:
        """Returns the next part with what was read of it; None behind the last."""
        # Whoever asks for a batch holds the one before until it has this one.
        while len(self._held) > 1:
            nbytes = self._held.popleft()
            self._freed(nbytes)
            self.budget.release(nbytes)
        if self.readers:
            self.fill()
        began = perf_counter()
        if not self._jobs:
            part = self._following()
            if part is None:
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

    def _following(self) -> Part | None:
        """Returns the next part that has not been handed out; None behind the last."""
        part, self._next = self._next, None
        return next(self._parts, None) if part is None else part

    def close(self) -> None:
        """Ends the readers, after what each of them is reading; what was not taken is lost."""
        for job in self._jobs:
            job.future.cancel()
        self._jobs.clear()
        self.set_readers(0)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._attend(job)
            # Not until the next one comes: it holds a batch.
            del job

    def _attend(self, job: _Job[Part]) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            read = job.read(job.part)
            found = read.nbytes
            self._measured(job.part, found)
        except BaseException as error:  # raised where the batch is taken
            job.future.set_exception(error)
            return
        self.budget.correct(job.bytes, found)
        job.bytes = found
        job.future.set_result(read)


class MemoryBudget:
    """Whoever hands out work reserves, whoever has read corrects, and what nobody holds any more is released.

    Where nothing is being read or waits, a reservation is granted, however large: else a batch that is larger than
    the limit would never come.

    Attributes:
        reserved: bytes.
        most: the largest that `reserved` has been.
    """

    def __init__(self, limit: int) -> None:
        self.reserved = 0
        self.most = 0
        self._limit = limit
        self._open = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int | None) -> bool:
        """Returns whether so many bytes are now reserved, for a batch that is to be read."""
        with self._lock:
            if self._open and (nbytes is None or self.reserved + nbytes > self._limit):
                return False
            self._open += 1
            self._add(nbytes or 0)
            return True

    def correct(self, before: int, after: int) -> None:
        """Says how many bytes a reservation is of, when that is known."""
        with self._lock:
            self._add(after - before)

    def hand_over(self) -> None:
        """Says that a batch has been taken; whoever took it holds its bytes still."""
        with self._lock:
            self._open -= 1

    def release(self, nbytes: int) -> None:
        """Gives back what nobody holds any more."""
        with self._lock:
            self._add(-nbytes)

    def _add(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.most = max(self.most, self.reserved)


def delivered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    """Yields shares whose batches lie on a device, in order.

    Each is pinned, and copied on a stream of its own while the one before is trained on. On any other device than a
    CUDA one they stay where they are.

    Args:
        shares: closed with this.
        device: that of the model.
    """
    if device.type != "cuda":
        return shares
    return _double_buffered(shares, device)


def _double_buffered(shares: Generator[Share, None, None], device: torch.device) -> Generator[Share, None, None]:
    stream = torch.cuda.Stream(device)

    def bring() -> tuple[Share, torch.cuda.Event] | None:
        share = next(shares, None)
        if share is None:
            return None
        with torch.cuda.stream(stream):
            batch = map_tensors(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), share.batch)
            return replace(share, batch=batch), stream.record_event()

    def take_over(tensor: Tensor) -> Tensor:
        # Its memory belongs to the stream that copied; the one that computes may use it longer.
        tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    try:
        upcoming = bring()
        while upcoming is not None:
            share, arrived = upcoming
            upcoming = bring()
            torch.cuda.current_stream(device).wait_event(arrived)
            yield replace(share, batch=map_tensors(take_over, share.batch))
    finally:
        shares.close()
