"""How fast and how surely lost workers are noticed: kills, errors and stops at random moments of real runs.

A trial starts two workers, lets one of them fail at a random moment (while it is forked, unpacks, meets the
others, computes, exchanges, updates, evaluates), and looks at three things: whether `fit` raises what it
should, how long after the fault, and whether anything is left.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from processes import below, descriptors, rank_of, shared_files, workers
from torch import nn

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError, PeerLost, WorkerFailed

WORKERS = 2
NOTICED_WITHIN_S = 2.0
LONGEST_S = 60.0
RUNS_AT_MOST_S = 0.6
"""A run's first second holds every kind of moment: an epoch, with its evaluation, takes some 10 ms."""


@dataclass
class Row:
    """What came of the trials of one fault under one strategy.

    Attributes:
        times_s: from the fault to the error, where both were right.
        wrong: what was not.
    """

    fault: str
    strategy: str
    limit_s: float
    times_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Returns the row of the table."""
        count = len(self.times_s)
        median, most = (statistics.median(self.times_s), max(self.times_s)) if count else (float("nan"),) * 2
        trials = count + len(self.wrong)
        return (
            f"{self.fault:8}{self.strategy:18}{count:6} of {trials:<6}{median:9.3f}{most:11.3f}{self.limit_s:10.1f}"
            f"{len(self.wrong):9}"
        )


@dataclass
class Fault:
    """When and whom the planted fault has met."""

    rank: int | None = None
    at: float | None = None


class Net(nn.Module):
    """A small network that raises in rank `victim` once the clock says `moment`."""

    def __init__(self, victim: int, moment: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.victim = victim
        self.moment = moment

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if time.monotonic() > self.moment and rank_of(os.getpid()) == self.victim:
            raise ValueError(f"planted at {time.monotonic()}")
        return self.layers(inputs)


def make_job(victim: int = -1, moment: float = float("inf")) -> hr.Job:
    """Returns a job that would take hours; its epochs, with their evaluation, are short."""
    torch.manual_seed(0)
    inputs, classes = torch.randn(64, 64), torch.randint(10, (64,))
    return hr.Job(
        model=functools.partial(Net, victim, moment),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-4),
        data=(inputs, classes),
        eval_data=(inputs, classes),
        global_batch_size=16,
        epochs=10**6,
    )


@contextmanager
def planted(signal_number: int, victim: int, moment_s: float) -> Iterator[Fault]:
    """Sends a signal to one worker, `moment_s` after it appeared."""
    fault = Fault()
    over = threading.Event()

    def strike() -> None:
        while len(found := workers()) <= victim:
            if over.is_set():
                return
        if over.wait(moment_s):
            return
        fault.rank, fault.at = rank_of(found[victim]), time.monotonic()
        os.kill(found[victim], signal_number)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield fault
    finally:
        over.set()
        thread.join()


def attempt(engine: LocalEngine, strategy: str, job: hr.Job, timeout_s: float) -> tuple[HeadraceError | None, float]:
    """Trains until it fails; returns the error and when it came."""
    try:
        hr.fit(job, hr.Mirrored(WORKERS) if strategy == "mirrored" else hr.CentralStorage(WORKERS),
               engine=engine, timeout_s=timeout_s)  # fmt: skip
    except HeadraceError as error:
        return error, time.monotonic()
    return None, time.monotonic()


def lose(number: int, engine: LocalEngine, strategy: str, dice: random.Random, timeout_s: float) -> tuple[str, float]:
    """One trial with a signal; returns what is wrong ("" if nothing) and the seconds to the error."""
    in_start_up = dice.random() < 0.3
    moment_s = dice.uniform(0, 0.05 if in_start_up else RUNS_AT_MOST_S)
    with planted(number, dice.randrange(WORKERS), moment_s) as fault:
        error, at = attempt(engine, strategy, make_job(), timeout_s)
    if fault.at is None:
        return f"ended before the fault: {error!r}", 0.0
    if not isinstance(error, PeerLost) or fault.rank not in (None, error.rank) or error.exit_code != 4:
        return f"{moment_s:.4f} s after the fork of rank {fault.rank}: {error!r}", 0.0
    return "", at - fault.at


def blunder(engine: LocalEngine, strategy: str, dice: random.Random, timeout_s: float) -> tuple[str, float]:
    """One trial with an error in user code; returns what is wrong ("" if nothing) and the seconds to the error."""
    victim = dice.randrange(WORKERS)
    job = make_job(victim, time.monotonic() + dice.uniform(0.02, RUNS_AT_MOST_S))
    error, at = attempt(engine, strategy, job, timeout_s)
    if not isinstance(error, WorkerFailed) or error.rank != victim:
        return f"expected rank {victim}'s error, got {error!r}", 0.0
    planted_at = re.search(r"ValueError: planted at ([\d.]+)", error.traceback)
    if planted_at is None or error.exit_code != 1:
        return f"not the planted error, exit code {error.exit_code}: {error.traceback}", 0.0
    return "", at - float(planted_at[1])


TRIALS: dict[str, Callable[..., tuple[str, float]]] = {
    "kill": functools.partial(lose, signal.SIGKILL),
    "raise": blunder,
    "stop": functools.partial(lose, signal.SIGSTOP),
}


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Ends everything where a trial hangs: that is a result, too, and the worst one."""

    def hang(*_: object) -> None:
        for process in below(os.getpid()):
            os.kill(process.pid, signal.SIGKILL)
        raise SystemExit(f"a trial had not ended after {seconds:.0f} s: the campaign is over, and lost")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(int(seconds))
    try:
        yield
    finally:
        signal.alarm(0)


