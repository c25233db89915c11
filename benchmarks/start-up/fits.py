"""Calls `hr.fit` several times in one process; prints a line for each call: `fits.py COUNT [job | own]`.

On it: seconds from the call to the end of the first step, and to its begin; after the call, this process's
descriptors, the processes below it, and the memory of them all (MB, proportional set size).
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

import headrace as hr


def family() -> list[int]:
    """Returns this process and all below it."""
    found = [os.getpid()]
    for pid in found:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def memory_mb(pid: int) -> float:
    """Returns the proportional set size of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


if __name__ == "__main__":
    name = sys.argv[2] if len(sys.argv) > 2 else "job"
    job = runpy.run_path(str(Path(__file__).parent / "job.py"))[name]
    for _ in range(int(sys.argv[1])):
        began = time.monotonic()
        run = hr.fit(job, hr.Mirrored(workers=2))
        started = next(event for event in run.events if event.kind == "run_started")
        first = next(event for event in run.events if event.kind == "stepped")
        seconds, processes = started.clock_s + first.time_s - began, family()
        begin = seconds - first.compute_s - first.exchange_s - first.update_s
        descriptors = len(os.listdir("/proc/self/fd"))
        print(seconds, begin, descriptors, len(processes), sum(map(memory_mb, processes)), flush=True)
