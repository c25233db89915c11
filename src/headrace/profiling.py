"""profile: where a job's time goes. Its input alone, its training with data that costs nothing, and both together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from headrace.data.loader import Loader
from headrace.data.replay import replayed
from headrace.data.torch_source import as_pipeline
from headrace.engine.order import Engine
from headrace.report.bottleneck import Bottleneck
from headrace.report.inputs import Input, Inputs, input_of
from headrace.report.summary import Summary
from headrace.spec.job import Job
from headrace.strategies import Strategy
from headrace.trainer import fit
from headrace.trees import map_tensors, nbytes

__all__ = ["Profile", "profile"]

_ENDLESS = 10**9
"""Rounds; time ends the run."""
_KEPT = 8
_KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class Profile:
    """Where a job's time goes.

    Attributes:
        alone: what the input of one worker did while nothing trained.
        alone_per_s: examples a second of it, after the first batch.
        ceiling: of the training with a handful of batches that lie ready.
        together: of the training with its own input.
    """

    alone: Input
    alone_per_s: float | None
    ceiling: Summary
    together: Summary

    @property
    def bottleneck(self) -> Bottleneck | None:
        """What holds the training up; None where too little was done to say."""
        return self.together.bottleneck

    @property
    def stages(self) -> Inputs:
        """What each stage costs while nothing trains."""
        return Inputs({0: self.alone})


def profile(
    job: Job,
    strategy: Strategy,
    *,
    device: str = "auto",
    seconds: float = 5.0,
    engine: Engine | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Profile:
    """Measures three things one after the other, each for some seconds. Nothing is evaluated or saved.

    Args:
        job: what is trained.
        strategy: how.
        device, engine: as of `fit`.
        seconds: how long each takes; longer where a batch or the first steps need longer.
        say: takes a line on what is measured now.

    Raises:
        UsageError, DataError, UnfitMachine, RunFailed: as for `fit`.
    """
    options = replace(job.options, early_stopping=None, eval_every=None)
    if options.on_nonfinite == "rollback":
        # Without checkpoints there is nothing to roll back to.
        options = replace(options, on_nonfinite="skip")
    endless = replace(job, eval_data=None, epochs=None, steps=_ENDLESS, options=options)

    def train(job: Job) -> Summary:
        run = fit(job, strategy, device=device, engine=engine, seconds=seconds, checkpoints=False)
        return run.summary

    say(f"the input alone, for {seconds:g} s")
    alone, alone_per_s, batches = _read(job, seconds)
    data, size = replayed(batches)
    say(f"the training alone, with {len(data) // size} batches that lie ready, for {seconds:g} s")
    ceiling = train(replace(endless, data=data, global_batch_size=size))
    say(f"both together, for {seconds:g} s")
    return Profile(alone, alone_per_s, ceiling, train(endless))


def _read(job: Job, seconds: float) -> tuple[Input, float | None, list[Any]]:
    """Returns what reading cost, the examples of a second, and a few batches."""
    pipeline, _ = as_pipeline(job.data)
    loader = Loader(pipeline, job.seed, job.global_batch_size, (1,), 0)
    shares = loader.rounds()
    kept: list[Any] = []
    held = examples = 0
    began = warm = perf_counter()
    try:
        for number, share in enumerate(shares):
            now = perf_counter()
            if number == 0:
                # It pays for what is imported, opened and allocated.
                warm = now
            else:
                examples += share.examples
            if share.examples and len(kept) < _KEPT and held < _KEPT_BYTES:
                # Whoever reads may use the memory again.
                kept.append(map_tensors(torch.clone, share.batch))
                held += nbytes(share.batch)
            if now - began > seconds:
                break
    finally:
        shares.close()
    rate = examples / (now - warm) if now > warm else None
    return input_of(loader.stages.event(0, 0.0)), rate, kept
