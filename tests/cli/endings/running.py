"""`headrace train` in a process of its own: how far it is, and which processes it has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.conftest import until
from headrace.checkpoint import CheckpointFolder
from headrace.report.model.events import read_events
from headrace.spec.events import ServerStarted, WorkerStarted
from warm.programs import ROOT, real

JOB = Path(__file__).with_name("job.py")
TESTS = JOB.parents[2]
SOON_S = 60.0


@dataclass
class Running:
    """A command that trains, and what is known of it from the files of its run.

    Attributes:
        process: of the command.
        folder: in which it was started; what it says goes to a file there.
        run_dir: of the run.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    run_dir: Path

    @property
    def held(self) -> Path:
        """The file that is there while the job `holds` its third step."""
        return self.folder / "held"

    def said(self) -> str:
        """Returns all that stands on the terminal."""
        return (self.folder / "terminal").read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until the run has come so far; fails with what the command has said where it ends before."""
        if until(lambda: self.process.poll() is not None or condition(), SOON_S) and self.process.poll() is None:
            return
        self.process.kill()
        pytest.fail(self.said())

    def pids(self) -> dict[int, int]:
        """Returns the processes of workers and servers by their ranks."""
        started = (each for each in read_events(self.run_dir) if isinstance(each, WorkerStarted | ServerStarted))
        return {each.rank: each.pid for each in started}

    def wait_for_steps(self, *ranks: int, count: int = 6) -> None:
        """Waits until each of these ranks has written some steps."""
        files = [self.run_dir / "events" / f"rank-{rank}.jsonl" for rank in ranks]
        self.wait_for(lambda: all(each.is_file() and each.read_text().count("stepped") >= count for each in files))

    def wait_for_checkpoint(self) -> None:
        self.wait_for(lambda: bool(CheckpointFolder(self.run_dir / "checkpoints").steps()))

    def signal(self, number: int) -> None:
        """Sends the command itself a signal."""
        os.kill(real(self.process.pid), number)

    def end(self) -> int:
        """Waits for the end; returns the exit code."""
        return self.process.wait(2 * SOON_S)


@contextmanager
def running(
    folder: Path, arguments: Sequence[str | Path], before: Sequence[str] = (), run_dir: Path | None = None
) -> Iterator[Running]:
    """Starts a program with arguments in a folder, behind the words of another command."""
    program = Path(sys.executable).with_name(str(arguments[0]))
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT / 'src'}", "CI": "true", "COLUMNS": "80"}
    command = [*before, program, *arguments[1:]]
    with (
        (folder / "terminal").open("wb") as terminal,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=terminal, stderr=terminal) as process,
    ):
        try:
            yield Running(process, folder, run_dir or folder / "run")
        finally:
            process.kill()


def parent(pid: int) -> int:
    """Returns the process that has started one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
