"""Runs that never ran: event files with numbers that can be added up by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    ServerEnded,
    ServerStarted,
    ServerStats,
    ShardStats,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)

Write = Callable[[Path, Iterable[Event]], Path]
MakeRun = Callable[..., Path]


def append(run_dir: Path, events: Iterable[Event]) -> Path:
    """Appends events in a run directory, each to its process's file."""
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    for event in events:
        name = "launcher" if event.rank == LAUNCHER else f"rank-{event.rank}"
        with (run_dir / "events" / f"{name}.jsonl").open("a") as file:
            file.write(encode(event) + "\n")
    return run_dir


@pytest.fixture
def write_events() -> Write:
    return append


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


@pytest.fixture
def make_served_run(write_events: Write) -> MakeRun:
    """Makes a run of workers that go at their own speed, and servers behind them.

    A step of worker w takes 0.1 * (w + 1) s from 1.0 s on: half of it compute, the rest exchange; worker 0 makes 60
    steps in the 6 s that the run lasts. The next portion is of the first round that has one left, so that workers
    miss rounds. Server s (of rank `workers + s`) has two shards, "weight" of 4000 * (s + 1) bytes and "bias" of 40, and
    speaks every second: until second t it has been busy for t / 4. Of each worker's updates (60 on each shard until the
    end, in even shares) two in three are as stale as there are other workers, one in three twice that.
    """

    def make(
        run_dir: Path,
        workers: int = 2,
        servers: int = 1,
        strategy: str = "parameter_server",
        extra: Iterable[Event] = (),
        status: str = "ok",
    ) -> Path:
        versions = {"headrace": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
        began = "2026-10-03T14:05:11+02:00"
        events: list[Event] = [
            RunStarted(LAUNCHER, 0.0, strategy, workers, "cpu", 1, 8 * workers, 800, began, {}, versions),
            *(WorkerStarted(rank, 0.9, "mill", 100 + rank, "cpu", 1) for rank in range(workers)),
            *portions(workers),
        ]
        for server in range(servers):
            rank = workers + server
            events.append(ServerStarted(rank, 0.8, "weir", 200 + rank, 2, 4000 * (server + 1) + 40))
            events += [served(rank, 1.0 + second, workers, server) for second in range(1, 7)]
            events.append(ServerEnded(rank, 7.2, 1000, 100_000_000 + rank, 4000 * (server + 1) + 40, 500))
        events += [WorkerEnded(rank, 7.1, 10, 6000, 90_000_000, 4040, 0) for rank in range(workers)]
        return write_events(run_dir, [*events, *extra, RunEnded(LAUNCHER, 7.4, status)])

    return make


def portions(workers: int, until_s: float = 6.0) -> list[Event]:
    """Steps of workers that take portions as they are ready; each round has one for each worker."""
    events: list[Event] = []
    done = dict.fromkeys(range(workers), 0)
    given = 0
    while done:
        rank = min(done, key=lambda rank: (done[rank] * (rank + 1), rank))
        seconds = 0.1 * (rank + 1)
        end = (done[rank] + 1) * seconds
        if end > until_s + 1e-9:
            del done[rank]
            continue
        step = given // workers
        events.append(
            Stepped(rank, 1.0 + end, step, 0, 8, 3.0 / (1 + step), 8.0, 0.0, seconds / 2, seconds / 2, 0.0, step)
        )
        done[rank] += 1
        given += 1
    return events


def served(rank: int, time_s: float, workers: int, server: int = 0) -> ServerStats:
    """What a server says at a time between 1 and 7 s; see `make_served_run`."""
    part = (time_s - 1.0) / 6.0
    others, each = workers - 1, round(60 * part)
    once, twice = 2 * (each - each // 3), 2 * (each // 3)
    counts = {str(others): once, str(2 * others): twice} if others else {"0": once + twice}
    pushes = each * workers
    return ServerStats(
        rank,
        time_s,
        busy_s=(time_s - 1.0) / 4,
        queue_mean=1.5,
        queue_longest=workers,
        staleness={str(worker): counts for worker in range(workers)},
        waited_s={str(worker): 0.3 * part * (server + 1) for worker in range(workers)},
        refused={"late": 2, "not_finite": 1} if part >= 1 else {},
        shards=tuple(
            ShardStats(name, size, pushes, pushes, pushes, 1e-7 * size * pushes, size * pushes, size * pushes)
            for name, size in (("weight", 4000 * (server + 1)), ("bias", 40))
        ),
    )
