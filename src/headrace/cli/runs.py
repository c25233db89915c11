"""Where a run's files go, and how an error says so."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.signals import Terminated
from headrace.errors import RunFailed, UnfitMachine, UsageError
from headrace.spec.events import Event, RunStarted

if TYPE_CHECKING:
    from headrace.engine.local.engine import LocalEngine
    from headrace.report.views.tensorboard import TensorBoard


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


def launched_rank() -> int | None:
    """Returns this process's rank among the launcher's; None without a launcher."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return None
    return int(os.environ["RANK"])


@contextlib.contextmanager
def own_engine() -> Iterator[LocalEngine | None]:
    """Gives an engine of local processes; None under a launcher, whose processes are the workers."""
    if launched_rank() is not None:
        yield None
        return
    # Lazily: `--help` need not wait for the engine.
    from headrace.engine.local.engine import LocalEngine

    with LocalEngine(forks=True) as engine:
        yield engine


def refuse_launcher(command: str) -> None:
    """Refuses a command that starts processes of its own.

    Raises:
        UsageError: there is a launcher.
    """
    if launched_rank() is not None:
        raise UsageError(f"headrace {command} starts its own processes; run it without torchrun or another launcher")


def check_tensorboard(log_dir: Path | None) -> None:
    """Refuses `--tensorboard` before anything starts where the package is not there.

    Raises:
        UnfitMachine: it is not.
    """
    if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise UnfitMachine("--tensorboard needs a package that is not here: pip install 'headrace[tensorboard]'")


@contextlib.contextmanager
def tensorboards(log_dir: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """Gives what takes the events of one run, or of several one after the other; None where nobody wants them.

    Args:
        log_dir: holds one folder a run, which TensorBoard paints into the same charts.
    """
    if log_dir is None:
        yield None
        return
    # Lazily: it imports torch, which `--help` does not need.
    from headrace.report.views.tensorboard import TensorBoard

    boards: list[TensorBoard] = []

    def take(event: Event) -> None:
        if isinstance(event, RunStarted):
            while boards:
                boards.pop().close()
            boards.append(TensorBoard(log_dir / f"{event.strategy}-{event.workers}"))
        for board in boards:
            board(event)

    try:
        yield take
    finally:
        while boards:
            boards.pop().close()
