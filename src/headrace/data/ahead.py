"""Batches read by threads before they are asked for, in order, within a budget of bytes.

parts ──► reserve ──► threads: one batch each ──► in order ──► whoever trains
             ▲                                                     │
             └───────────── bytes given back ◄─────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, TypeVar

from headrace.data.budget import Budget
from headrace.data.reader import Read

__all__ = ["Ahead", "inline"]

Part = TypeVar("Part")

_AHEAD = 2
"""Batches beyond those that the threads read, if nobody says how many: one waits, one is being trained on."""


@dataclass
class _Job(Generic[Part]):
    part: Part
    reserved: int
    future: Future[Read]


class Ahead(Generic[Part]):
    """Args:
    read: reads a part; several threads call it at the same time.
    estimate: about how many bytes a part will take.
    size: bytes of what was read.
    threads: how many read.
    ahead: batches that may wait or be read; None for a few more than there are threads.
    budget: of bytes.

    Attributes:
        waited_s: how long whoever trains has waited for batches.
        depth: batches that were there when one was asked for, summed; over `asked`, the mean.
        asked: how often.
    """

    def __init__(
        self,
        read: Callable[[Part], Read],
        estimate: Callable[[Part], int],
        size: Callable[[Any], int],
        threads: int,
        ahead: int | None,
        budget: Budget,
    ) -> None:
        self.waited_s = 0.0
        self.depth = 0
        self.asked = 0
        self._read = read
        self._estimate = estimate
        self._size = size
        self._threads = threads
        self._most = threads + _AHEAD if ahead is None else max(1, ahead)
        self._budget = budget
        self._jobs: deque[_Job[Part]] = deque()

    def run(self, parts: Iterator[Part]) -> Generator[tuple[Part, Read], None, None]:
        """Yields each part with what was read of it, in order.

        Raises:
            DataError: an example cannot be had.
        """
        waiting: Part | None = None
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="headrace-data")
        held = 0
        try:
            while True:
                waiting = self._fill(pool, parts, waiting)
                if not self._jobs:
                    return
                self.depth += sum(job.future.done() for job in self._jobs)
                self.asked += 1
                job = self._jobs.popleft()
                began = perf_counter()
                read = job.future.result()
                self.waited_s += perf_counter() - began
                held = self._size(read.batch)
                self._budget.correct(job.reserved, held)
                part = job.part
                del job
                yield part, read
                del read
                self._budget.release(held)
        finally:
            for each in self._jobs:
                each.future.cancel()
            pool.shutdown(wait=True)
            self._jobs.clear()

    def _fill(self, pool: ThreadPoolExecutor, parts: Iterator[Part], waiting: Part | None) -> Part | None:
        """Hands out work as long as there is room; returns the part for which there was none."""
        while len(self._jobs) < self._most:
            part = next(parts, None) if waiting is None else waiting
            if part is None:
                return None
            reserved = self._estimate(part)
            if not self._budget.reserve(reserved):
                return part
            waiting = None
            self._jobs.append(_Job(part, reserved, pool.submit(self._read, part)))
        return waiting


def inline(read: Callable[[Part], Read], parts: Iterator[Part]) -> Generator[tuple[Part, Read], None, None]:
    """Yields each part with what was read of it, when it is asked for.

    Raises:
        DataError: an example cannot be had.
    """
    for part in parts:
        yield part, read(part)
