"""Calls `hr.fit` several times in one process; prints the seconds from each call to the end of its first step."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import headrace as hr

if __name__ == "__main__":
    job = runpy.run_path(str(Path(__file__).parent / "job.py"))["job"]
    for _ in range(int(sys.argv[1])):
        began = time.monotonic()
        run = hr.fit(job, hr.Mirrored(workers=2))
        started = next(event for event in run.events if event.kind == "run_started")
        first = next(event for event in run.events if event.kind == "stepped")
        print(started.clock_s + first.time_s - began, flush=True)
