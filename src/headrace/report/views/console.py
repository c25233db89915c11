"""A run as it goes on, for whoever waits for it: what it says, and how far it is."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TextIO

from headrace.report.format import byte_count
from headrace.report.views.progress import ProgressBar
from headrace.spec.events import Evaluated, Event, Lost, NonFinite, Notice, ParametersAveraged, Saved

_TOLD_ONE_BY_ONE = 3
_ACTIONS = {
    "skip": "the round is left out",
    "rollback": "the round is left out, the last checkpoint comes back",
}


def whose(event: NonFinite) -> str:
    """Returns what was not finite: "the loss of rank 1 is not finite"."""
    if not event.ranks:
        return "the gradient is not finite"
    ranks = f"rank {event.ranks[0]}" if len(event.ranks) == 1 else f"{len(event.ranks)} ranks"
    return f"the loss of {ranks} is not finite"


def _lost_numbers(event: ParametersAveraged) -> str:
    alone = len(event.left_out) == 1
    ranks = f"rank {event.left_out[0]}" if alone else f"{len(event.left_out)} ranks"
    then = f"left out of the mean, from which {'it goes' if alone else 'they go'} on"
    return f"the parameters of {ranks} are not finite after {event.step} steps: {then}"


class Console:
    """Lines and one bar on stderr.

    Args:
        label: what the run is called.
        rounds: how many there are; None where nobody knows.
        plain: lines instead of a bar; None: unless `stream` is a terminal.
        stream: where to; stderr by default.
    """

    def __init__(self, label: str, rounds: int | None, plain: bool | None = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._plain = not self._stream.isatty() if plain is None else plain
        self._progress = ProgressBar(rounds, label, self._stream, self._plain)
        self._label = label
        self._non_finite = 0
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
            case Saved() if self._plain:
                self._progress.line(f"{self._label}: saved step {event.step}, {byte_count(event.bytes)}")
            case NonFinite() if event.action in _ACTIONS:
                self._count(event)
            case ParametersAveraged() if event.left_out:
                self._progress.line(f"{self._label}: {_lost_numbers(event)}")
            case Lost():
                self._progress.line(f"{self._label}: {event.line}")
            case Notice():
                self._progress.line(f"{self._label}: {event.text}")

    def _count(self, event: NonFinite) -> None:
        self._non_finite += 1
        count = self._non_finite
        if count <= _TOLD_ONE_BY_ONE:
            self._progress.line(f"{self._label}: {whose(event)} at step {event.step}: {_ACTIONS[event.action]}")
        elif str(count).strip("0") == "1":  # 10, 100, 1000: however many there are, they fit on a screen
            self._progress.line(f"{self._label}: {count} rounds were not finite so far, the last at step {event.step}")

    def line(self, text: str) -> None:
        """Shows a line of rank 0's output."""
        self._progress.line(text)

    def close(self) -> None:
        """Ends the bar."""
        self._progress.close()
