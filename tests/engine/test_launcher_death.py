"""The launcher dies by kill -9: everything that it has started goes, whatever state it is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from belongings import named_shared_memory
from engine.conftest import below, ended, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_python")]

GONE_WITHIN_S = 30.0
TESTS = Path(__file__).resolve().parent.parent

SCRIPT = """
import os
import subprocess
import sys
import time
import torch
import headrace as hr
from engine.victims import EXAMPLES, INPUTS, TARGETS, long_job

class Examples(torch.utils.data.Dataset):
    def __len__(self): return EXAMPLES
    def __getitem__(self, index): return INPUTS[index], TARGETS[index]

kill = os.kill

def kill_slowly(pid, number):
    kill(pid, number)
    time.sleep(0.5)

def train(worker):
    # The processor may be another's between two kills.
    os.kill = kill_slowly
    subprocess.Popen(["sleep", "60"])
    for batch in worker.batches():
        worker.step(batch)

def tell(event):
    if event.kind == "stepped" and event.rank == 0 and event.step == 2:
        print("trains", flush=True)

loader = torch.utils.data.DataLoader(Examples(), batch_size=8, num_workers=1)
hr.launch(train, long_job(data=loader), hr.Mirrored(2), on_event=tell, run_dir=sys.argv[1])
"""


# Where one worker is stopped, the others end as where none is.
@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param((), id="none", marks=pytest.mark.full),
        pytest.param(("worker",), id="worker"),
        pytest.param(("fork server", "worker"), id="fork server+worker"),
    ],
)
def test_nothing_outlives_it(tmp_path: Path, stopped: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    shared = named_shared_memory()
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
    )
    assert launcher.stdout is not None
    everything: list[int] = []
    workers: list[int] = []

    def all_are_there() -> bool:
        # Readers begin anew in each epoch, so that some moments are without them, and one that ends may be seen again.
        everything[:] = below(launcher.pid)
        workers[:] = [pid for pid in everything[1:] if not ended(pid) and parent(pid) == everything[0]]
        return len(everything) >= 1 + 2 + 2 * 2 and len(workers) == 2

    try:
        with launcher.stdout:
            assert launcher.stdout.readline() == "trains\n"
            assert until(all_are_there, 10), "each worker has a reader and a sleeper"
            for name in stopped:
                os.kill(everything[0] if name == "fork server" else workers[0], signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.wait()
    gone = until(lambda: all(map(ended, everything)), GONE_WITHIN_S)
    left = {pid: shown(pid) for pid in everything if not ended(pid)}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert gone, left
    # torch's DataLoader makes a name for a batch and removes it at once; who is killed in between leaves it.
    assert until(lambda: named_shared_memory() <= shared, 10), named_shared_memory() - shared


def shown(pid: int) -> str:
    """Returns what a process is, and its state, parent and group."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text()[:60] + Path(f"/proc/{pid}/cmdline").read_text()[:200]
    return "has ended meanwhile"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
