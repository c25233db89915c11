"""Evaluations over the whole evaluation set, each example once, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from headrace.batches import select_target
from headrace.collectives.base import ProcessGroup
from headrace.data import Loader
from headrace.errors import UsageError
from headrace.metrics import weigh
from headrace.modules import evaluating
from headrace.spec.job import Job, Share
from headrace.spec.options import EarlyStopping
from headrace.spec.parameter_sets import loss_name
from headrace.training.batch_norm import averaged_buffers
from headrace.training.exchange import Replica


class Evaluation:
    """Computes the loss and the metrics, with averaged weights and statistics if there are any.

    `loader` takes rank and number of ranks, and returns the loader of that rank's part of the evaluation data.
    """

    def __init__(self, job: Job, replica: Replica, loader: Callable[[int, int], Loader], group: ProcessGroup) -> None:
        self._job = job
        self._replica = replica
        self._loader = loader
        self._group = group
        self._mates = replica.compute.mates or group

    def run(self, weight: float) -> tuple[dict[str, float], int]:
        """Returns the metrics, the same on every worker, and how many examples were counted.

        `weight` is that of this worker's running statistics in their mean.
        """
        job, task = self._job, self._job.task
        losses, measures = _losses_of(job)
        measures |= {**(task.metrics if task else {}), **(job.metrics or {})}
        names = (*losses, *measures)
        sums = [0.0] * (2 * len(names) + 1)
        module = self._replica.compute.module
        with self._replica.trained_weights(), self._averaged(weight), evaluating(module):
            for share in self._loader(self._group.rank, self._group.world).sweep():
                if share.examples:
                    self._measure(share, losses, measures, sums)
                else:
                    self._replica.compute.attend()
        totals = self._group.sum(sums)
        metrics = {name: totals[2 * i] / totals[2 * i + 1] for i, name in enumerate(names) if totals[2 * i + 1]}
        return metrics, int(totals[-1])

    def _measure(self, share: Share, losses: Mapping[str, Any], measures: Mapping[str, Any], sums: list[float]) -> None:
        compute = self._replica.compute
        output = compute.predict(share.batch)
        if not compute.counts:
            return
        target = compute.place(select_target(share.batch, self._job.target))
        batch = compute.place(share.batch) if losses else None
        # With gradients, which a loss may be made of (a penalty on them).
        values = {name: loss(compute.module, batch) for name, loss in losses.items()}
        values |= {name: measure(output, target) for name, measure in measures.items()}
        for index, (name, value) in enumerate(values.items()):
            total, weight = weigh(value, share.examples, name)
            sums[2 * index] += float(total.detach())
            sums[2 * index + 1] += float(weight)
        sums[-1] += share.examples

    @contextmanager
    def _averaged(self, weight: float) -> Iterator[None]:
        buffers = averaged_buffers(self._replica.compute.module) if self._mates.world > 1 else []
        own = [buffer.clone() for buffer in buffers]
        average(buffers, self._mates, weight)
        averages = self._job.options.ema_decay is not None
        try:
            with self._replica.exchange.swapped_weights() if averages else nullcontext():
                yield
        finally:
            # If a worker is lost, the evaluation is repeated.
            with torch.no_grad():
                for buffer, saved in zip(buffers, own, strict=True):
                    buffer.copy_(saved)


def _losses_of(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the losses by name: those of the model and a batch, of sets, and that of output and target."""
    if isinstance(job.loss, Mapping):
        return {loss_name(name): loss for name, loss in job.loss.items()}, {}
    return {}, {"loss": job.task.loss if job.task else job.loss}


def average(buffers: list[Tensor], group: ProcessGroup, weight: float = 1.0) -> None:
    """Replaces running statistics by their means over the workers, where each has a weight."""
    if group.world == 1 or not buffers:
        return
    (total,) = group.sum([weight])
    part = weight / total if total else 1 / group.world
    means = [buffer.cpu() * part for buffer in buffers]
    for mean in means:
        group.all_reduce(mean)
    # Only when all are complete: if a worker is lost before, the whole evaluation is repeated.
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean)


class EarlyStopper:
    """Counts the evaluations without improvement; without the option it never stops the run."""

    def __init__(self, option: EarlyStopping | None) -> None:
        self._option = option
        self._follows = f"{option.mode} {option.metric}" if option else ""
        self._best = math.inf
        self._best_step = 0
        self._waited = 0

    @property
    def over(self) -> bool:
        """Whether the run is to stop."""
        return self._option is not None and self._waited >= self._option.patience

    def see(self, metrics: Mapping[str, float], step: int) -> str | None:
        """Adds an evaluation; returns a notice if the run stops because of it.

        Raises:
            UsageError: the evaluation has no such metric.
        """
        option = self._option
        if option is None:
            return None
        if option.metric not in metrics:
            raise UsageError(
                f"early stopping follows {option.metric!r}, and the evaluation has {', '.join(metrics)} alone"
            )
        sign = 1 if option.mode == "min" else -1
        value = sign * metrics[option.metric]
        # NaN is no improvement.
        if value < self._best - option.min_delta:
            self._best, self._best_step, self._waited = value, step, 0
            return None
        self._waited += 1
        if not self.over:
            return None
        return (
            f"ends early: {option.metric} has got no better for {option.patience} "
            f"evaluation{'s' * (option.patience != 1)}; "
            f"best {sign * self._best:.4g} after {self._best_step} step{'s' * (self._best_step != 1)}"
        )

    def agree(self, group: ProcessGroup) -> None:
        """Copies the state of the group's first worker, which has seen the most evaluations."""
        own = (self._best if math.isfinite(self._best) else math.nan, self._best_step, self._waited)
        best, step, waited = group.sum(own if group.rank == 0 else [0.0] * len(own))
        self._best = math.inf if math.isnan(best) else best
        self._best_step, self._waited = int(step), int(waited)

    def state(self) -> dict[str, float | str | None]:
        """Returns the state as JSON values."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "best_step": self._best_step, "waited": self._waited, "follows": self._follows}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what `state` returned, if the option is the same."""
        if state["follows"] != self._follows:
            return
        self._best = math.inf if state["best"] is None else float(state["best"])
        self._best_step, self._waited = int(state["best_step"]), int(state["waited"])
