"""A user who may start few processes and threads: a run trains, or says so in one line and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = 1_000_000_000 + os.getpid()
"""One that has no process yet, nor from tests beside these; the limit counts all of a user's, and none of root's."""

JOB = """
import functools
import torch
import headrace as hr

data = torch.randn(64, 4), torch.randn(64, 1)

def job():
    return hr.Job(lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss,
                  optimizer=functools.partial(torch.optim.SGD, lr=1e-3), data=data, eval_data=data,
                  global_batch_size=8, epochs=4)
"""
TRAIN = "import sys; from headrace.cli import main; sys.argv[1:1] = ['train']; main()"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all may read, with one of the other user, all of whose processes are ended afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "own").mkdir()
        (folder / "job.py").write_text(JOB)
        os.chown(folder / "own", USER, USER)
        yield folder
        for pid in processes():
            os.kill(pid, signal.SIGKILL)


def processes() -> list[int]:
    """Returns the other user's processes."""
    return [int(each.name) for each in Path("/proc").glob("[0-9]*") if owner(each) == USER]


def owner(folder: Path) -> int:
    try:
        return folder.stat().st_uid
    except FileNotFoundError:
        return 0


def train(place: Path, strategy: str, limit: int) -> subprocess.CompletedProcess[str]:
    """Trains as the other user, who may read all files: the installation may be root's alone."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "VIRTUAL_ENV")}
    own = {"HOME": str(place / "own"), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CI": "true"}
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "prlimit", f"--nproc={limit}"]
    options = ["--strategy", strategy, "--run-dir", str(place / "own" / f"run-{limit}"), "--timeout-s", "5"]
    command = [*user, sys.executable, "-c", TRAIN, str(place / "job.py"), *options]
    return subprocess.run(command, cwd=place, env=kept | own, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize(
    ("strategy", "limits"),
    [("mirrored(workers=2)", (1, 2, 5, 40)), ("parameter_server(workers=2, transport='tcp')", (8, 10))],
    ids=["mirrored", "servers"],
)
def test_a_run_trains_or_says_how_many_threads_there_may_be(
    place: Path, strategy: str, limits: tuple[int, ...]
) -> None:
    for limit in limits:
        done = train(place, strategy, limit)
        assert "Traceback" not in done.stderr, (limit, done.stderr)
        assert (done.returncode == 0) == (limit == 40), (limit, done.stderr)
        if done.returncode:
            # 4 where ZeroMQ has ended the process, which it does without a thread.
            assert done.returncode in (3, 4), (limit, done.stderr)
            assert done.stderr.count("error: ") == 1, (limit, done.stderr)
            assert f"this user may have {limit} of them (ulimit -u)" in done.stderr
        until = time.monotonic() + 10
        while left := processes():
            assert time.monotonic() < until, (limit, left)
            time.sleep(0.05)
