"""A real training while its processes are killed and frozen, beside the same undisturbed. See README.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import headrace as hr
from headrace.spec.event import Event, Lost, ServerStarted, Stepped, WorkerEnded, WorkerStarted

ROOT = Path(__file__).parents[2]
WORKERS, SERVERS = 4, 2
STRATEGY = hr.ParameterServer(WORKERS, servers=SERVERS, backups=1)
TIMEOUT_S = 3.0


class Storm:
    """Strikes a process every so often, from the moment that all have begun.

    A server whose other half has not been there for a while is spared: with one backup, two at once are too many.
    """

    def __init__(self, every_s: float, seed: int) -> None:
        self.struck: list[tuple[float, int, str]] = []
        self._every_s = every_s
        self._chance = random.Random(seed)
        self._processes: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rage, daemon=True)

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted | ServerStarted):
            self._processes[event.rank] = (event.pid, time.monotonic())
            if len(self._processes) == WORKERS + 2 * SERVERS and not self._thread.is_alive() and self._every_s:
                self._thread.start()
        elif isinstance(event, WorkerEnded):
            self._over.set()

    def _rage(self) -> None:
        while not self._over.wait(self._every_s):
            ranks = [rank for rank in list(self._processes) if self._may_strike(rank)]
            rank = self._chance.choice(ranks)
            how = self._chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            pid, _ = self._processes.pop(rank)
            self.struck.append((time.monotonic(), rank, how.name))
            os.kill(pid, how)

    def _may_strike(self, rank: int) -> bool:
        if rank < WORKERS:
            return True
        other = rank + SERVERS if rank < WORKERS + SERVERS else rank - SERVERS
        pair = [self._processes.get(each) for each in (rank, other)]
        return all(process is not None and time.monotonic() - process[1] > 2.0 for process in pair)


def train(make: Callable[..., hr.Job], epochs: int, every_s: float, seed: int) -> dict[str, float]:
    """Trains through a storm, or none (0); returns figures."""
    storm = Storm(every_s, seed)
    job = dataclasses.replace(make(epochs=epochs), seed=seed)
    run = hr.fit(job, STRATEGY, on_event=storm, timeout_s=TIMEOUT_S)
    steps = [event.time_s for event in run.events if isinstance(event, Stepped)]
    began, ended = min(steps), max(steps)
    examples = epochs * 60_000
    lost = [event for event in run.events if isinstance(event, Lost) and event.lost < WORKERS]
    return {
        "seconds": ended - began,
        "examples_per_live_worker_s": examples / _live_s(run.events, began, ended),
        "accuracy": 100 * run.metrics["accuracy"],
        "faults": len(storm.struck),
        "workers_lost": len(lost),
    }


def _live_s(events: tuple[Event, ...], began: float, ended: float) -> float:
    """Worker-seconds in which a process was in its place: from its begin until it is told to be lost."""
    total = 0.0
    for rank in range(WORKERS):
        starts = [event.time_s for event in events if isinstance(event, WorkerStarted) and event.rank == rank]
        ends = [event.time_s for event in events if isinstance(event, Lost) and event.lost == rank]
        for start in starts:
            end = min((time_s for time_s in ends if time_s > start), default=ended)
            total += max(0.0, min(end, ended) - max(start, began))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-s", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calm-every", type=int, default=1, help="rounds to one undisturbed run before them")
    arguments = parser.parse_args()
    make = runpy.run_path(str(ROOT / "examples" / "fashion_mnist" / "job.py"))["job"]
    rows = []
    calm: dict[str, float] = {}
    for seed in range(arguments.rounds):
        if seed % arguments.calm_every == 0:
            calm = train(make, arguments.epochs, 0.0, seed)
        storm = train(make, arguments.epochs, arguments.every_s, seed)
        rate = storm["examples_per_live_worker_s"] / calm["examples_per_live_worker_s"]
        rows.append({"calm": calm, "storm": storm, "kept": rate})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    name = f"kill-storm-{arguments.every_s:g}s.json"
    (results / name).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
