"""compare: one job under several strategies, beside what the machine could do at best."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.api.fit import fit
from headrace.api.run import Run, TemporaryRunDir
from headrace.engine.base import Engine
from headrace.engine.local.engine import kept_engine
from headrace.errors import UnfitMachine, UsageError
from headrace.report.model.summary import References, Summary, verdict
from headrace.report.views.page import write_page
from headrace.report.views.table import comparison_plain, comparison_table
from headrace.spec.events import Event
from headrace.spec.job import Job
from headrace.strategies import OneDevice, Strategy, Unconnected, resolve

_MEASURE_S = 8.0


@dataclass(frozen=True)
class Comparison:
    """Several trainings of one job.

    Attributes:
        runs: one a strategy.
        references: what one process with all threads, and unconnected workers, reach here.
        run_dir: one directory a run, `comparison.json`, `report.html`.
        page: the page with pictures.
    """

    runs: tuple[Run, ...]
    references: References
    run_dir: Path
    page: Path
    # Of a comparison that was given no directory.
    _keeper: TemporaryRunDir | None = field(default=None, repr=False)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        console = Console(file=text, width=80, highlight=False)
        console.print(comparison_table(self.summaries, self.references))
        console.print(verdict(self.summaries, self.references))
        return text.getvalue()

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """What the runs' events say, in numbers."""
        return tuple(run.summary for run in self.runs)


def compare(
    job: Job,
    strategies: Sequence[str | Strategy],
    *,
    device: str = "auto",
    run_dir: Path | str | None = None,
    on_event: Callable[[Event], None] | None = None,
    timeout_s: float = 10.0,
    engine: Engine | None = None,
) -> Comparison:
    """Trains a job under each strategy and measures two references on the same machine in the same minutes.

    Args:
        job: what to train.
        strategies: how, by name or as values.
        device, on_event, timeout_s, engine: as for `fit`.
        run_dir: where everything goes; None for a temporary directory that goes with the result.

    Raises:
        UsageError, DataError, UnfitMachine, RunFailed: as for `fit`; the first error ends the comparison.
    """
    chosen = [resolve(strategy) for strategy in strategies]
    if not chosen:
        raise UsageError("nothing to compare: name at least one strategy")
    keeper = TemporaryRunDir() if run_dir is None else None
    directory = Path(keeper.path if keeper else run_dir or ".").absolute()
    if (directory / "comparison.json").exists():
        raise UsageError(f"{directory} holds a comparison already; name another run_dir, or delete it")
    with nullcontext(engine) if engine else kept_engine() as own:

        def run(strategy: Strategy, label: str, job: Job = job, seconds: float | None = None) -> Run:
            return fit(
                job,
                strategy,
                device=device,
                run_dir=directory / label,
                on_event=on_event,
                timeout_s=timeout_s,
                engine=own,
                seconds=seconds,
                checkpoints=False,
            )

        runs = []
        for strategy, label in zip(chosen, _labels(chosen), strict=True):
            runs.append(run(strategy, label))
            if runs[-1].interrupted:
                break
        references = References() if runs[-1].interrupted else _measure(job, runs, run)
    return Comparison(tuple(runs), references, directory, _write(directory, runs, references), keeper)


def _measure(job: Job, runs: Sequence[Run], run: Callable[..., Run]) -> References:
    """Runs, for a few seconds each, one process with all threads and as many unconnected workers as were used."""
    short = replace(job, eval_data=None)
    done = [each.throughput for each in runs if each.plan.strategy == OneDevice.name]
    one_device = done[0] if done else run(OneDevice(), "reference-one-device", short, _MEASURE_S).throughput
    ceilings = {}
    for workers in sorted({each.plan.workers for each in runs} - {1}):
        label = f"reference-{workers}-unconnected"
        rate = run(Unconnected(workers), label, short, _MEASURE_S).throughput
        if rate is not None:
            ceilings[workers] = rate
    return References(one_device_examples_per_s=one_device, ceiling_examples_per_s=ceilings)


def _write(directory: Path, runs: Sequence[Run], references: References) -> Path:
    summaries = [run.summary for run in runs]
    page = directory / "report.html"
    try:
        document = json.dumps(comparison_plain(summaries, references), indent=1)
        (directory / "comparison.json").write_text(document + "\n", encoding="utf-8")
        return write_page(page, summaries, references)
    except OSError as error:
        raise UnfitMachine(f"cannot write the comparison to {directory}: {error.strerror}") from error


def _labels(strategies: Sequence[Strategy]) -> list[str]:
    labels: list[str] = []
    for strategy in strategies:
        same = sum(label.partition("-")[0] == strategy.name for label in labels)
        labels.append(f"{strategy.name}-{same + 1}" if same else strategy.name)
    return labels
