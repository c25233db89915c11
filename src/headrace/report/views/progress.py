"""How far a run is, on stderr: one bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from headrace.report.format import MISSING, clean, duration, short

if TYPE_CHECKING:
    # Importing rich takes 40 ms, which `headrace --help` does not have.
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_BAR_PERIOD_S = 0.25
_LINE_PERIOD_S = 10.0


class ProgressBar:
    """Shows one run's progress until it is closed.

    No thread draws: a draw happens inside `update`, at most 4 times a second (or once in 10 s, without a
    terminal), so that a run in this process is not disturbed.

    Args:
        total_steps: steps of the whole run; None where it is not known.
        label: what the run is called.
        stream: where to; stderr by default.
        plain: lines instead of a bar; None: unless `stream` is a terminal.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int | None,
        label: str,
        stream: TextIO | None = None,
        plain: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._label = clean(label)
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = self._drawn = clock()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._closed = False
        if not (plain if plain is not None else not self._stream.isatty()):
            self._open_bar()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, step: int, loss: float | None = None, examples_per_s: float | None = None) -> None:
        """Says where the run is; draws only when it is time to.

        Args:
            step: steps done.
            loss: of the last step.
            examples_per_s: of all workers.
        """
        now = self._clock()
        done = step == self._total
        if self._closed or (now - self._drawn < self._period() and not (done and self._bar)):
            return
        self._drawn = now
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, loss=short(loss), rate=short(examples_per_s))
            self._bar.refresh()
        else:
            self._write(self._line(step, loss, examples_per_s, now - self._began))

    def line(self, text: str) -> None:
        """Writes a line that stays, above the bar where there is one."""
        if self._bar is not None and not self._closed:
            self._bar.console.print(clean(text), markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(clean(text))

    def close(self, final_line: str = "") -> None:
        """Takes the bar away and leaves `final_line` in its place; closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.stop()
        if final_line:
            self._write(clean(final_line))

    def _period(self) -> float:
        return _LINE_PERIOD_S if self._bar is None else _BAR_PERIOD_S

    def _line(self, step: int, loss: float | None, examples_per_s: float | None, elapsed_s: float) -> str:
        total = f"/{self._total}" if self._total is not None else ""
        return (
            f"{self._label}: step {step}{total}, loss {short(loss)}, "
            f"{short(examples_per_s)} examples/s, {duration(elapsed_s)}"
        )

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}" if self._total else "step {task.completed:.0f}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} ex/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._stream, force_terminal=True),
            auto_refresh=False,
            transient=True,
            expand=True,
            # What the user's program prints belongs to its own streams.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(self._label, total=self._total, loss=MISSING, rate=MISSING)
        self._bar.start()
