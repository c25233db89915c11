"""SIGTERM leaves no temporary file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.conftest import below, state, until
from engine.test_termination import environment

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, headrace as hr
from engine.lasting import lasting_job

def on_event(event):
    if event.kind == "stepped":
        os.kill(os.getpid(), signal.SIGTERM)

hr.fit(lasting_job("cnn"), hr.Mirrored(2), on_event=on_event)
"""


def test_of_a_run_without_a_run_dir(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment(TMPDIR=tmp_path), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert os.listdir(tmp_path) == []


def test_of_a_launched_script(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "headrace", "launch", script, "--workers", "2"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(TMPDIR=tmp_path / "temporary")) as process:
        assert until(lambda: (tmp_path / "began").exists() or process.poll() is not None, 120)
        children = below(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert until(lambda: all(state(pid) == "" for pid in children), 30)
    assert os.listdir(tmp_path / "temporary") == []


def test_of_a_measurement_of_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "bench", "--only", "storage", "--folder", tmp_path]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
        assert until(lambda: any(tmp_path.iterdir()) or process.poll() is not None, 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert os.listdir(tmp_path) == []
