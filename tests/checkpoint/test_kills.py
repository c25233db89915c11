"""A saving process that is killed at a random moment leaves what it had promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRIALS = 15
"""benchmarks/checkpoint-crash/ does 1,000."""


@pytest.mark.slow
def test_killed_processes_leave_what_they_promised(tmp_path: Path) -> None:
    # In a process of its own, because this one has threads, which a fork would not survive.
    fork = "ignore:This process:DeprecationWarning"  # torch has threads, which a fork leaves behind
    done = subprocess.run(
        [sys.executable, "-W", fork, "-m", "checkpoint.kills", str(TRIALS), str(tmp_path)],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir())
