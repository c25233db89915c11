"""Is the loss of a batch, or a metric, the weighted mean of those of its parts?

If not, N workers do not train with the loss of one device: a mean over tokens is weighted by examples, a loss over the
whole batch compares other examples. And the evaluation of a metric, a weighted mean over batches, is not the metric of
the whole set. It is measured in eval mode, where dropout and BatchNorm do nothing of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.probes.finding import Finding, Scope
from headrace.api.probes.parts.sample import Sample
from headrace.batches import call, examples_of, select_target
from headrace.errors import in_one_line
from headrace.internals import BatchNorm
from headrace.metrics import Mean, weigh
from headrace.spec.job import Share
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trial import drawn, loss_of, trial
from headrace.training.user_code.untouched import untouched
from headrace.training.whole_model import cut
from headrace.trees import map_tensors
from headrace.worker.session import seed_torch

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}
_HALF_TOLERANCE = 0.05
_WHERE = "the loss"
_STEPS = (0.5, 1.0, 1.0, 2.0, 4.0)
"""By which outputs are moved along the gradients of the sum of their losses."""
_DRAWS = 3
_RANDOM = 0.25
"""How far from 2 the ratio of two sums may be, whose random numbers differ."""


def probe_split_loss(sample: Sample) -> Sequence[Finding]:
    """Compares the loss of a batch with the weighted mean of those of its parts."""
    module, batch, objective, count = sample.module, sample.batch, sample.objective, sample.count
    with trial(module):
        use_running_statistics(module)
        before = drawn()
        loss = _settled(module, batch, objective)
        if drawn() != before:
            # Two runs on the same batch would differ.
            ratio = _ratio_of_twice(sample)
            if abs(ratio - 2) < _RANDOM:
                return (_sum(f"that of a batch and the same once more is {ratio:.3g} times that of the batch"),)
            return (_undecided("the model draws random numbers in eval mode, too"),)
        whole = _value(loss, count)

        def value(low: int, high: int) -> tuple[float, float]:
            return _value(loss_of(module, sample.part(low, high), objective), high - low)

        try:
            parts = _of_parts(value, count)
        except Exception as error:  # whatever a user's model or loss raises
            return (_failed(count, error),)
        tolerance = _tolerance(module, loss)
        apart = _compare(whole, parts, tolerance)
        if apart and not isinstance(loss, Mean):
            total, added = apart[0], sum(value / length for value, length in parts)
            if abs(total - added) <= tolerance * abs(total):
                return (_sum(f"that of a batch of {count} examples, {total:.6g}, is the sum of its parts' losses"),)
        apart = apart or _compare_elsewhere(sample, tolerance)
    return (_finding(isinstance(loss, Mean), count, *apart),) if apart else ()


def loss_apart(
    module: nn.Module, objective: Objective, whole: Share, parts: Sequence[Share]
) -> tuple[float, float] | None:
    """Returns the loss of a batch and the weighted mean of those of its parts, read for themselves, if they differ."""
    with trial(module):
        use_running_statistics(module)
        before = drawn()
        loss, *losses = [_settled(module, share.batch, objective) for share in (whole, *parts)]
        if drawn() != before:
            return None
        values = [_value(each, part.examples) for each, part in zip(losses, parts, strict=True)]
        return _compare(_value(loss, whole.examples), values, _tolerance(module, loss))


def _compare_elsewhere(sample: Sample, tolerance: float) -> tuple[float, float] | None:
    """Compares the losses of other outputs, on the way to smaller ones: where all are alike at first, or a limit is met
    later. The model runs once."""
    batch, objective, count = sample.batch, sample.objective, sample.count
    # A task's loss is a mean of any outputs.
    if objective.model is not None or is_ours(objective.loss):
        return None
    output, target = call(sample.module, batch, objective.inputs), select_target(batch, objective.target)

    def value(low: int, high: int) -> tuple[Any, float]:
        with untouched(objective.loss):
            parts = (cut(each, low, high, count, "a probe") for each in (output, target))
            total, weight = weigh(objective.loss(*parts), high - low, "the loss")
        return total, float(weight)

    for step in _STEPS:
        with torch.enable_grad():
            leaves: list[Tensor] = []
            output = map_tensors(partial(_leaf, leaves), output)
            whole, weight = value(0, count)
        if not leaves or not whole.requires_grad:
            return None
        parts = [(float(total), each) for total, each in _of_parts(value, count)]
        if apart := _compare((float(whole), weight), parts, tolerance):
            return apart
        slopes = torch.autograd.grad(whole, leaves, allow_unused=True)
        with torch.no_grad():
            for leaf, slope in zip(leaves, slopes, strict=True):
                if slope is not None:
                    leaf.sub_(slope * _apart_from_each_other(leaf), alpha=step * count)
    return None


def is_ours(loss: Any) -> bool:
    return str(getattr(loss.func if isinstance(loss, partial) else loss, "__module__", "")).startswith("headrace.")


def _apart_from_each_other(values: Tensor) -> Tensor:
    """Returns a factor for each row, so that rows that are alike do not stay so."""
    rows = len(values) if values.dim() else 1
    factors = torch.linspace(0.2, 2.0, rows, dtype=values.dtype, device=values.device)
    return factors.reshape(rows, *(1 for _ in values.shape[1:])) if values.dim() else factors[0]


def _leaf(leaves: list[Tensor], tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    leaves.append(tensor.detach().requires_grad_())
    return leaves[-1]


def _settled(module: nn.Module, batch: Any, objective: Objective) -> Any:
    """Returns the loss of a batch in eval mode; in train mode, but for BatchNorm, where it cannot be computed there."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return loss_of(module, batch, objective)
    except Exception:
        # Of a model that gives losses in train mode, and predictions in eval mode.
        for part, mode in modes:
            part.training = mode and not isinstance(part, BatchNorm)
        return loss_of(module, batch, objective)


