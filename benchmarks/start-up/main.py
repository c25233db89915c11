"""From the command to the end of the first step with 2 workers, against torchrun + DDP; of `hr.fit`; and --help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import RIVALS, alternate, ratio, report

BIN = Path(sys.executable).parent
README = Path(__file__).parents[2] / "README.md"
# An installed package has its bytecode, as torch has here; without it half a second goes into compiling headrace.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def headrace() -> float:
    """Returns seconds; the run's events say when its first step ended."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        job = Path(__file__).parent / "job.py"
        began = time.monotonic()
        command = [BIN / "headrace", "train", job, "--strategy", "mirrored", "--workers", "2", "--run-dir", run]
        subprocess.run(command, check=True, capture_output=True)
        lines = [json.loads(line) for line in (run / "events" / "rank-0.jsonl").read_text().splitlines()]
        first = next(line for line in lines if line["kind"] == "stepped")
        started = json.loads((run / "events" / "launcher.jsonl").read_text().splitlines()[0])
        return float(started["clock_s"] + first["time_s"] - began)


def torchrun() -> float:
    """Returns seconds."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"
        began = time.monotonic()
        script = RIVALS / "ddp_first_step.py"
        command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script, mark]
        subprocess.run(command, check=True, capture_output=True)
        return float(mark.read_text()) - began


def help_text() -> float:
    """Returns seconds."""
    began = time.monotonic()
    subprocess.run([BIN / "headrace", "--help"], check=True, capture_output=True)
    return time.monotonic() - began


def readme() -> float:
    """Returns the seconds of a program that trains the job of README.md once, from its start to its end."""
    example = README.read_text().partition("```python\n")[2].partition("for strategy in")[0]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", f"{example}hr.fit(job, hr.Mirrored(workers=2))"], check=True, capture_output=True
    )
    return time.monotonic() - began


def fits(count: int) -> list[list[float]]:
    """Returns what `fits.py` prints of each of `count` calls of `hr.fit` in one new process: seconds first."""
    script = Path(__file__).parent / "fits.py"
    ended = subprocess.run([sys.executable, script, str(count)], check=True, capture_output=True, text=True)
    return [[float(number) for number in line.split()] for line in ended.stdout.splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fits", type=int, help="instead: so many calls of hr.fit in one process, such as 100")
    arguments = parser.parse_args()
    if arguments.fits:
        to_end, to_begin, *left = zip(*fits(arguments.fits), strict=True)
        for seconds, what in ((to_begin, "begin"), (to_end, "end")):
            later = sorted(seconds[1:]) or seconds
            figures = f"first {seconds[0]:.3f} s, then median {later[len(later) // 2]:.3f} s, at most {later[-1]:.3f} s"
            print(f"to the {what} of the first step: {figures}")
        # The first calls import, compile and fill caches.
        settled = min(10, arguments.fits - 1)
        for what, numbers in zip(("descriptors", "processes", "memory, MB"), left, strict=True):
            print(f"{what}: {numbers[settled]:.0f} after {settled + 1} calls, {numbers[-1]:.0f} after the last")
        raise SystemExit
    rounds = arguments.rounds
    names = {
        "README's example with mirrored, whole program": readme,
        "hr.fit, first call": lambda: fits(1)[0][0],
        "hr.fit, second call": lambda: fits(2)[1][0],
        "hr.fit, second call, to the begin of the first step": lambda: fits(2)[1][1],
        "headrace train, first step": headrace,
        "torchrun + DDP, first step": torchrun,
        "headrace --help": help_text,
    }
    headrace()  # writes the bytecode
    figures = alternate(names, rounds)
    ratios = {"headrace / torchrun": ratio(figures, "headrace train, first step", "torchrun + DDP, first step")}
    report(Path(__file__).parent, "start-up", "s", figures, ratios)
