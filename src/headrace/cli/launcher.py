"""Whether somebody else has started this process as one rank of many: torchrun, SLURM, MPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.engine.local.engine import LocalEngine


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
