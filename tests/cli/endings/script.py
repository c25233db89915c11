"""A program that trains `job.py` for half a second: `python script.py RUN_DIR`."""

from __future__ import annotations

import sys

import headrace as hr
from cli.endings.job import job

if __name__ == "__main__":
    hr.fit(job(), hr.Mirrored(2), run_dir=sys.argv[1], seconds=0.5)
