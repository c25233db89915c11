"""Runs that never ran: event files with numbers that can be added up by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from headrace.spec.event import (
    LAUNCHER,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)

Write = Callable[[Path, Iterable[Event]], Path]
MakeRun = Callable[..., Path]


@pytest.fixture
def write_events() -> Write:
    """Writes events into a run directory, each to its process's file."""

    def write(run_dir: Path, events: Iterable[Event]) -> Path:
        (run_dir / "events").mkdir(parents=True, exist_ok=True)
        for event in events:
            name = "launcher" if event.rank == LAUNCHER else f"rank-{event.rank}"
            with (run_dir / "events" / f"{name}.jsonl").open("a") as file:
                file.write(encode(event) + "\n")
        return run_dir

    return write


@pytest.fixture
def make_run(write_events: Write) -> MakeRun:
    """Makes a run of 10 steps, 2 epochs of 5: from 1.0 s on each takes 0.1 s, and 0.02 s more passes in
    the second epoch; an epoch ends with 0.5 s of evaluation.

    Every worker has 8 examples a step, 4 in an epoch's last; the first 5 steps spend 0.04 s a step on exchange, the
    others 0.02 s. Loss of step i on rank r: 10 - i + r.
    """

    def make(
        run_dir: Path, strategy: str = "mirrored", workers: int = 2, status: str = "ok", extra: Iterable[Event] = ()
    ) -> Path:
        versions = {"headrace": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
        began = "2026-10-03T14:05:11+02:00"
        events: list[Event] = [
            RunStarted(LAUNCHER, 0.0, strategy, workers, "cpu", 1, 8 * workers, 36 * workers, began, {}, versions),
            Notice(LAUNCHER, 0.1, "the batch is split"),
        ]
        for rank in range(workers):
            events.append(WorkerStarted(rank, 0.9, "mill", 100 + rank, "cpu", 1))
            for step in range(10):
                end = 1.1 + 0.1 * step if step < 5 else 2.0 + 0.12 * (step - 4)
                examples = 4 if step % 5 == 4 else 8
                exchange, compute = (0.04, 0.05) if step < 5 else (0.02, 0.07)
                loss = 10.0 - step + rank
                events.append(
                    Stepped(
                        rank, end, step, step // 5, examples, loss, float(examples), 0.001, compute, exchange, 0.009
                    )
                )
        for epoch in (1, 2):
            time_s = {1: 2.0, 2: 3.1}[epoch]
            metrics = {"loss": 1.0 / epoch, "accuracy": 0.5 + 0.1 * epoch}
            events.append(Evaluated(0, time_s, 5 * epoch, epoch, 100, metrics, 0.5))
        for rank in range(workers):
            events.append(WorkerEnded(rank, 3.3, 10, 5000, 300_000_000 + rank, 4000, 8000))
        events += extra
        events.append(RunEnded(LAUNCHER, 3.4, status))
        return write_events(run_dir, events)

    return make
