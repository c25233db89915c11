"""Workers in lockstep that are killed, frozen and replaced while the others go on. See README.md."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Event, Lost, Notice, RunStarted, Stepped, WorkerStarted

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio
from on_hosts import hosts, run
from one_rank import HIDDEN
from workloads import EXAMPLES_A_WORKER, MODELS, examples, throughput

from storm import Storm, kept_within, live_seconds

WORKERS, STORM_WORKERS = 3, 4
EXAMPLES = 4096
TIMEOUT_S = 3.0
SETTLED_S = 3.0
"""Between the first contribution of a replacement and the next kill."""

TORCHRUN_NOTICES_S = 1.5
"""A step that comes earlier after a kill is of the workers that are still to be ended; none begins anew so soon."""

AWAIT_S = 120.0

Figures = dict[str, float]


def cnn_job(workers: int) -> hr.Job:
    """Returns a job of many rounds with 64 examples a worker."""
    make, _ = MODELS["cnn"]
    return hr.Job(
        model=make,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples("cnn", EXAMPLES)),
        global_batch_size=EXAMPLES_A_WORKER * workers,
        epochs=1_000_000,
    )


class Killer:
    """Kills workers one after the other, each when the replacement of the one before has contributed for a while."""

    def __init__(self, kills: int) -> None:
        self.killed: list[tuple[float, int]] = []
        self._kills = kills
        self._pids: dict[int, int] = {}
        self._clock = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._clock = event.clock_s
        elif isinstance(event, WorkerStarted):
            self._pids[event.rank] = event.pid
            if len(self._pids) == WORKERS:
                threading.Timer(SETTLED_S, self._kill).start()

    def _kill(self) -> None:
        if len(self.killed) == self._kills:
            os.kill(os.getpid(), signal.SIGINT)
            return
        rank = len(self.killed) % WORKERS
        self.killed.append((time.monotonic() - self._clock, rank))
        os.kill(self._pids.pop(rank), signal.SIGKILL)


def kills(count: int) -> Figures:
    """Returns how long the others stood still after a kill, and how long a replacement took."""
    killer = Killer(count)
    strategy = hr.Mirrored(WORKERS, min_workers=1, max_workers=WORKERS)
    run = hr.fit(cnn_job(WORKERS), strategy, on_event=killer)
    steps = sorted((event.time_s, event.rank, event.step) for event in run.events if isinstance(event, Stepped))
    changes = [event.time_s for event in run.events if isinstance(event, Notice) and "begins with" in event.text]
    lost = [event for event in run.events if isinstance(event, Lost)]
    stood, joined, delays = [], [], []
    for (killed, rank), loss in zip(killer.killed, lost, strict=True):
        gone_on = min(time_s for time_s in changes if time_s > killed)
        stood.append(min(time_s for time_s, own, _ in steps if time_s > gone_on and own != rank) - killed)
        first, joining = min((time_s, step) for time_s, own, step in steps if time_s > gone_on and own == rank)
        joined.append(first - loss.time_s)
        other = {step: time_s for time_s, own, step in steps if own == (rank + 1) % WORKERS}
        usual = statistics.median(other[step + 1] - other[step] for step in range(joining + 1, joining + 6))
        delays.append((other[joining] - other[joining - 1]) / usual - 1)
    return {
        "kills": count,
        "next_step_median_s": statistics.median(stood),
        "next_step_longest_s": max(stood),
        "join_median_s": statistics.median(joined),
        "join_longest_s": max(joined),
        "delay_median_steps": statistics.median(delays),
    }


def storm(every_s: float, seconds: float, seed: int) -> Figures:
    """Trains while a worker is killed or frozen every so often; returns the rate of each live worker."""
    strategy = hr.Mirrored(STORM_WORKERS, min_workers=1, max_workers=STORM_WORKERS)
    strikes = Storm(strategy, every_s, seed)
    run = hr.fit(cnn_job(STORM_WORKERS), strategy, on_event=strikes, seconds=seconds, timeout_s=TIMEOUT_S)
    steps = [event for event in run.events if isinstance(event, Stepped)]
    began, ended = min(event.time_s for event in steps), max(event.time_s for event in steps)
    rounds = max(event.step for event in steps) + 1
    trained = rounds * EXAMPLES_A_WORKER * STORM_WORKERS
    return {
        "kept_within": kept_within(run.events, [at for at, _, _ in strikes.struck], STORM_WORKERS),
        "faults": len(strikes.struck),
        "seconds": ended - began,
        "rounds": rounds,
        "examples_per_live_worker_s": trained / live_seconds(run.events, STORM_WORKERS, began, ended),
    }


def storms(every_s: float, seconds: float) -> Figures:
    """Returns the rate of a live worker in a storm, over that without one."""
    calm = storm(0.0, min(seconds, 60.0), 0)
    stormy = storm(every_s, seconds, 0)
    ratio = stormy["examples_per_live_worker_s"] / calm["examples_per_live_worker_s"]
    return {**stormy, "calm_examples_per_live_worker_s": calm["examples_per_live_worker_s"], "ratio": ratio}


def overhead(rounds: int, seconds: float, make: Callable[..., hr.Strategy] = hr.Mirrored) -> Figures:
    """Returns the rate of elastic workers without any fault, over that of plain ones."""
    ratios = []
    with LocalEngine() as engine:
        for number in range(rounds):
            rates = {}
            # Each is the first in every other round.
            for least in (None, 1) if number % 2 else (1, None):
                rates[least] = throughput("cnn", make(2, min_workers=least), 2, seconds, engine)
            ratios.append(rates[1] / rates[None])
    return {"rounds": rounds, "ratio_median": statistics.median(ratios), "ratio_least": min(ratios)}


def torchrun(count: int) -> Figures:
    """Returns the seconds from a kill to the next step where torchrun starts all workers again, from a checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    command += ["--max-restarts", "100", str(Path(__file__).parent / "torchrun_job.py")]
    took = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        agent = subprocess.Popen(
            [*command, name], stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            for _ in range(count):
                before = len(steps_in(folder))
                await_(lambda before=before: len(steps_in(folder)) >= before + 30)
                killed = time.monotonic()
                os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
                await_(lambda killed=killed: any(step > killed + TORCHRUN_NOTICES_S for step in steps_in(folder)))
                took.append(next(step for step in steps_in(folder) if step > killed + TORCHRUN_NOTICES_S) - killed)
        finally:
            agent.terminate()
            agent.wait()
    return {"kills": count, "next_step_median_s": statistics.median(took), "next_step_longest_s": max(took)}


def steps_in(folder: Path) -> list[float]:
    """Returns when rank 0 has made its steps."""
    path = folder / "steps-0"
    return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def await_(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + AWAIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError("torchrun's workers have not gone on")
        time.sleep(0.02)


def hosts_overhead(rounds: int) -> Figures:
    """Returns the same ratio for a worker on each of two hosts, 1 Gbit/s: of 3.8 million parameters, and of few."""
    ways = [f"{model} {how}" for model in HIDDEN for how in ("plain", "elastic")]
    hosts("up", "2", "--rate", "1gbit")
    try:

        def seconds(way: str) -> float:
            said = run(Path(__file__).parent / "one_rank.py", 2, way, "600" if "small" in way else "30")
            return max(rank["seconds"] for rank in said)

        figures = alternate({way: partial(seconds, way) for way in ways}, rounds)
    finally:
        hosts("down")
    return {model: ratio(figures, f"{model} plain", f"{model} elastic") for model in HIDDEN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["kills", "overhead", "storm"])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of the overhead")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the storm")
    parser.add_argument("--every-s", type=float, default=15.0, help="seconds between two faults of the storm")
    given = parser.parse_args()
    # A shell lets what it starts in the background ignore the signal by which the run is ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    measurements: dict[str, Callable[[], Figures]] = {
        "kills": lambda: kills(given.kills),
        "overhead": lambda: overhead(given.rounds, given.seconds),
        "overhead-storage": lambda: overhead(given.rounds, given.seconds, hr.CentralStorage),
        "overhead-averaging": lambda: overhead(given.rounds, given.seconds, partial(hr.LocalSGD, period=8)),
        "hosts": lambda: hosts_overhead(given.rounds),
        "torchrun": lambda: torchrun(given.kills),
        "storm": lambda: storms(given.every_s, 60 * given.minutes),
    }
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    for what in given.what:
        figures = measurements[what]()
        print(what, json.dumps(figures), file=sys.stderr, flush=True)
        (results / f"{what}.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