def holdings() -> dict[str, object]:
    """Returns what this process and the fork server hold; must be the same after every trial."""
    gc.collect()  # an error keeps its frames, and with them the run's mappings, until it is collected
    (fork_server,) = [process.pid for process in below(os.getpid()) if process.parent == os.getpid()]
    return {
        "processes below": [process for process in below(os.getpid()) if process.pid != fork_server],
        "files of the launcher": descriptors(os.getpid()),
        "files of the fork server": descriptors(fork_server),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "/dev/shm": shared_files(),
    }


def campaign(trials: int, timeout_s: float, seed: int) -> list[Row]:
    """Runs everything on one engine, the rows by turns."""
    strategies = ("mirrored", "central_storage")
    rows = [
        Row(fault, strategy, timeout_s + 1 if fault == "stop" else NOTICED_WITHIN_S)
        for fault in TRIALS
        for strategy in strategies
    ]
    dice = random.Random(seed)
    with LocalEngine() as engine:
        hr.fit(hr.Job(model=functools.partial(nn.Linear, 4, 1), task=hr.tasks.regression(), optimizer=torch.optim.SGD,
                      data=(torch.randn(4, 4), torch.randn(4, 1)), global_batch_size=4, steps=1),
               hr.Mirrored(WORKERS), engine=engine)  # fmt: skip
        at_first = holdings()
        for trial in range(trials):
            for row in rows:
                with watched(LONGEST_S + timeout_s):
                    wrong, seconds = TRIALS[row.fault](engine, row.strategy, dice, timeout_s)
                left = {name: held for name, held in holdings().items() if held != at_first[name]}
                if left:
                    wrong += f" left behind: {left}, at first { ({name: at_first[name] for name in left}) }"
                if not wrong and seconds > row.limit_s:
                    wrong = f"noticed after {seconds:.3f} s"
                row.wrong.append(f"trial {trial}: {wrong}") if wrong else row.times_s.append(seconds)
            print(f"\rtrial {trial + 1} of {trials} of each", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each fault under each strategy")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="what fit is given: when a silent worker is lost")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    arguments = parser.parse_args()
    os.environ["CI"] = "true"  # no moving bars
    rows = campaign(arguments.trials, arguments.timeout_s, arguments.seed)
    print(f"{'fault':8}{'strategy':18}{'right':>6}{'':10}{'median s':>9}{'most s':>11}{'limit s':>10}{'wrong':>9}")
    for row in rows:
        print(row.line())
    for row in rows:
        for wrong in row.wrong:
            print(f"{row.fault} under {row.strategy}: {wrong}")
    remaining = below(os.getpid())
    print(f"processes left at the end: {len(remaining)}")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {"arguments": vars(arguments), "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    (results / "faults.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(any(row.wrong for row in rows) or bool(remaining))


if __name__ == "__main__":
    sys.exit(main())
