"""find_learning_rate: trains a little while at rising rates, and tells at which the loss falls fastest."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from headrace.api.checks import inspect_job
from headrace.api.fit import fit
from headrace.engine.base import Engine
from headrace.errors import JobError, UsageError
from headrace.report.drawing.curves import Curve, draw_curves
from headrace.report.format import short
from headrace.report.views.document import embedded, html_text, picture_list, scrolled_table, table_row
from headrace.report.views.style import Picture, colours_of
from headrace.spec.events import Stepped
from headrace.spec.job import Job
from headrace.spec.options import require_count
from headrace.spec.parameter_sets import one_optimizer
from headrace.strategies import OneDevice
from headrace.training.optimizer import build
from headrace.worker.callbacks.callback import Callback, Moment

_LEAST_STEPS = 20
_WINDOW = 20
"""The loss is smoothed over this part (1/20) of the steps on each side."""
_SURE = 3.0
"""A fall counts where its slope is this many times its standard error: less is what batches differ by."""
_NOTABLE = 0.01
"""And where the loss falls by this part of the first one from a rate to its tenfold."""
_KEPT = 0.8
"""What a step leaves of the running mean of the loss, by which a run is told to diverge."""
_ROWS = 12
_HEADS = ("loss", "smoothed", "slope per decade", "note")


@dataclass(frozen=True)
class LearningRates:
    """The loss by learning rate; printed, a table.

    Attributes:
        rates: of the optimizer's first group, one a step, each the same factor above the one before.
        losses: of the step's batch, before it is trained on with that rate.
        smoothed: the mean of the losses of some steps before and after each.
        slopes: by how much the loss rises from a rate to its tenfold, in the steps around each; None at both ends.
        suggested: where it falls most steeply, before it is lowest; None where it falls nowhere.
        lowest: the rate with the lowest smoothed loss.
        diverged: the rate at which the loss became much larger than at first, or was no number; None if it did not.
        why: the reason for the suggestion, or for having none.

    Examples:
        >>> found = hr.find_learning_rate(job, steps=30)
        >>> len(found.rates) == len(found.losses)
        True
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    slopes: tuple[float | None, ...]
    suggested: float | None
    lowest: float
    diverged: float | None
    why: str

    def __str__(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for head in ("rate", *_HEADS):
            table.add_column(head, justify="left" if head == _HEADS[-1] else "right")
        for row in self._rows():
            table.add_row(*map(Text, row))
        text = io.StringIO()
        console = Console(file=text, width=100, highlight=False, color_system=None)
        console.print(table)
        return f"{text.getvalue()}{self.why}\n"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        title = "Loss by learning rate"
        colour = colours_of(["one_device"])["one_device"]
        faint = self._shown(self.losses)
        curves = [Curve(self._shown(self.smoothed), colour, faint=faint)]
        reading = (
            "Faint, the loss of each batch; the line is its mean over the steps around. The rate rises by each step"
        )
        if self.suggested is not None:
            ends = [loss for _, loss in faint]
            line = [(self.suggested, min(ends)), (self.suggested, max(ends))]
            curves.append(Curve(line, "ink", dashes=(3.0, 2.0), width=1.2))
            reading += "; the dashed line is at the suggested one"
        if len(faint) < len(self.losses):
            reading += "; losses that are larger than all before are left out at the end"
        picture = Picture(title, draw_curves(title, curves, "learning rate", "loss", log_x=True), f"{reading}.")
        rows = [table_row(html_text(rate), list(map(html_text, cells))) for rate, *cells in self._rows()]
        return embedded(
            [f"<p>{html_text(self.why)}</p>", picture_list([(picture, "")]), scrolled_table(_HEADS, rows, "rate")]
        )

    def _shown(self, losses: Sequence[float]) -> list[tuple[float, float]]:
        """Returns points of the picture, up to where losses that diverge would make all others a flat line."""
        low = self.rates.index(self.lowest)
        most = max(self.losses[: low + 1])
        stop = next((at for at in range(low, len(losses)) if losses[at] > most), len(losses))
        return list(zip(self.rates[:stop], losses[:stop], strict=True))

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns some steps at equal distances, and those that the reason names."""
        marks = {self.rates.index(self.lowest): "lowest"}
        if self.suggested is not None:
            marks[self.rates.index(self.suggested)] = "suggested"
        apart = max(1, math.ceil(len(self.rates) / _ROWS))
        shown = sorted({*range(0, len(self.rates), apart), *marks})
        return [
            (
                *(short(self.rates[at]), short(self.losses[at]), short(self.smoothed[at]), short(self.slopes[at])),
                marks.get(at, ""),
            )
            for at in shown
        ]


def find_learning_rate(
    job: Job,
    *,
    least: float = 1e-6,
    most: float = 10.0,
    steps: int = 100,
    device: str = "auto",
    engine: Engine | None = None,
) -> LearningRates:
    """Trains a copy of a job's model while the learning rate rises, and suggests where the loss falls fastest.

    Smith, "Cyclical learning rates for training neural networks" (2017), section 3.3. It trains on one device, in the
    order of the job's data, with its batch size, clipping and precision, without its schedule; the job's model is not
    changed, and nothing is saved. The rates of an optimizer's groups keep their ratios. It ends early when the loss
    becomes much larger than at first.

    Args:
        job: what would be trained.
        least, most: the rates of the first and the last step.
        steps: how many; more of them make noise smaller.
        device, engine: as for `fit`.

    Raises:
        UsageError: the rates or steps make no range, or the optimizer has no learning rate above 0.
        JobError: the loss is no finite number at the first step.
        DataError, RunFailed: as for `fit`.

    Examples:
        >>> found = hr.find_learning_rate(job, steps=30)
        >>> found.rates[0] < found.lowest
        True
    """
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (least, most))
    if not (numbers and 0 < least < most < math.inf):
        raise UsageError(f"least and most must be learning rates, 0 < least < most, got least={least!r}, most={most!r}")
    require_count("steps", steps, _LEAST_STEPS)
    info = inspect_job(job)
    optimizer = one_optimizer(job.optimizer, "find_learning_rate")
    base = _base_rate(build(optimizer, info.module.named_parameters()))
    rates = [least * (most / least) ** (step / (steps - 1)) for step in range(steps)]
    options = replace(
        job.options,
        schedule=partial(_rising, base, least, most, steps),
        schedule_every="step",
        warmup=0,
        ema_decay=None,
        eval_every=None,
        early_stopping=None,
        on_nonfinite="skip",
    )
    tried = replace(job, epochs=None, steps=steps, eval_data=None, callbacks=(), options=options)
    run = fit(tried, OneDevice(), device=device, engine=engine, checkpoints=False, check=False, callbacks=[_Ending()])
    # A step whose batch a filter has emptied has no loss.
    found = sorted((each.step, each.loss) for each in run.events if isinstance(each, Stepped) and each.examples)
    return _judged([(rates[step], loss) for step, loss in found])


class _Ending(Callback):
    """Ends the run when the loss diverges."""

    def __init__(self) -> None:
        self._divergence = _Divergence()

    def on_step(self, moment: Moment) -> None:
        if self._divergence.sees(moment.loss):
            moment.stop("the loss diverges")


class _Divergence:
    """Tells when a running mean of the losses is far above the first."""

    def __init__(self) -> None:
        self._mean = self._first = self._best = 0.0
        self._steps = 0

    def sees(self, loss: float | None) -> bool:
        """Takes the next loss, None where it is not finite, and tells whether training diverges."""
        if loss is None:
            return True
        if not self._steps:
            self._mean = self._first = self._best = loss
        self._steps += 1
        self._mean += (1 - _KEPT) * (loss - self._mean)
        self._best = min(self._best, self._mean)
        # Of losses that may be negative, too.
        return self._mean > self._first + max(self._first - self._best, abs(self._first) / 2)


def _base_rate(optimizer: Optimizer) -> float:
    kind = type(optimizer).__name__
    if any("lr" not in group for group in optimizer.param_groups):
        raise UsageError(
            f"{kind} has no learning rate: its groups have {sorted(optimizer.param_groups[0].keys() - {'params'})} and "
            "no 'lr'; find_learning_rate is for optimizers that have one"
        )
    rate = float(optimizer.param_groups[0]["lr"])
    if not 0 < rate < math.inf:
        raise UsageError(
            f"the learning rate of {kind}'s first group is {rate}; the other groups' keep their ratio to it, so it "
            "must be above 0"
        )
    return rate


def _rising(base: float, least: float, most: float, steps: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: least / base * float((most / least) ** (step / (steps - 1))))


def _judged(found: Sequence[tuple[float, float | None]]) -> LearningRates:
    """Returns what losses by rising rates say, up to where they diverge."""
    diverged: float | None = None
    divergence = _Divergence()
    kept: list[tuple[float, float]] = []
    for rate, loss in found:
        if loss is not None:
            kept.append((rate, loss))
        if divergence.sees(loss):
            diverged = rate
            break
    if not kept:
        raise JobError(
            "the loss of the first step is NaN or infinite, before any update; look for NaN in the data, a logarithm "
            "of 0 or a division by 0 in the model or the loss"
        )
    rates, losses = zip(*kept, strict=True)
    half = max(3, len(found) // _WINDOW)
    windows = [slice(max(0, at - half), at + half + 1) for at in range(len(losses))]
    smoothed = tuple(sum(losses[each]) / len(losses[each]) for each in windows)
    lines = [
        _line([math.log10(rate) for rate in rates[each]], losses[each]) if len(losses[each]) > 2 * half else None
        for each in windows
    ]
    lowest = min(range(len(losses)), key=lambda at: smoothed[at])
    falls = [
        (line[0], at)
        for at, line in enumerate(lines[: lowest + 1])
        if line is not None and -line[0] > max(_SURE * line[1], _NOTABLE * abs(losses[0]))
    ]
    steepest = min(falls, default=None)
    end = f"; from {short(diverged)} on it diverges" if diverged is not None else ""
    if steepest is None:
        why = (
            f"there is no suggestion: from {short(rates[0])} to {short(rates[-1])} the loss never falls by more than "
            f"batches differ by{end}; try smaller or larger rates, or more steps"
        )
    else:
        slope, at = steepest
        why = (
            f"suggested: {short(rates[at])}, where the loss falls fastest, by {short(-slope)} a tenfold rate; it is "
            f"lowest at {short(rates[lowest])}, {short(smoothed[lowest])}{end}"
        )
    return LearningRates(
        rates=rates,
        losses=losses,
        smoothed=smoothed,
        slopes=tuple(None if line is None else line[0] for line in lines),
        suggested=None if steepest is None else rates[steepest[1]],
        lowest=rates[lowest],
        diverged=diverged,
        why=why,
    )


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns the slope of the straight line of least squares through points, and its standard error."""
    count = len(x)
    x_mean, y_mean = sum(x) / count, sum(y) / count
    spread = sum((each - x_mean) ** 2 for each in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (count - 2) / spread)
