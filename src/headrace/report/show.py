"""A run as it goes on, for whoever waits for it: what it says, and how far it is."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TextIO

from headrace.report.progress import Progress
from headrace.spec.event import Evaluated, Event, Notice

__all__ = ["Show"]


class Show:
    """Lines and one bar on stderr.

    Args:
        label: what the run is called.
        rounds: how many there are; None where nobody knows.
        plain: lines instead of a bar; None: unless `stream` is a terminal.
        stream: where to; stderr by default.
    """

    def __init__(self, label: str, rounds: int | None, plain: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._progress = Progress(rounds, label, self._stream, plain)
        self._label = label
        self._began: tuple[float, int] | None = None

    def update(self, step: int, loss: float, examples: int) -> None:
        """Says how far it is.

        Args:
            step: rounds done.
            loss: the last one.
            examples: done by all workers.
        """
        if step == 0:
            return
        now = monotonic()
        self._began = self._began or (now, examples)
        seconds = now - self._began[0]
        self._progress.update(step, loss, (examples - self._began[1]) / seconds if seconds > 0 else None)

    def event(self, event: Event) -> None:
        """Shows what is worth a line."""
        match event:
            case Evaluated():
                values = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
                self._progress.line(f"{self._label}: {values} after {event.step} step{'s' * (event.step != 1)}")
            case Notice():
                self._progress.line(f"{self._label}: {event.text}")

    def line(self, text: str) -> None:
        """Shows a line of rank 0's output."""
        self._progress.line(text)

    def close(self) -> None:
        """Ends the bar."""
        self._progress.close()