def _ratio_of_twice(sample: Sample) -> float:
    """Returns the loss of a batch and the same once more over that of the batch: 1 for a mean, 2 for a sum."""

    def mean_of(given: Any, examples: int) -> float:
        values = []
        for seed in range(_DRAWS):
            seed_torch(seed)
            total, weight = _value(loss_of(sample.module, given, sample.objective), examples)
            values.append(total / weight if weight else math.nan)
        return sum(values) / len(values)

    once = mean_of(sample.batch, sample.count)
    twice = mean_of(map_tensors(lambda tensor: torch.cat([tensor, tensor]), sample.batch), 2 * sample.count)
    return twice / once if once else math.nan


def probe_split_metrics(
    module: nn.Module, batch: Any, taken: Callable[[Any], tuple[Any, Any]], metrics: Mapping[str, Callable[..., Any]]
) -> Sequence[Finding]:
    """Compares the metrics of a batch with the weighted means of those of its parts.

    `taken` returns what the metrics get of a batch: the model's output, and the target.
    """
    count = examples_of(batch)
    with trial(module):
        module.eval()
        use_running_statistics(module)
        before = drawn()

        def part_of(low: int, high: int) -> tuple[Any, Any, int]:
            return (*taken(cut(batch, low, high, count, "a probe")), high - low)

        whole, parts = (*taken(batch), count), [part_of(*bounds) for bounds in bounds_of_parts(count)]
        if drawn() != before:
            return ()
        findings = []
        for name, metric in metrics.items():
            values = [_value(metric(output, target), length) for output, target, length in (whole, *parts)]
            tolerance = _tolerance(module, metric(*whole[:2]))
            if apart := _compare(values[0], values[1:], tolerance):
                findings.append(_metric_finding(name, count, *apart))
    return findings


