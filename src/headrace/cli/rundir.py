"""Where a run's files go, and how an error says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from headrace.engine.termination import Terminated
from headrace.errors import RunFailed


def job_name(path: Path) -> str:
    """Returns the file's name, or that of its folder where the file is just called job.py."""
    resolved = path.resolve()
    return resolved.parent.name if resolved.stem == "job" and resolved.parent.name else resolved.stem


def default_run_dir(name: str, now: datetime | None = None) -> Path:
    """Returns `runs/<name>-<time>` in the working directory, with a number where it is taken."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{name}-{stamp}"
    number = 1
    path = first
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


@contextlib.contextmanager
def saying_where(run_dir: Path) -> Iterator[None]:
    """Adds to a failure where its events and logs lie, and to a termination how to go on."""
    try:
        yield
    except RunFailed as error:
        if run_dir.is_dir():
            error.add_note(f"events and logs: {run_dir}")
        raise
    except Terminated as error:
        if (run_dir / "checkpoints").is_dir():
            error.add_note(f"to go on: --run-dir {run_dir} --resume")
        raise
