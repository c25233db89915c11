"""compare: one job under several strategies, beside what the machine could do at best."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.api.arguments import FitArguments
from headrace.api.fit import run_job
from headrace.api.profiling import measured, settle
from headrace.api.run import Run
from headrace.api.run_directory import TemporaryRunDir
from headrace.devices import one_each
from headrace.engine.base import Engine
from headrace.engine.local.engine import kept_engine
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.machine.resources import load_average
from headrace.policies.measurement import Measurement
from headrace.report.model.summary import Summary
from headrace.report.model.verdict import References, compared, verdict
from headrace.report.trackers.listeners import OnEvent
from headrace.report.views.page import page_fragment, write_page
from headrace.report.views.table import comparison_plain, comparison_table
from headrace.spec.events import LAUNCHER
from headrace.spec.job import Job
from headrace.spec.options import require_count
from headrace.strategies import OneDevice, Strategy, Unconnected, resolve
from headrace.worker.run_spec import events_path

_MEASURE_S = 8.0
_ONE_DEVICE = "reference-one-device"


@dataclass(frozen=True)
class Comparison:
    """Several trainings of one job.

    Attributes:
        runs: one a strategy.
        references: what one process with all threads, and unconnected workers, reach here.
        run_dir: one directory a run, `comparison.json`, `report.html`.
        page: the page with pictures.

    Examples:
        >>> found = hr.compare(job, [hr.Mirrored(workers=2)], retries=0)
        >>> found.page.name, sorted(found.references.ceiling_examples_per_s)
        ('report.html', [2])
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

    def _repr_html_(self) -> str:
        """Returns what a notebook shows."""
        return page_fragment(self.summaries, self.references)

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """What the runs' events say, in numbers; of the last measurement, where a rate was measured again."""
        return _summaries(self.runs, self.references)


def compare(
    job: Job,
    strategies: Sequence[str | Strategy],
    *,
    device: str = "auto",
    run_dir: Path | str | None = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    timeout_s: float = 10.0,
    collective_timeout_s: float = 600.0,
    engine: Engine | None = None,
    retries: int = 2,
) -> Comparison:
    """Trains a job under each strategy and measures two references on the same machine in the same minutes.

    Args:
        job: what to train.
        strategies: how, by name or as values.
        device, on_event, timeout_s, collective_timeout_s, engine: as for `fit`.
        run_dir: where everything goes; None for a temporary directory that goes with the result.
        retries: how often a rate is measured again that is impossible, varies much, or was measured on a machine that
            did something else; a strategy whose rate stays so is marked as disturbed, and not recommended.

    Raises:
        UsageError, DataError, UnfitMachine, RunFailed: as for `fit`; the first error ends the comparison.

    Examples:
        >>> [run.status for run in hr.compare(job, ["one_device", hr.Mirrored(workers=2)], retries=0).runs]
        ['ok', 'ok']
    """
    chosen = [resolve(strategy) for strategy in strategies]
    if not chosen:
        raise UsageError("nothing to compare: name at least one strategy")
    _check(device, retries)
    directory, keeper = _directory(run_dir)
    told: set[str] = set()
    with nullcontext(engine) if engine else kept_engine() as own:

        def run(strategy: Strategy, label: str, job: Job = job, seconds: float | None = None) -> Run:
            arguments = FitArguments(
                device=device,
                run_dir=directory / label,
                on_event=on_event,
                timeout_s=timeout_s,
                collective_timeout_s=collective_timeout_s,
                engine=own,
                seconds=seconds,
                checkpoints=False,
                # A measurement repeats a training, whose model was probed.
                check=seconds is None,
                told=frozenset(told),
            )
            found = run_job(job, None, strategy, arguments)
            told.update(found.summary.outcome.notices)
            return found

        session = _Session(job, run, retries)
        runs = session.train(chosen)
        references = References() if runs[-1].interrupted else session.references(runs)
        references = replace(references, may_differ=session.may_differ)
    return Comparison(tuple(runs), references, directory, _write(directory, runs, references), keeper)


