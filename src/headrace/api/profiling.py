"""Measures runs, and what else the machine does meanwhile; a job's input alone, its training with data in memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import torch

from headrace.api.fit import fit, launch
from headrace.api.run import Run
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.data.pipeline.combined import replayed
from headrace.engine.base import Engine
from headrace.machine.resources import ProcessorTimes, processor_times
from headrace.policies.measurement import MachineLoad, Measurement, doubts
from headrace.report.model.bottleneck import Bottleneck
from headrace.report.model.inputs import InputSummary
from headrace.report.model.summary import Summary
from headrace.spec.events import InputStats
from headrace.spec.job import Job
from headrace.strategies import OneDevice, Strategy
from headrace.trees import map_tensors, nbytes
from headrace.worker.worker import Worker

_ENDLESS = 10**9
"""Rounds; time ends the run."""
_KEPT = 8
_KEPT_BYTES = 256 << 20
_LOOK_S = 0.25
"""How long other programs are watched before a run and after it."""


@dataclass(frozen=True)
class Profile:
    """Where a job's time goes.

    Attributes:
        alone: the input of one worker while nothing trained.
        alone_per_s: its examples a second, after the first second.
        ceiling: the training with a few batches in memory.
    """

    alone: InputStats
    alone_per_s: float | None
    ceiling: Summary
    together: Summary

    @property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the training; None where too little was done to tell."""
        return self.together.bottleneck

    @property
    def stages(self) -> InputSummary:
        """What each stage costs while nothing trains."""
        return InputSummary({0: self.alone})


def profile(
    job: Job,
    strategy: Strategy,
    *,
    device: str = "auto",
    seconds: float = 5.0,
    engine: Engine | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Profile:
    """Measures the three, each for some seconds, or longer where a batch or the first steps need longer.

    Nothing is evaluated or saved. The other arguments and errors are those of `fit`.
    """
    options = job.options
    if options.on_nonfinite == "rollback":
        # Without checkpoints there is nothing to roll back to.
        options = replace(options, on_nonfinite="skip")
    endless = without_end(replace(job, options=options))

    def train(job: Job) -> Summary:
        return fit(job, strategy, device=device, engine=engine, seconds=seconds, checkpoints=False).summary

    say(f"the input alone, for {seconds:g} s")
    # In a worker of its own, since how a worker reads depends on the rest of its process.
    reading = functools.partial(_read, seconds=seconds)
    events = launch(reading, endless, OneDevice(), device=device, engine=engine, checkpoints=False).events
    alone = [event for event in events if isinstance(event, InputStats)]
    ready = with_ready_data(endless, seconds)
    count = len(ready.data) // ready.global_batch_size
    say(f"the training alone, with {count} batches that lie ready, for {seconds:g} s")
    ceiling = train(ready)
    say(f"both together, for {seconds:g} s")
    return Profile(alone[-1], _rate(alone), ceiling, train(endless))


def without_end(job: Job) -> Job:
    """Returns a job that trains until it is stopped, and evaluates nothing."""
    options = replace(job.options, early_stopping=None, eval_every=None)
    return replace(job, eval_data=None, callbacks=(), epochs=None, steps=_ENDLESS, options=options)


def with_ready_data(job: Job, seconds: float) -> Job:
    """Returns a job whose data is a few batches in memory, for whose reading there are so many seconds."""
    data, size = replayed(_batches(job, seconds))
    return replace(job, data=data, global_batch_size=size)


def _read(worker: Worker, seconds: float) -> None:
    """A training loop that only reads."""
    until: float | None = None
    for _ in worker.batches():
        if until is None:
            until = monotonic() + seconds
        elif monotonic() > until:
            break


def _rate(stats: Sequence[InputStats]) -> float | None:
    """Returns the examples of a second, without the first one, in which files are opened."""
    first, last = stats[0], stats[-1]
    examples, seconds = last.examples - first.examples, last.seconds - first.seconds
    if examples <= 0 or seconds <= 0:
        examples, seconds = last.examples, last.seconds
    return examples / seconds if seconds > 0 else None


def _batches(job: Job, seconds: float) -> list[Any]:
    """Returns a few batches, read one after the other."""
    pipeline, _ = as_pipeline(job.data)
    shares = Loader(pipeline, job.seed, job.global_batch_size, (1,), 0).sweep(alone=True)
    kept: list[Any] = []
    held, until = 0, monotonic() + seconds
    try:
        for share in shares:
            if share.examples:
                # The reader may use the memory again.
                kept.append(map_tensors(torch.clone, share.batch))
                held += nbytes(share.batch)
            if len(kept) >= _KEPT or held >= _KEPT_BYTES or (kept and monotonic() > until):
                break
    finally:
        shares.close()
    return kept


def measured(run: Callable[[], Run], average: float | None = None) -> tuple[Run, Measurement]:
    """Runs something and returns it with its measurement.

    Args:
        average: the machine's load average, if no run of ours is in it.
    """
    others = _busy_others()
    before = processor_times()
    result = run()
    after = processor_times()
    others = max(others, _busy_others())
    summary = result.summary
    machine = None
    if before is not None and after is not None and summary.started.device == "cpu":
        used = min(after.cores, summary.workers * summary.started.threads)
        passed = after.total_s - before.total_s
        stolen = (after.stolen_s - before.stolen_s) / passed if passed > 0 else 0.0
        machine = MachineLoad(after.cores, used, others, stolen, average)
    return result, Measurement(summary.examples_per_s, summary.workers, summary.training.spread, machine)


def _busy_others() -> float:
    """Returns how many cores other programs keep busy now: no run of ours computes at this time."""
    before, own = processor_times(), time.process_time()
    began = monotonic()
    time.sleep(_LOOK_S)
    after: ProcessorTimes | None = processor_times()
    passed = monotonic() - began
    if before is None or after is None or passed <= 0:
        return 0.0
    return max(0.0, after.busy_s - before.busy_s - (time.process_time() - own)) / passed


def settle(
    found: dict[str, Measurement], one: str, again: Callable[[str, int], Measurement | None], retries: int
) -> Mapping[str, tuple[str, ...]]:
    """Measures again what is doubtful, at most so many times, and returns what stays doubtful and why, by label.

    Args:
        found: the measurements by label; new ones replace those before.
        one: the label of one device.
        again: measures a run again, given its label and the number of the attempt; None ends the measuring.
    """
    for attempt in range(1, retries + 1):
        doubtful = _doubtful(found, one)
        # A rate that one device makes impossible may be that one's fault.
        impossible = any(doubts(each, found[one].rate) != doubts(each, None) for each in found.values())
        for label in [*doubtful, *([one] if impossible and one not in doubtful else [])]:
            measurement = again(label, attempt)
            if measurement is None:
                return _doubtful(found, one)
            found[label] = measurement
        if not doubtful:
            break
    return _doubtful(found, one)


def _doubtful(found: Mapping[str, Measurement], one: str) -> dict[str, tuple[str, ...]]:
    why = {label: doubts(each, found[one].rate) for label, each in found.items()}
    return {label: reasons for label, reasons in why.items() if reasons}