def _of_parts(value: Callable[[int, int], tuple[Any, float]], count: int) -> list[tuple[Any, float]]:
    """Returns the values of the parts of a batch; of its halves, where one example is too few (for a topk, say)."""
    try:
        return [value(*bounds) for bounds in bounds_of_parts(count)]
    except Exception:  # whatever a user's loss raises
        return [value(0, count // 2), value(count // 2, count)]


def bounds_of_parts(count: int) -> Iterable[tuple[int, int]]:
    """Returns where the parts of a batch begin and end."""
    return pairwise(sorted({0, 1, min(2, count), count // 2, count}))


def _compare(
    whole: tuple[float, float], parts: Sequence[tuple[float, float]], tolerance: float
) -> tuple[float, float] | None:
    """Returns the value of a batch and the weighted mean of its parts', where they differ; of totals and weights."""
    total, weight = (sum(each[place] for each in parts) for place in (0, 1))
    mean = total / weight if weight else math.nan
    one = whole[0] / whole[1] if whole[1] else math.nan
    size = max(abs(one), *(abs(total / weight) if weight else 0.0 for total, weight in parts))
    return None if not math.isfinite(one) or abs(one - mean) <= tolerance * size else (one, mean)


def _metric_finding(name: str, count: int, one: float, mean: float) -> Finding:
    return Finding(
        f"that of a batch of {count} examples is {one:.6g}, the weighted mean of its parts' {mean:.6g}, so evaluations "
        "(weighted means over batches) are not that of the whole set",
        f"the metric {name!r}",
        "return the mean of which it is the root or the exponential, or hr.Mean(total, weight) for a ratio of sums, or "
        "compute it of run.predict",
        Scope.EVALUATION,
    )


def _finding(weighed: bool, count: int, one: float, mean: float) -> Finding:
    found = (
        f"that of a batch of {count} examples is {one:.6g}, the weighted mean of its parts' losses {mean:.6g}, so "
        "shares train with another loss than one device"
    )
    if weighed:
        return Finding(found, _WHERE, "the weight of the hr.Mean must be what its total is a sum over", Scope.SHARES)
    remedy = (
        "for a mean over tokens return hr.Mean(sum, count), or use hr.tasks.language_model(ignore_index=-100), "
        "hr.tasks.own_loss(ignore_index=-100); a loss over the whole batch (contrastive) is another loss on shares"
    )
    return Finding(found, _WHERE, remedy, Scope.SHARES)


def _sum(found: str) -> Finding:
    return Finding(
        f"it is a sum over the examples, as of reduction='sum' or .sum(): {found}; shares are weighted as means, so N "
        "workers train with 1/N of one device's gradient",
        _WHERE,
        "return the mean (reduction='mean'), with the learning rate times the examples of a batch, or "
        "hr.Mean(total=loss, weight=examples)",
        Scope.SHARES,
    )


def _failed(count: int, error: Exception) -> Finding:
    return Finding(
        f"it fails on half of {count} examples, so it is not known whether it is a mean over them, as shares take it "
        f"for: {in_one_line(error)}",
        _WHERE,
        "compare a short run with one_device yourself",
        Scope.SHARES,
    )


def _undecided(reason: str) -> Finding:
    return Finding(
        f"not compared between a batch and its parts: {reason}",
        _WHERE,
        "make sure that it is a mean over examples, or an hr.Mean",
        Scope.EQUALITY,
    )


def _value(loss: Any, examples: int) -> tuple[float, float]:
    total, weight = weigh(loss, examples, "the loss")
    return float(total.detach()), float(weight)


def _tolerance(module: nn.Module, loss: Any) -> float:
    result = loss.total if isinstance(loss, Mean) else loss
    types = {result.dtype, *(each.dtype for each in module.parameters() if each.is_floating_point())}
    return max(_TOLERANCES.get(dtype, _HALF_TOLERANCE) for dtype in types)


def use_running_statistics(module: nn.Module) -> None:
    """Gives statistics to BatchNorm layers without, which would look at the batch in eval mode, too."""
    for layer in module.modules():
        if isinstance(layer, BatchNorm) and layer.running_mean is None and layer.num_features:
            first = next(iter(layer.parameters()), torch.empty(0))
            internals.buffers(layer)["running_mean"] = first.new_zeros(layer.num_features)
            internals.buffers(layer)["running_var"] = first.new_ones(layer.num_features)
            layer.track_running_stats = True
