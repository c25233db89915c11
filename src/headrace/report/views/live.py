"""A run's events while it runs: a progress bar or plain lines on stderr."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from headrace.machine.disk import takes_no_more, unless
from headrace.report.format import MISSING, byte_count, clean, duration, plural, short
from headrace.report.views.notebook import ShowHtml, progress_html
from headrace.spec.events import (
    Evaluated,
    Event,
    Lost,
    NonFinite,
    Notice,
    ParametersAveraged,
    RunEnded,
    Saved,
    SharesBalanced,
)

if TYPE_CHECKING:
    # Importing rich takes 40 ms, which `headrace --help` does not have.
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


_BAR_PERIOD_S = 0.25
_LINE_PERIOD_S = 10.0


_MIDDLE, _WIDE = 60, 88
"""Columns of a terminal from which on a bar has its name, and rate and time."""


@dataclass(frozen=True)
class RunLength:
    """How many rounds and epochs a run has, None and 0 where that is not known: texts of one width for all of them."""

    total: int | None = None
    epochs: int = 0

    def place(self, step: int, epoch: int | None = None) -> str:
        """Returns "epoch  3/20  step  69/460"; of the epoch in which the step is, or of so many whole ones."""
        width = len(str(self.total)) if self.total else 1
        of = f"/{self.total}" if self.total is not None and epoch is None else ""
        text = f"step {step:>{width}}{of}"
        if not (self.epochs and self.total):
            return text
        if epoch is None:
            epoch = min(self.epochs, 1 + max(0, step - 1) * self.epochs // self.total)
        return f"epoch {epoch:>{len(str(self.epochs))}}/{self.epochs}  {text}"


def _is_unseen(error: OSError) -> bool:
    """Tells whether a line finds no reader: its pipe is closed, its terminal is gone (EIO), or its disk is full."""
    return error.errno == errno.EPIPE or takes_no_more(error)


class ProgressBar:
    """Shows one run's progress until it is closed: as a bar, one line below a notebook's cell, or plain lines.

    No thread draws: `update` draws at most 4 times a second (plain lines: once in 10 s), so that a run in this process
    is not disturbed. What finds no reader any more is left out, and ends no run. `total_steps` is None where it is not
    known; `show_html` is a notebook's.
    """

    def __init__(
        self,
        total_steps: int | None,
        label: str,
        stream: TextIO,
        plain: bool,
        clock: Callable[[], float] = time.monotonic,
        show_html: ShowHtml | None = None,
        rounds: RunLength | None = None,
    ) -> None:
        self._show_html = show_html
        self._total = total_steps
        self._rounds = rounds or RunLength(total_steps)
        self._label = clean(label)
        self._stream = stream
        self._clock = clock
        self._began = self._drawn = clock()
        self._first: tuple[float, int] | None = None
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._closed = False
        if show_html is None and not plain:
            self._open_bar()

    def update(self, step: int, loss: float | None = None, examples_per_s: float | None = None) -> None:
        """Shows where the run is, if it is time to draw: steps done, loss of the last step, rate of all workers."""
        now = self._clock()
        # A resumed run begins with rounds that were done before.
        self._first = self._first or (now, step)
        moves = self._bar is not None or self._show_html is not None
        period_s = _BAR_PERIOD_S if moves else _LINE_PERIOD_S
        if self._closed or (now - self._drawn < period_s and not (step == self._total and moves)):
            return
        self._drawn = now
        if self._show_html is not None:
            passed = now - self._began
            self._show_html(
                progress_html(self._label, step, self._total, loss, examples_per_s, passed, self._left_s(step))
            )
            return
        if self._bar is not None and self._task is not None:
            with unless(_is_unseen):
                texts: dict[str, Any] = {"loss": f"{short(loss):>6}", "rate": f"{short(examples_per_s):>6}"}
                self._bar.update(self._task, completed=step, place=self._rounds.place(step), **texts)
                self._bar.refresh()
        else:
            left_s = self._left_s(step)
            left = f"  {duration(left_s)} left" if left_s is not None else ""
            rate = f"{short(examples_per_s):>6} examples/s  {duration(now - self._began)}{left}"
            self._write(f"{self._label}: {self._rounds.place(step)}  train loss {short(loss):<6}  {rate}")

    def line(self, text: str) -> None:
        """Writes a line that stays, above the bar where there is one."""
        if self._bar is not None and not self._closed:
            with unless(_is_unseen):
                self._bar.console.print(clean(text), markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(clean(text))

    def close(self) -> None:
        """Takes the bar away; closing twice does nothing."""
        if self._bar is not None and not self._closed:
            with unless(_is_unseen):
                self._bar.stop()
        self._closed = True

    def _left_s(self, step: int) -> float | None:
        """Returns how long the rest takes at the pace so far; None where that is not known."""
        if self._first is None or self._total is None or not self._first[1] < step < self._total:
            return None
        return (self._clock() - self._first[0]) * (self._total - step) / (step - self._first[1])

    def _write(self, text: str) -> None:
        with unless(_is_unseen):
            self._stream.write(text + "\n")
            self._stream.flush()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(file=self._stream, force_terminal=True)
        # Of a narrow terminal, what says least is left out.
        columns: list[ProgressColumn] = [
            TextColumn("{task.fields[place]}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("train loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        ]
        if console.width >= _MIDDLE:
            columns.insert(0, TextColumn("{task.description}", markup=False))
        if console.width >= _WIDE:
            columns.insert(-1, TextColumn("{task.fields[rate]} ex/s"))
            columns.insert(-1, TimeElapsedColumn())
        self._bar = Bar(
            *columns,
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            # What the user's program prints belongs to its own streams.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        texts: dict[str, Any] = {"place": self._rounds.place(0), "loss": f"{MISSING:>6}", "rate": f"{MISSING:>6}"}
        self._task = self._bar.add_task(self._label, total=self._total, **texts)
        self._bar.start()


_MOST_SINGLE_LINES = 3
_LEFT_OUT = "the round is left out"
_ACTIONS = {"skip": _LEFT_OUT, "rollback": f"{_LEFT_OUT}, the last checkpoint comes back"}


def non_finite_text(event: NonFinite) -> str:
    """Returns what was not finite: "the loss of rank 1 is not finite"."""
    if not event.ranks:
        return "the gradient is not finite"
    ranks = f"rank {event.ranks[0]}" if len(event.ranks) == 1 else f"{len(event.ranks)} ranks"
    return f"the loss of {ranks} is not finite"


def _left_out_text(event: ParametersAveraged) -> str:
    alone = len(event.left_out) == 1
    ranks = f"rank {event.left_out[0]}" if alone else f"{len(event.left_out)} ranks"
    then = f"left out of the mean, from which {'it goes' if alone else 'they go'} on"
    return f"the parameters of {ranks} are not finite after {plural(event.step, 'step')}: {then}"


class Console:
    """A run's events as lines on stderr, and its progress bar; see `ProgressBar`.

    `told` are the texts of notices that were shown before, and are not shown again.
    """

    def __init__(
        self,
        label: str,
        rounds: int | None,
        plain: bool | None = None,
        stream: TextIO | None = None,
        told: Container[str] = (),
        show_html: ShowHtml | None = None,
        epochs: int = 0,
    ) -> None:
        # A notebook shows stderr in red, as what has failed.
        self._stream = stream if stream is not None else sys.stdout if show_html else sys.stderr
        self._plain = not self._stream.isatty() if plain is None else plain
        self._rounds = RunLength(rounds, epochs)
        self._progress = ProgressBar(rounds, label, self._stream, self._plain, show_html=show_html, rounds=self._rounds)
        self._label = label
        self._told = told
        self._non_finite = 0
        self._began: tuple[float, int] | None = None

    def update(self, step: int, loss: float | None, examples: int) -> None:
        """Shows the progress: `step` rounds done, the last loss, and the examples of all workers so far."""
        if step == 0:
            return
        now = monotonic()
        self._began = self._began or (now, examples)
        seconds, since = now - self._began[0], examples - self._began[1]
        # There is no rate before something was done since.
        self._progress.update(step, loss, since / seconds if since > 0 and seconds > 0 else None)

    def event(self, event: Event) -> None:
        """Writes a line for an event that is worth one."""
        if text := self._text(event):
            self._progress.line(f"{self._label}: {text}")

    def _text(self, event: Event) -> str:
        match event:
            case Evaluated():
                named = ((name if "/" in name else f"val {name}", value) for name, value in event.metrics.items())
                values = "".join(f"  {name} {short(value):<6}" for name, value in named)
                return f"{self._rounds.place(event.step, event.epoch)}{values}".rstrip()
            case Saved() if self._plain:
                return f"saved step {event.step}, {byte_count(event.bytes)}"
            case NonFinite() if event.action in _ACTIONS:
                self._non_finite += 1
                if self._non_finite <= _MOST_SINGLE_LINES:
                    return f"{non_finite_text(event)} at step {event.step}: {_ACTIONS[event.action]}"
                if str(self._non_finite).strip("0") == "1":  # 10, 100, 1000: all of them fit on a screen
                    return f"{self._non_finite} rounds were not finite so far, the last at step {event.step}"
            case ParametersAveraged() if event.left_out:
                return _left_out_text(event)
            case Lost() | SharesBalanced():
                return event.line
            case Notice() if event.text not in self._told:
                return event.text
            case RunEnded() if event.status == "interrupted":
                # Else an error says it.
                return f"interrupted: {event.words}"
        return ""

    def line(self, text: str) -> None:
        """Shows a line of rank 0's output."""
        self._progress.line(text)

    def close(self) -> None:
        """Ends the bar."""
        self._progress.close()
