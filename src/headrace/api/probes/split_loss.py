"""Is the loss of a batch the weighted mean of the losses of its parts?

If not, N workers do not train with the loss of one device: a mean over tokens is weighted by examples, a loss over the
whole batch compares other examples. It is measured in eval mode, where dropout and BatchNorm do nothing of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from headrace.api.probes.finding import Finding, Scope, drawn, loss_of, trial
from headrace.batches import examples_of
from headrace.metrics import Mean, weigh
from headrace.training.whole_model import Objective, cut

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-4}
_HALF_TOLERANCE = 0.05
_WHERE = "the loss"


def probe_split_loss(module: nn.Module, batch: Any, objective: Objective) -> Sequence[Finding]:
    """Compares the loss of a batch with the weighted mean of those of its parts."""
    count = examples_of(batch)
    if count < 2:
        return ()
    with trial(module):
        module.eval()
        _use_running_statistics(module)
        before = drawn()
        loss = loss_of(module, batch, objective)
        if drawn() != before:
            # Two runs on the same batch would differ.
            return (_undecided("the model draws random numbers in eval mode, too"),)
        whole = _value(loss, count)
        parts = [
            _value(loss_of(module, cut(batch, low, high, count, "a probe"), objective), high - low)
            for low, high in pairwise(sorted({0, 1, count // 2, count}))
        ]
    total, weight = (sum(each[place] for each in parts) for place in (0, 1))
    mean = total / weight if weight else math.nan
    one = whole[0] / whole[1] if whole[1] else math.nan
    size = max(abs(one), *(abs(total / weight) if weight else 0.0 for total, weight in parts))
    if not math.isfinite(one) or abs(one - mean) <= _tolerance(module, loss) * size:
        return ()
    return (_finding(isinstance(loss, Mean), count, one, mean),)


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


def _use_running_statistics(module: nn.Module) -> None:
    """Gives statistics to BatchNorm layers without, which would look at the batch in eval mode, too."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None and layer.num_features:
            first = next(iter(layer.parameters()), torch.empty(0))
            layer._buffers["running_mean"] = first.new_zeros(layer.num_features)
            layer._buffers["running_var"] = first.new_ones(layer.num_features)
            layer.track_running_stats = True
