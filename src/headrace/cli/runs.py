"""Parts of a command that starts a run: its directory, its engine, a launcher, TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
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
    """Returns the file's name, or that of its folder for a file job.py."""
    resolved = path.resolve()
    return resolved.parent.name if resolved.stem == "job" and resolved.parent.name else resolved.stem


def default_run_dir(name: str, now: datetime | None = None) -> Path:
    """Returns a new `runs/<name>-<time>` in the working directory, with a number if it exists."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    first = Path("runs") / f"{name}-{stamp}"
    paths = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], paths) if not path.exists())


@contextlib.contextmanager
def saying_where(run_dir: Path) -> Iterator[None]:
    """Adds to a failure where its events and logs are, and to a termination how to resume."""
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
    """Returns this process's rank if torchrun, SLURM or MPI has started it; else None."""
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
    """Refuses a command that starts its own processes.

    Raises:
        UsageError: a launcher has started this process.
    """
    if launched_rank() is not None:
        raise UsageError(f"headrace {command} starts its own processes; run it without torchrun or another launcher")


def check_tensorboard(log_dir: Path | None) -> None:
    """Checks for the package before anything starts.

    Raises:
        UnfitMachine: `--tensorboard` is given and the package is not installed.
    """
    if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise UnfitMachine("--tensorboard needs a package that is not here: pip install 'headrace[tensorboard]'")


@contextlib.contextmanager
def tensorboards(log_dir: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """Gives a function that writes the events of each run to a folder of its own in `log_dir`, or None."""
    if log_dir is None:
        yield None
        return
    # Lazily: it imports torch, which `--help` does not need.
    from headrace.report.views.tensorboard import TensorBoard

    with contextlib.ExitStack() as opened:
        boards: list[TensorBoard] = []

        def take(event: Event) -> None:
            if isinstance(event, RunStarted):
                opened.close()
                boards[:] = [opened.enter_context(TensorBoard(log_dir / f"{event.strategy}-{event.workers}"))]
            for board in boards:
                board(event)

        yield take
