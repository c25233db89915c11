"""Evaluations over the whole evaluation set, each example once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batches import placed, select_target
from headrace.collectives.base import ProcessGroup
from headrace.data.loading.loader import Loader
from headrace.data.loading.transfer import delivered
from headrace.devices import HOST
from headrace.metrics import weigh
from headrace.modules import evaluating
from headrace.spec.job import Job, Share
from headrace.spec.parameter_sets import loss_name
from headrace.training.exchange import Replica
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.shared_buffers.synced import average_by_weight
from headrace.worker.evaluations.accumulated import Accumulated, accumulates
from headrace.worker.evaluations.loss import LossOfModel, loss_in


class Evaluation:
    """Computes the loss and the metrics, with averaged statistics, and averaged weights if it `swaps_weights`.

    `loaders` take rank and number of ranks, and return the loader of that rank's part of the evaluation data: one for
    each set, by what the names of its metrics begin with.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        loaders: Mapping[str, Callable[[int, int], Loader]],
        group: ProcessGroup,
        swaps_weights: bool,
    ) -> None:
        self._job = job
        self._swaps_weights = swaps_weights
        self._replica = replica
        self._loaders = loaders
        self._group = group
        self._mates = replica.compute.mates or group

    def run(self, weight: float, check: Callable[[], object] = int) -> tuple[dict[str, float], int]:
        """Returns the metrics, the same on every worker, and how many examples were counted.

        `weight` is that of this worker's running statistics in their mean; `check` is called when averages are in
        place.
        """
        metrics: dict[str, float] = {}
        examples = 0
        with self._replica.trained_weights(), self._averaged(weight), evaluating(self._replica.compute.module):
            check()
            for prefix, loader in self._loaders.items():
                found, count = self._over(loader(self._group.rank, self._group.world))
                metrics |= {f"{prefix}{name}": value for name, value in found.items()}
                examples += count
        return metrics, examples

    def _over(self, loader: Loader) -> tuple[dict[str, float], int]:
        job, task = self._job, self._job.task
        losses, measures = _losses_of(job, self._replica.compute.module)
        measures |= {**(task.metrics if task else {}), **(job.metrics or {})}
        names = (*losses, *measures)
        accumulated = {name: Accumulated(name, one, task) for name, one in measures.items() if accumulates(one)}
        measures = {name: one for name, one in measures.items() if name not in accumulated}
        means = (*losses, *measures)
        sums = Sums(2 * len(means) + 1)
        for share in delivered(loader.sweep(), self._replica.compute.device):
            if share.examples:
                self._measure(share, losses, measures, accumulated, sums)
            else:
                self._replica.compute.attend()
        totals = self._group.sum(sums.read())
        metrics = {name: totals[2 * i] / totals[2 * i + 1] for i, name in enumerate(means) if totals[2 * i + 1]}
        if totals[-1]:
            metrics |= {name: each.total(self._group) for name, each in accumulated.items()}
        return {name: metrics[name] for name in names if name in metrics}, int(totals[-1])

    def _measure(
        self,
        share: Share,
        losses: Mapping[str, Any],
        measures: Mapping[str, Any],
        accumulated: Mapping[str, Accumulated],
        sums: Sums,
    ) -> None:
        compute = self._replica.compute
        output = compute.predict(share.batch)
        if not compute.counts:
            return
        batch = placed(share.batch, compute.device)
        target = select_target(batch, self._job.target)
        # With gradients, which a loss may be made of (a penalty on them).
        values = {name: loss(compute.module, batch) for name, loss in losses.items()}
        values |= {name: measure(output, target) for name, measure in measures.items()}
        for index, (name, value) in enumerate(values.items()):
            total, weight = weigh(value, share.examples, name)
            sums.add(2 * index, total.detach())
            sums.add(2 * index + 1, weight)
        for each in accumulated.values():
            each.add(output, target)
        sums.add(-1, float(share.examples))

    @contextmanager
    def _averaged(self, weight: float) -> Iterator[None]:
        buffers = averaged_buffers(self._replica.compute.module) if self._mates.world > 1 else []
        # A loss that follows its values goes on with those of training.
        loss = loss_in(self._replica.compute.module, self._job.loss)
        kept = [*buffers, *(loss.buffers() if isinstance(self._job.loss, LossOfModel) else ())]
        own = [buffer.clone() for buffer in kept]
        average_by_weight(buffers, self._mates, weight)
        try:
            with self._replica.exchange.swapped_weights() if self._swaps_weights else nullcontext():
                yield
        finally:
            # If a worker is lost, the evaluation is repeated.
            with torch.no_grad():
                for buffer, saved in zip(kept, own, strict=True):
                    buffer.copy_(saved)


class Sums:
    """Sums of numbers, in double precision; those of numbers on an accelerator stay there until they are read."""

    def __init__(self, count: int) -> None:
        self._here = [0.0] * count
        self._there: dict[int, Tensor] = {}

    def add(self, index: int, number: float | Tensor) -> None:
        """Adds a number to a sum."""
        if isinstance(number, Tensor) and number.device.type != HOST:
            known = self._there.get(index)
            self._there[index] = number.double() if known is None else known + number
        else:
            self._here[index] += float(number)

    def read(self) -> list[float]:
        """Returns the sums, read in one copy."""
        found = [*self._here]
        if self._there:
            for index, number in zip(self._there, torch.stack([*self._there.values()]).tolist(), strict=True):
                found[index] += number
        return found


def _losses_of(job: Job, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the losses by name: those of the model and a batch, of sets, and that of output and target."""
    if isinstance(job.loss, Mapping):
        return {loss_name(name): loss for name, loss in job.loss.items()}, {}
    return {}, {"loss": job.task.loss if job.task else loss_in(module, job.loss)}
