"""The same job under mpirun."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.schedulers.named_hosts import JOB, environment, needs
from headrace.report.model.summary import summarize

pytestmark = [pytest.mark.slow, pytest.mark.full]

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")


def test_processes_of_mpirun_are_the_workers(tmp_path: Path) -> None:
    needs("mpirun")
    (tmp_path / "job.py").write_text(JOB)
    command = [*MPIRUN, "headrace", "train", "job.py", "--strategy", "mirrored", "--run-dir", "a"]
    variables = {**environment(tmp_path), "HOME": str(tmp_path), "TMPDIR": "/tmp"}
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    summary = summarize(tmp_path / "a")
    assert (summary.status, summary.started.workers) == ("ok", 2)
