"""`scripts/gpu`, tried out without a GPU: which parts run, and what the report has of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "main.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_the_report_has_what_ran_and_what_was_left_out(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = gpu("--device", "cpu", "--only", "doctor,tests", "--out", str(report))
    found = json.loads(report.read_text())
    assert found["parts"]["tests"] == {"left_out": "they need a CUDA device"}
    doctor = found["parts"]["doctor"]
    assert doctor["answer"]["checks"]
    assert doctor["command"].endswith("headrace doctor --json")
    # A problem of this machine is one of the report, too.
    assert done.returncode == (1 if doctor["code"] else 0), done.stdout
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_a_part_that_does_not_exist_is_named() -> None:
    done = gpu("--device", "cpu", "--only", "doctor,nccl")
    assert done.returncode == 2
    assert "no part is called nccl; there are doctor, tests, overhead, data parallel, shared, hardware" in done.stderr


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_without_a_gpu_nothing_runs() -> None:
    done = gpu()
    assert (done.returncode, "no CUDA device here" in done.stderr) == (3, True)
