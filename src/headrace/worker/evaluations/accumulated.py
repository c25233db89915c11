"""Metrics that are no means over examples: objects of torchmetrics, whose states the workers exchange."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import safetensors.torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup, gather_bytes
from headrace.errors import UsageError
from headrace.tasks import Task
from headrace.training.whole_model import cut

if TYPE_CHECKING:
    from torchmetrics import Metric

_JOINED = "its states must be sums, minima, maxima, or lists that are joined (dist_reduce_fx='cat')"
_TOLERANCE = 1e-4
"""Of sums in single precision."""


def accumulates(metric: object) -> bool:
    """Returns whether a metric is an object of torchmetrics, or a collection of such."""
    # If it is one, torchmetrics has been imported.
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(metric, library.Metric | library.MetricCollection)


class Accumulated:
    """A metric of torchmetrics over one evaluation; the job's own object stays as it is.

    With a task it gets predictions and labels, else output and target as they are.

    Raises:
        UsageError: the task has no predictions for it, or it is a collection.
    """

    def __init__(self, name: str, metric: Metric, task: Task | None) -> None:
        # Not before, because few jobs have such metrics.
        import torchmetrics

        if not isinstance(metric, torchmetrics.Metric):
            raise UsageError(
                f"the metric {name!r} is a MetricCollection, and an evaluation has one number for each name; give "
                "each of its metrics by itself: metrics=dict(collection.items())"
            )
        if task is not None and task.scores_and_labels is None:
            raise UsageError(
                f"the metric {name!r} is of torchmetrics, and the task {task.name} has no predictions and labels for "
                "it; give a function that returns an hr.Mean, or compute it of run.predict"
            )
        self._name = name
        self._taken = task.scores_and_labels if task else None
        self._metric = metric.clone()
        self._metric.reset()
        self._empty = True

    def add(self, output: Any, target: Any) -> None:
        """Adds a batch."""
        if self._taken is not None:
            output, target = self._taken(output, target)
        if isinstance(output, Tensor):
            self._metric.to(output.device)
        self._metric.update(output, target)
        self._empty = False

    def total(self, group: ProcessGroup) -> float:
        """Returns the value over the examples of all ranks, at least one of which has some; every rank calls it."""
        own = b"" if self._empty else safetensors.torch.save(self.state())
        states = {rank: content for rank, content in enumerate(gather_bytes(group, own)) if content}
        # One computes, so that all have the same bits.
        first, *others = states
        value = self.value([safetensors.torch.load(states[rank]) for rank in others]) if group.rank == first else 0.0
        return group.sum([value])[0]

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of its state, those of a list joined; without lists that are empty."""
        from torchmetrics.utilities import dim_zero_cat

        return {
            name: (dim_zero_cat(value) if isinstance(value, list) else value).detach().cpu().clone().contiguous()
            for part, names in self._parts()
            for name, value in zip(names, part.metric_state.values(), strict=True)
            if not isinstance(value, list) or value
        }

    def value(self, others: Sequence[Mapping[str, Tensor]] = ()) -> float:
        """Returns the value over its examples and those of other states."""
        exchanges = [_Exchange(self._name, part, names, others) for part, names in self._parts()]
        value = self._metric.compute()
        if not all(exchange.done for exchange in exchanges):
            raise UsageError(f"the metric {self._name!r} does not exchange its states; leave out sync_on_compute=False")
        if not isinstance(value, Tensor) or value.dim() != 0:
            form = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the metric {self._name!r} gives {form}, and an evaluation has one number for each name; average it "
                "over classes (average='macro'), or give a metric for each"
            )
        return float(value)

    def require_no_means(self) -> None:
        """Raises UsageError where states of ranks are averaged, as if all had as many examples."""
        for part, _ in self._parts():
            before: dict[str, Any] = part.metric_state
            part.sync(
                dist_sync_fn=lambda tensor, group=None: [tensor, tensor + 2 * _beyond(tensor)],
                distributed_available=lambda: True,
            )
            after: dict[str, Any] = part.metric_state
            part.unsync()
            if any(isinstance(own, Tensor) and _is_mean(after[name], own) for name, own in before.items()):
                raise UsageError(f"the metric {self._name!r} averages states of workers: {_JOINED}")

    def _parts(self) -> Iterator[tuple[Metric, list[str]]]:
        """Yields the metric and those that it is made of, each with names for its states, in their order."""
        import torchmetrics

        parts: list[Any] = [module for module in self._metric.modules() if isinstance(module, torchmetrics.Metric)]
        for number, part in enumerate(parts):
            yield part, [f"{number}.{name}" for name in part.metric_state]


def _beyond(tensor: Tensor) -> int:
    """Returns a number of at least twice each element of a tensor.

    The mean of x and x + 2 of it is then as far from their sum and from each of them as that, however it is rounded.
    """
    return 2 * math.ceil(max(1.0, float(tensor.double().abs().nan_to_num(0.0, 0.0).max()))) if tensor.numel() else 2


def _is_mean(found: Tensor, own: Tensor) -> bool:
    apart = found.double() - own.double() - _beyond(own)
    return bool((apart.abs() <= _TOLERANCE * _beyond(own)).all())


class _Exchange:
    """What torchmetrics calls with each tensor of a state, in order, for those of all ranks."""

    def __init__(self, metric: str, part: Metric, names: Sequence[str], others: Sequence[Mapping[str, Tensor]]) -> None:
        self._metric = metric
        self._names = [*reversed(names)]
        self._others = others
        part.dist_sync_fn = self
        part.distributed_available_fn = lambda: True

    @property
    def done(self) -> bool:
        """Whether it was called with each."""
        return not self._names

    def __call__(self, tensor: Tensor, group: object = None) -> list[Tensor]:
        if self.done:
            raise UsageError(f"the metric {self._metric!r} keeps a list that workers cannot exchange: {_JOINED}")
        name = self._names.pop()
        found = [state[name].to(tensor.device) for state in self._others if name in state]
        # What stands for an empty list may be of another type.
        return found if found and not tensor.numel() else [tensor, *found]


def check_accumulated(name: str, metric: Metric, task: Task | None, output: Any, target: Any, examples: int) -> None:
    """Computes a metric on a few examples, and on two uneven parts of them.

    Raises:
        UsageError: it gives no number, or something else of parts.
    """
    whole, part, other = (Accumulated(name, metric, task) for _ in range(3))
    with warnings.catch_warnings():
        # Of a class without examples, say.
        warnings.simplefilter("ignore")
        whole.add(output, target)
        if examples == 1:
            whole.value()
            return
        first, second = (cut((output, target), at, at + 1, examples, "a metric") for at in (0, 1))
        for pieces, into in (((second,), whole), ((first, second), part), ((second,), other)):
            for piece in pieces:
                into.add(*piece)
        part.require_no_means()
        one, both = whole.value(), part.value([other.state()])
    if math.isnan(one) and math.isnan(both):
        return
    if not math.isclose(one, both, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        raise UsageError(
            f"the metric {name!r} is {one:.6g} of {examples + 1} examples, and {both:.6g} where two workers have parts "
            f"of them: {_JOINED}; or compute it of run.predict"
        )
