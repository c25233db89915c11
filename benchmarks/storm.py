"""Kills and freezes processes of a run, one every so often."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Sequence

import headrace as hr
from headrace.spec.events import Event, Lost, RunStarted, ServerStarted, Stepped, WorkerEnded, WorkerStarted

RECOVERED_S = 7.0
"""After a fault everything goes on as before: a frozen process is noticed after 3 s, and replaced in one or two."""


class Storm:
    """Strikes a process every so often, from the moment that all have begun.

    A server whose other half has not been there for a while is spared: with one backup, two at once are too many.

    Args:
        strategy: with one backup for each server, or workers in lockstep of which others take the place.
        every_s: seconds between two strikes; 0 for none.
        seed: who is struck, and how.

    Attributes:
        struck: when by the run's clock, which rank, by which signal.
    """

    def __init__(self, strategy: hr.ParameterServer | hr.Mirrored, every_s: float, seed: int) -> None:
        self.struck: list[tuple[float, int, str]] = []
        assert strategy.workers is not None
        self._workers = strategy.workers
        self._servers = strategy.servers if isinstance(strategy, hr.ParameterServer) else 0
        self._every_s = every_s
        self._chance = random.Random(seed)
        self._processes: dict[int, tuple[int, float]] = {}
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rage, daemon=True)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._began = time.monotonic() - event.time_s
        elif isinstance(event, WorkerStarted | ServerStarted):
            self._processes[event.rank] = (event.pid, time.monotonic())
            complete = len(self._processes) == self._workers + 2 * self._servers
            if complete and not self._thread.is_alive() and self._every_s:
                self._thread.start()
        elif isinstance(event, WorkerEnded):
            self._over.set()

    def _rage(self) -> None:
        while not self._over.wait(self._every_s):
            ranks = [rank for rank in list(self._processes) if self._may_strike(rank)]
            rank = self._chance.choice(ranks)
            how = self._chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            pid, _ = self._processes.pop(rank)
            self.struck.append((time.monotonic() - self._began, rank, how.name))
            os.kill(pid, how)

    def _may_strike(self, rank: int) -> bool:
        if rank < self._workers:
            return True
        other = rank + self._servers if rank < self._workers + self._servers else rank - self._servers
        pair = [self._processes.get(each) for each in (rank, other)]
        return all(process is not None and time.monotonic() - process[1] > 2.0 for process in pair)


def live_seconds(events: Sequence[Event], workers: int, began: float, ended: float) -> float:
    """Worker-seconds in which a process was in its place: from its begin until it is told to be lost."""
    total = 0.0
    for rank in range(workers):
        starts = [event.time_s for event in events if isinstance(event, WorkerStarted) and event.rank == rank]
        ends = [event.time_s for event in events if isinstance(event, Lost) and event.lost == rank]
        for start in starts:
            end = min((time_s for time_s in ends if time_s > start), default=ended)
            total += max(0.0, min(end, ended) - max(start, began))
    return total


def kept_within(events: Sequence[Event], struck: Sequence[float], workers: int) -> float:
    """Examples of a live worker in a second, over the same in the moments of this run that no fault disturbs.

    Another run beside it would be as calm, but these machines drift by a third from minute to minute.
    """
    steps = [(event.time_s, event.examples) for event in events if isinstance(event, Stepped)]
    began, ended = min(steps)[0], max(steps)[0]
    edges = [began, *(each for each in struck if each < ended), ended]
    # Before the first fault, and after each when it is over.
    calm = [(a + RECOVERED_S * bool(index), b) for index, (a, b) in enumerate(itertools.pairwise(edges))]

    def rate(windows: Sequence[tuple[float, float]]) -> float:
        done = sum(count for at, count in steps if any(a < at <= b for a, b in windows))
        return done / sum(live_seconds(events, workers, a, b) for a, b in windows)

    return rate([(began, ended)]) / rate([(a, b) for a, b in calm if b > a])
