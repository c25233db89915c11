"""Rows that are moved between servers: how even the loads are, and what moves lose, double and delay under kills."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import machine

import headrace as hr
from headrace.spec.events import Event, RowsMoved, ServerStats, WorkerStarted

ROWS = 100_000


class Sums(nn.Module):
    """A row's gradient is how often the batch has it, so that rows count their pushes exactly, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 16, sparse=True, dtype=torch.float64)
        nn.init.zeros_(self.item.weight)
        self.biases = nn.ParameterList(torch.zeros(1, dtype=torch.float64) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.item(ids).sum((1, 2)) + sum(self.biases)
        return output


def zipf(examples: int, each: int, drifts: int = 1) -> Tensor:
    """Returns `(examples, each)` ids like Zipf(1.1), the hottest first; every so often other rows are hot."""
    chance = torch.Generator().manual_seed(0)
    shares = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -1.1
    ids = torch.multinomial(shares, examples * each, replacement=True, generator=chance).view(examples, each)
    shift = torch.arange(examples) * drifts // examples * 7_919
    return (ids + shift[:, None]) % ROWS


def job(ids: Tensor, workers: int, epochs: int = 1) -> hr.Job:
    batch = 4 * workers
    return hr.Job(
        model=Sums,
        # Each occurrence of a row takes 1 from it.
        optimizer=functools.partial(torch.optim.SGD, lr=float(batch)),
        data=hr.data.from_arrays(ids, torch.zeros(len(ids), dtype=torch.float64)),
        loss=lambda output, target: (output - target).mean(),
        global_batch_size=batch,
        epochs=epochs,
    )


def unevenness(workers: int, servers: int, placement: str, rounds: int) -> float:
    """Returns the rows that the busiest server sent in the second half of a run, against the mean."""
    strategy = hr.ParameterServer(workers, servers=servers, row_placement=placement)
    run = hr.fit(job(zipf(4 * workers * rounds, 16), workers), strategy, check=False)
    sent: dict[int, list[tuple[float, int]]] = {}
    for event in run.events:
        if isinstance(event, ServerStats):
            sent.setdefault(event.rank, []).append((event.time_s, event.shards[-1].pulled_bytes))
    half = statistics.median(time_s for own in sent.values() for time_s, _ in own)
    loads = [own[-1][1] - max(nbytes for time_s, nbytes in own if time_s <= half) for own in sent.values()]
    return max(loads) / statistics.mean(loads)


class Kills:
    """Kills a worker now and then by `kill -9`, which the run replaces; raises TimeoutError after `until`."""

    def __init__(self, every_s: float, until: float, seed: int) -> None:
        self.killed = 0
        self._every_s, self._until, self._chance = every_s, until, random.Random(seed)
        self._pids: dict[int, int] = {}
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __call__(self, event: Event) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError("the time that the run may take is over")
        if isinstance(event, WorkerStarted):
            self._pids[event.rank] = event.pid
            if not self._thread.is_alive() and self._every_s:
                self._thread.start()

    def _kill(self) -> None:
        while not self.over.wait(self._every_s):
            rank = self._chance.choice(list(self._pids))
            os.kill(self._pids.pop(rank), signal.SIGKILL)
            self.killed += 1
            while len(self._pids) < 2 and not self.over.wait(0.1):
                pass


@dataclass
class Counted:
    """What some runs had together; `pauses` in seconds, one for each move."""

    runs: int = 0
    pushes: int = 0
    kills: int = 0
    rows: int = 0
    lost: float = 0.0
    doubled: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def found(self) -> dict[str, float]:
        """Returns the figures by name."""
        pauses = sorted(self.pauses)
        return {
            "runs": self.runs,
            "pushes": self.pushes,
            "moves": len(pauses),
            "rows moved": self.rows,
            "kills": self.kills,
            "updates of rows lost": self.lost,
            "updates of rows doubled": self.doubled,
            "pause, median ms": 1e3 * statistics.median(pauses),
            "pause, 99th percentile ms": 1e3 * pauses[-(-len(pauses) * 99 // 100) - 1],
            "pause, longest ms": 1e3 * pauses[-1],
        }


def one_run(counted: Counted, options: argparse.Namespace, until: float) -> None:
    """Trains while rows move and workers die; adds what every row has counted, against what it should have."""
    workers, rounds = options.workers, options.rounds
    ids = zipf(4 * workers * rounds, 16, drifts=max(1, rounds // options.drift))
    kills = Kills(options.kill_every, until, seed=counted.runs)
    strategy = hr.ParameterServer(
        workers, servers=options.servers, backups=options.backups, row_placement="range:rebalance"
    )
    try:
        run = hr.fit(job(ids, workers), strategy, check=False, on_event=kills)
    finally:
        kills.over.set()
    sums = -run.model.item.weight.detach()[:, 0]
    expected = torch.bincount(ids.view(-1), minlength=ROWS).double()
    moves = [event for event in run.events if isinstance(event, RowsMoved)]
    counted.runs += 1
    counted.pushes += workers * rounds
    counted.kills += kills.killed
    counted.rows += sum(event.rows for event in moves)
    counted.lost += float((expected - sums).clamp(min=0).sum())
    counted.doubled += float((sums - expected).clamp(min=0).sum())
    counted.pauses += [event.pause_s for event in moves]


def moves_under_kills(options: argparse.Namespace) -> dict[str, float]:
    """Repeats runs until there were so many moves; raises TimeoutError if that takes too long."""
    counted, until = Counted(), time.monotonic() + options.limit
    while not counted.pauses or len(counted.pauses) < options.moves:
        try:
            one_run(counted, options, until)
        except TimeoutError as error:
            raise TimeoutError(
                f"{len(counted.pauses)} of {options.moves} moves in {counted.runs} whole runs of {options.rounds} "
                f"rounds within {options.limit:g} s; give it more time by --limit"
            ) from error
        print(f"{counted.runs} runs, {len(counted.pauses)} moves, {counted.kills} kills", file=sys.stderr, flush=True)
    return counted.found()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("loads", "moves"))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1_500)
    parser.add_argument("--kill-every", type=float, default=3.0, help="seconds; 0 for no kills")
    parser.add_argument(
        "--moves", type=int, default=0, help="runs of so many rounds are repeated until there were these"
    )
    parser.add_argument("--drift", type=int, default=64, help="rounds after which other rows are hot")
    parser.add_argument("--backups", type=int, default=0, help="of each server")
    parser.add_argument("--limit", type=float, default=3_600.0, help="seconds for all moves; more is an error")
    options = parser.parse_args()
    found: dict[str, float]
    if options.what == "loads":
        found = {
            placement: unevenness(options.workers, options.servers, placement, options.rounds)
            for placement in ("hash", "range", "hash:rebalance", "range:rebalance")
        }
    else:
        found = moves_under_kills(options)
    for name, value in found.items():
        print(f"{name:32}{value:>12.6g}")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / f"{options.what}.json").write_text(
        json.dumps({**machine(), "options": vars(options), "found": found}, indent=1) + "\n"
    )
    if found.get("updates of rows lost") or found.get("updates of rows doubled"):
        sys.exit("updates of rows were lost or doubled")


if __name__ == "__main__":
    main()
