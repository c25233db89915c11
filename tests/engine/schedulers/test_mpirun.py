"""The same job under mpirun."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.schedulers.named_hosts import JOB, environment, needs
from headrace.report.model.summary import summarize

pytestmark = [pytest.mark.slow, pytest.mark.full]

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Trains with two processes of mpirun in a folder."""
    needs("mpirun")
    (folder / "job.py").write_text(JOB)
    command = [*MPIRUN, "headrace", "train", "job.py", "--strategy", "mirrored", *arguments]
    variables = {**environment(folder), "HOME": str(folder), "TMPDIR": "/tmp"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def test_processes_of_mpirun_are_the_workers(tmp_path: Path) -> None:
    ended = run(tmp_path, "--run-dir", "a")
    assert ended.returncode == 0, ended.stderr
    summary = summarize(tmp_path / "a")
    assert (summary.status, summary.started.workers) == ("ok", 2)


def test_more_processes_than_the_batch_has_examples(tmp_path: Path) -> None:
    ended = run(tmp_path, "--set", "batch=1")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("a global batch of 1 cannot be split among 2 workers; use global_batch_size=2") == 1
