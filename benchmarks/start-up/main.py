"""From the command to the end of the first step with 2 workers: `headrace train` against torchrun + DDP; and --help."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import RIVALS, alternate, ratio, report

BIN = Path(sys.executable).parent


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    names = {
        "headrace train, first step": headrace,
        "torchrun + DDP, first step": torchrun,
        "headrace --help": help_text,
    }
    figures = alternate(names, rounds)
    ratios = {"headrace / torchrun": ratio(figures, *list(names)[:2])}
    report(Path(__file__).parent, "start-up", "s", figures, ratios)
