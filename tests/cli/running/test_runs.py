"""`headrace ps` and `headrace stop`, with a run in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.spec.events import LAUNCHER, RunEnded
from watch.made import started, steps, write

pytestmark = pytest.mark.usefixtures("real_python")
Capture = pytest.CaptureFixture[str]

HOLD = """
import fcntl, os, signal, sys
lock = open(sys.argv[1], "w+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(str(os.getpid()))
lock.flush()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("held", flush=True)
signal.pause()
"""


def living(run_dir: Path) -> subprocess.Popen[str]:
    """A process that holds a run as its launcher does."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write(tmp_path / "runs" / "done", started(), *steps(0, range(5)), RunEnded(LAUNCHER, 9.0, "ok"))
    write(tmp_path / "runs" / "a", started(), *steps(0, range(8)), *steps(1, range(7)))
    return tmp_path / "runs"


def listed(capsys: Capture, runs: Path, *arguments: str) -> dict[str, dict[str, object]]:
    """The runs of this test, by name: other tests have runs of the same names at the same time."""
    assert run(["ps", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    return {Path(each["run_dir"]).name: each for each in found if Path(each["run_dir"]).parent == runs}


def test_runs_of_a_directory_and_those_that_go_on(runs: Path, capsys: Capture) -> None:
    with living(runs / "a") as process:
        try:
            assert listed(capsys, runs)["a"]["process"] == process.pid
            found = listed(capsys, runs, str(runs))
            assert {name: each["status"] for name, each in found.items() if name in ("a", "done")} == {
                "a": "running",
                "done": "ok",
            }
            # The mean of both workers in the last step that both have.
            assert (found["a"]["step"], found["a"]["loss"]) == (8, pytest.approx(10.0 / 7 + 0.5))
            assert run(["ps", str(runs)]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert any(str(process.pid) in line and "running" in line and "mirrored" in line for line in lines)
        finally:
            process.kill()
    assert listed(capsys, runs, str(runs))["a"]["status"] == "unfinished"
    assert "a" not in listed(capsys, runs)


def test_a_run_is_stopped(runs: Path, capsys: Capture) -> None:
    with living(runs / "a") as process:
        assert run(["stop", str(runs / "a")]) == 0
        assert process.wait(20) == 0
    assert "--resume goes on from there" in capsys.readouterr().out
    assert run(["stop", str(runs / "a")]) == 2
    assert "no run goes on in" in capsys.readouterr().err


def test_one_that_does_not_end_is_told(runs: Path, capsys: Capture) -> None:
    with living(runs / "a") as process:
        process.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert run(["stop", str(runs / "a"), "--timeout-s", "0.3"]) == 3
            assert time.monotonic() - began < 20
            assert f"process {process.pid} goes on after 0.3 s" in capsys.readouterr().err
        finally:
            os.kill(process.pid, signal.SIGKILL)


def test_a_directory_without_a_run(tmp_path: Path, capsys: Capture) -> None:
    assert run(["ps", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
