"""A run's events, as they come, to stderr and to TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from headrace.errors import UnfitMachine
from headrace.report.progress import Progress
from headrace.spec.event import Evaluated, Event, Notice, RunEnded, RunStarted, Stepped

if TYPE_CHECKING:
    from headrace.report.tensorboard import TensorBoard
    from headrace.spec.job import Job

__all__ = ["Watch", "check_tensorboard", "is_live"]


def is_live(stream: TextIO) -> bool:
    """Whether a moving bar may be painted: on a terminal that can, and not in CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def check_tensorboard(log_dir: Path | None) -> None:
    """Refuses `--tensorboard` before anything starts where the package is not there.

    Raises:
        UnfitMachine: it is not.
    """
    if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise UnfitMachine("--tensorboard needs a package that is not here: pip install 'headrace[tensorboard]'")


class Watch:
    """Takes the events of one run, or of several one after the other; a context manager.

    Args:
        job: what is trained; says how many steps there will be.
        log_dir: where TensorBoard's logs go, one folder a run; None for none.
        stream: where progress goes; stderr by default.
        quiet: whether to show nothing, as ranks other than 0 do.
    """

    def __init__(
        self, job: Job, log_dir: Path | None = None, stream: TextIO | None = None, quiet: bool = False
    ) -> None:
        self._quiet = quiet
        self._job = job
        self._log_dir = log_dir
        self._stream = sys.stderr if stream is None else stream
        self._progress: Progress | None = None
        self._board: TensorBoard | None = None
        self._label = ""
        self._first: Stepped | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Event) -> None:
        """Shows what the event tells."""
        if self._quiet:
            return
        match event:
            case Stepped():
                if event.rank == 0:
                    self._stepped(event)
            case RunStarted():
                self._began(event)
            case Evaluated():
                values = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
                self._line(f"{self._label}: {values} after {_count(event.step, 'step')}")
            case Notice():
                self._line(event.text)
        if self._board is not None:
            self._board(event)
        if isinstance(event, RunEnded):
            self._close()

    def _began(self, event: RunStarted) -> None:
        self._close()
        self._label = event.strategy
        self._first = None
        self._progress = Progress(
            _rounds(self._job, event), event.strategy, self._stream, plain=not is_live(self._stream)
        )
        if self._log_dir is not None:
            # Lazily: it takes torch, which a worker's launcher needs anyway but `--help` does not.
            from headrace.report.tensorboard import TensorBoard

            self._board = TensorBoard(self._log_dir / f"{event.strategy}-{event.workers}")

    def _stepped(self, event: Stepped) -> None:
        if self._progress is None:
            return
        first = self._first = self._first or event
        span_s = event.time_s - first.time_s
        examples = (event.step - first.step) * self._job.global_batch_size
        self._progress.update(event.step + 1, event.loss, examples / span_s if span_s > 0 else None)

    def _line(self, text: str) -> None:
        if self._progress is not None:
            self._progress.line(text)
        else:
            print(text, file=self._stream, flush=True)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._board is not None:
            self._board.close()
        self._progress = self._board = None


def _rounds(job: Job, event: RunStarted) -> int | None:
    if job.epochs is None:
        return job.steps
    return job.epochs * -(-event.examples_per_epoch // event.global_batch_size)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
