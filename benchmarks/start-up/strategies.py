"""Processor time of all processes, and seconds, of a short run of each strategy: what starting costs. See README.md."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
JOB = Path(__file__).parent / "job.py"
STRATEGIES = ("mirrored", "pipeline", "fully_sharded")


def run(strategy: str) -> tuple[float, float]:
    """Returns the processor time and the seconds of a run, from the command to its end."""
    before, began = _used(), time.monotonic()
    command = [BIN / "headrace", "train", JOB, "--strategy", strategy, "--workers", "2"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "--run-dir", Path(folder) / "run"], check=True, capture_output=True)
    return _used() - before, time.monotonic() - began


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, action="append", default=[], help="other versions' src, by turns")
    arguments = parser.parse_args()
    for strategy in STRATEGIES:
        figures: dict[str, list[tuple[float, float]]] = {}
        for _ in range(arguments.rounds):
            for source in (None, *arguments.source):
                os.environ.pop("PYTHONPATH", None)
                if source:
                    os.environ["PYTHONPATH"] = str(source)
                figures.setdefault(str(source or "this version"), []).append(run(strategy))
        for version, each in figures.items():
            used, seconds = (statistics.median(column) for column in zip(*each, strict=True))
            print(f"{strategy:16}{used:8.2f} s of processor time {seconds:8.2f} s   {version}")


if __name__ == "__main__":
    main()
