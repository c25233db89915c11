"""SIGTERM where there are servers: whichever rank gets it, the whole run ends in order and can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from engine.conftest import below, state, until
from engine.lasting import files_of
from engine.test_termination import command
from headrace.checkpoint import CheckpointFolder
from headrace.report.model.events import read_events
from headrace.spec.events import Stepped

pytestmark = pytest.mark.slow

BATCH = 8
WORKERS = 2
SERVER = WORKERS
STRATEGIES = {
    "asynchronous": "parameter_server(workers=2)",
    "bound 0": "parameter_server(workers=2, staleness_bound=0)",
    "two servers over tcp": "parameter_server(workers=2, servers=2, transport='tcp')",
    "downpour": "downpour(workers=2, push_every=3, fetch_every=2)",
}


def process_of(rank: int, among: list[int]) -> int:
    """The process that writes a rank's log."""
    (found,) = [pid for pid in among if os.readlink(f"/proc/{pid}/fd/1").endswith(f"/rank-{rank}.log")]
    return found


def check_left(process: subprocess.Popen[str], children: list[int], run_dir: Path, code: int) -> int:
    """Looks at what a run that was asked to end has left; returns its rounds."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert until(lambda: all(state(pid) == "" for pid in children), 30)
    assert CheckpointFolder(run_dir / "checkpoints").latest()[1] == ()
    assert not list((run_dir / "checkpoints").glob("*.part"))
    rounds, _ = files_of(run_dir)
    trained = sum(event.examples for event in read_events(run_dir) if isinstance(event, Stepped))
    assert trained == rounds * BATCH, "every portion that was trained is in the checkpoint, and no other"
    return rounds


@pytest.mark.parametrize(
    ("strategy", "whom"),
    [
        ("asynchronous", "server"),
        ("bound 0", "worker 1"),
        ("two servers over tcp", "command"),
        ("downpour", "command"),
        ("downpour", "server"),
        ("downpour", "worker 1"),
    ],
)
def test_the_run_ends_with_a_checkpoint_and_goes_on(tmp_path: Path, strategy: str, whom: str) -> None:
    run_dir, before = tmp_path / "run", 0
    for resume in ((), ("--resume",)) if whom == "command" else ((),):
        with command(tmp_path, "--checkpoint-every", "6", "--strategy", STRATEGIES[strategy], *resume) as process:
            folder = CheckpointFolder(run_dir / "checkpoints")
            assert until(lambda folder=folder, before=before: max(folder.steps(), default=0) > before + 10, 60)
            children = below(process.pid)
            ranks = {"server": SERVER, "worker 1": 1}
            asked = process.pid if whom == "command" else process_of(ranks[whom], children)
            os.kill(asked, signal.SIGTERM)
            after = check_left(process, children, run_dir, 143 if whom == "command" else 130)
        assert after > before
        before = after
