"""SIGTERM at a random moment of a command whose state is 100 MB: how long to its end, and what is lost.

A trial starts `headrace train` (mostly to go on from where the trial before ended), sends SIGTERM at a random moment
after the first round (in some trials earlier, while it starts), and looks at: the exit code, the seconds to the exit,
whether the newest checkpoint is sound and is that of the last finished round, and whether a process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from processes import below, processes

from headrace.checkpoint import CheckpointFolder
from headrace.report.model.events import read_events
from headrace.spec.events import Stepped

TARGET_S = 5.0
EARLY_IN = 10
LONGEST_S = 60.0
RUNS_AT_MOST_S = 1.5
AFRESH_EVERY = 20
JOB = """
import functools, torch, headrace as hr
from torch import nn

def model():
    return nn.Sequential(nn.Linear(2500, 2500), nn.ReLU(), nn.Linear(2500, 2500))

data = (torch.randn(64, 2500), torch.randn(64, 2500))
optimizer = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
job = hr.Job(model=model, task=hr.tasks.regression(), optimizer=optimizer, data=data, global_batch_size=8, epochs=10**6)
"""
"""12.5 million parameters and their momentum: 100 MB."""


@dataclass
class Trial:
    """What came of one signal.

    Attributes:
        strategy: of the run.
        moment_s: after its first round; below 0 before that.
        exit_s: from the signal to the end of the process.
        code: what it exited with.
        wrong: "" if all was right.
    """

    strategy: str
    moment_s: float
    exit_s: float
    code: int
    wrong: str


def finished(run_dir: Path, workers: int) -> set[int]:
    """Returns how many rounds the workers have finished, by their events: one number if all is well."""
    done = dict.fromkeys(range(workers), 0)
    for event in read_events(run_dir):
        if isinstance(event, Stepped):
            done[event.rank] = event.step + 1
    return set(done.values())


def wait_for_growth(path: Path, before: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when the events in `path` are more than `before` bytes."""
    deadline = time.monotonic() + LONGEST_S
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size > before:
            return
        time.sleep(0.002)


def trial(folder: Path, strategy: str, dice: random.Random, log: Path) -> Trial:
    """Starts one command and ends it."""
    run_dir = folder / strategy
    steps = run_dir / "events" / "rank-0.jsonl"
    before = steps.stat().st_size if steps.exists() else 0
    resume = ["--resume"] if CheckpointFolder(run_dir / "checkpoints").steps() else []
    workers = [] if strategy == "one_device" else ["--workers", "2"]
    command = [Path(sys.executable).with_name("headrace"), "train", folder / "job.py", "--strategy", strategy, *workers,
               "--run-dir", run_dir, "--checkpoint-every", "0.4s", "--keep", "2", *resume]  # fmt: skip
    early = dice.randrange(EARLY_IN) == 0 and bool(resume)
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        if early:
            moment_s = dice.uniform(0.5, 4.0)
            time.sleep(moment_s)
            moment_s -= 10
        else:
            wait_for_growth(steps, before, process)
            moment_s = dice.uniform(0, RUNS_AT_MOST_S)
            time.sleep(moment_s)
        children = below(process.pid)
        at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
        exit_s = time.monotonic() - at
    wrong = look(run_dir, 2 if workers else 1, process.returncode, log)
    time.sleep(0.05)
    now = processes()
    # A zombie has ended; when it is reaped is the system's business.
    if left := [child.pid for child in children if child.pid in now and now[child.pid].state != "Z"]:
        wrong += f" processes left: {left}"
    return Trial(strategy, moment_s, exit_s, process.returncode, wrong)


def look(run_dir: Path, workers: int, code: int, log: Path) -> str:
    """Returns what is wrong with what a command has left."""
    # -15 before Python has come to the first line of headrace: nothing has begun then.
    if code not in (143, -signal.SIGTERM):
        return f"exit code {code}: {log.read_text()[-500:]}"
    newest, damaged = CheckpointFolder(run_dir / "checkpoints").latest()
    if newest is None or damaged:
        return f"no sound checkpoint: {damaged}"
    done = finished(run_dir, workers)
    if done != {newest.step}:
        return f"rounds finished {sorted(done)}, the checkpoint has {newest.step}"
    if leftovers := list((run_dir / "checkpoints").glob("*.part")):
        return f"left half: {leftovers}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="on the disk to save to; a temporary one, if not given")
    arguments = parser.parse_args()
    os.environ["CI"] = "true"  # no moving bars
    dice = random.Random(arguments.seed)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        (folder / "job.py").write_text(JOB)
        for number in range(arguments.trials):
            strategy = ("one_device", "mirrored", "central_storage")[number % 3]
            if number % (3 * AFRESH_EVERY) < 3:
                shutil.rmtree(folder / strategy, ignore_errors=True)
            trials.append(trial(folder, strategy, dice, folder / "log"))
            print(f"\rtrial {number + 1} of {arguments.trials}: {trials[-1].exit_s:.2f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    seconds = sorted(each.exit_s for each in trials)
    p99 = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    wrong = [each for each in trials if each.wrong]
    print(f"{len(trials) - len(wrong)} of {len(trials)} right")
    print(f"signal to exit: median {statistics.median(seconds):.2f} s, most {seconds[-1]:.2f} s")
    print(f"99th percentile {p99:.2f} s (target {TARGET_S:.0f})")
    for each in wrong:
        print(f"{each.strategy}, {each.moment_s:.3f} s: {each.wrong}")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {
        "arguments": {"trials": arguments.trials, "seed": arguments.seed},
        "torch": torch.__version__,
        "median_s": statistics.median(seconds),
        "p99_s": p99,
        "trials": [asdict(each) for each in trials],
    }
    (results / "termination.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(wrong) or p99 > TARGET_S)


if __name__ == "__main__":
    sys.exit(main())