def _check(device: str, retries: int) -> None:
    require_count("retries", retries, least=0)
    if len(one_each(device)) > 1:
        raise UsageError(
            f"compare measures strategies and references on devices of one kind, got device={device!r:.60}; name the "
            "kind, or train each strategy by fit (headrace train)"
        )


def _directory(run_dir: Path | str | None) -> tuple[Path, TemporaryRunDir | None]:
    keeper = TemporaryRunDir() if run_dir is None else None
    directory = Path(keeper.path if keeper else run_dir or ".").absolute()
    if disk.exists(directory / "comparison.json"):
        raise UsageError(f"{directory} holds a comparison already; name another run_dir, or delete it")
    if disk.exists(events_path(directory, LAUNCHER)):
        raise UsageError(f"{directory} holds a run already; name another run_dir, or delete it")
    return directory, keeper


class _Session:
    """Trains, measures references, and measures again what is doubtful.

    Args:
        run: runs a strategy under a label; a job and a number of seconds may follow.
    """

    def __init__(self, job: Job, run: Callable[..., Run], retries: int) -> None:
        self._run = run
        self._retries = retries
        # Rates are measured without evaluations, which early stopping would need.
        self._short = replace(job, eval_data=None, callbacks=(), options=replace(job.options, early_stopping=None))
        self._strategies: dict[str, Strategy] = {}
        self._measured: dict[str, Measurement] = {}

    @property
    def may_differ(self) -> tuple[str, ...]:
        """The labels of strategies that need not equal one device."""
        return tuple(label for label, each in self._strategies.items() if not each.equals_one_device)

    def train(self, strategies: Sequence[Strategy]) -> list[Run]:
        """Trains the job under each strategy, until one run is interrupted."""
        runs: list[Run] = []
        average = load_average()
        for strategy, label in zip(strategies, _labels(strategies), strict=True):
            found, self._measured[label] = measured(functools.partial(self._run, strategy, label), average)
            self._strategies[label] = strategy
            runs.append(found)
            if found.interrupted:
                break
            # From now on our own runs are in it.
            average = None
        return runs

    def references(self, runs: Sequence[Run]) -> References:
        """Measures one process with all threads, as many unconnected workers as were used, and the doubtful again."""
        labels = [label for label, run in zip(self._measured, runs, strict=True) if run.plan.strategy == OneDevice.name]
        one = labels[0] if labels else _ONE_DEVICE
        if not labels:
            self._strategies[one] = OneDevice()
            self._measured[one] = self._measure(OneDevice(), one)[1]
        ceilings = {}
        for workers in sorted({each.plan.workers for each in runs} - {1}):
            _, ceiling = self._measure(Unconnected(workers), f"reference-{workers}-unconnected")
            if ceiling.rate is not None:
                ceilings[workers] = ceiling.rate
        again: dict[str, str] = {}

        def measure_again(label: str, attempt: int) -> Measurement | None:
            name = f"again-{attempt}-{label}"
            found, measurement = self._measure(self._strategies[label], name)
            if found.interrupted or measurement.rate is None:
                return None
            again[label] = name
            return measurement

        doubtful = dict(settle(self._measured, one, measure_again, self._retries))
        return References(
            one_device_examples_per_s=self._measured[one].rate,
            ceiling_examples_per_s=ceilings,
            doubts={label: why for label, why in doubtful.items() if label != _ONE_DEVICE},
            one_device_doubts=doubtful.get(one, ()),
            measured_again={label: name for label, name in again.items() if label != _ONE_DEVICE},
        )

    def _measure(self, strategy: Strategy, label: str) -> tuple[Run, Measurement]:
        return measured(lambda: self._run(strategy, label, self._short, _MEASURE_S))


def _summaries(runs: Sequence[Run], references: References) -> tuple[Summary, ...]:
    return tuple(compared(run.run_dir.parent, run.run_dir.name, references) for run in runs)


def _write(directory: Path, runs: Sequence[Run], references: References) -> Path:
    summaries = _summaries(runs, references)
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
