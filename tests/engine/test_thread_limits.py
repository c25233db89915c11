"""A user who may start few processes and threads: a run trains, or says so in one line and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = 54321
"""One that has no process yet; the limit counts all of a user's, and none of root's."""

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
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of the other user, all of whose processes are ended afterwards."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o005:
            folder.chmod(folder.stat().st_mode | 0o005)
    (tmp_path / "own").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    os.chown(tmp_path / "own", USER, USER)
    yield tmp_path
    for pid in processes():
        os.kill(pid, 9)


def processes() -> list[int]:
    """Returns the other user's processes."""
    return [int(each.name) for each in Path("/proc").glob("[0-9]*") if owner(each) == USER]


def owner(folder: Path) -> int:
    try:
        return folder.stat().st_uid
    except FileNotFoundError:
        return 0


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize("strategy", ["one_device", "mirrored(workers=2)", "parameter_server(workers=2)"])
def test_a_run_trains_or_says_how_many_threads_there_may_be(place: Path, strategy: str) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "VIRTUAL_ENV")},
        "HOME": str(place / "own"),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CI": "true",
    }
    trained = []
    for limit in (2, 4, 6, 8, 10, 12, 14, 17, 20, 24, 40):
        command = ["prlimit", f"--nproc={limit}", sys.executable, "-c", TRAIN, str(place / "job.py")]
        options = ["--strategy", strategy, "--run-dir", str(place / "own" / f"run-{limit}"), "--timeout-s", "5"]
        as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command, *options]
        done = subprocess.run(
            as_user, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        if "Permission denied" in done.stderr and limit == 2:
            pytest.skip("another user may not read this installation")
        assert "Traceback" not in done.stderr, (limit, done.stderr)
        trained.append(done.returncode == 0)
        if done.returncode:
            assert done.returncode in (3, 4), (limit, done.stderr)
            assert done.stderr.count("error: ") == 1, (limit, done.stderr)
        until = time.monotonic() + 5
        while left := processes():
            assert time.monotonic() < until, (limit, left)
            time.sleep(0.05)
    assert not trained[0]
    assert trained[-1]
