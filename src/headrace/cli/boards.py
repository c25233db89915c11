"""`--tensorboard`: the events of runs, as they come, to TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import UnfitMachine
from headrace.spec.events import Event, RunStarted

if TYPE_CHECKING:
    from headrace.report.views.tensorboard import TensorBoard


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
