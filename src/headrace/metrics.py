"""What is measured on an output and its target: losses, accuracies, and how their values are weighed.

A metric is `metric(output, target)` and returns the mean over the examples of a batch, or a `Mean` where the
weight is not the number of examples. Means of parts weigh together to the mean of the whole, so that a metric
is exact however the data was split. Outputs are what the model returns: logits, before any activation.

Shapes never broadcast. Where output and target must be alike, one explicit rule applies: a last dim of length
1 that only one of them has is dropped, so `(batch, 1)` meets `(batch,)`; anything else raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import DataError, UsageError

__all__ = [
    "Mean",
    "absolute_error",
    "accuracy",
    "align",
    "binary_accuracy",
    "binary_cross_entropy",
    "cross_entropy",
    "exact_match",
    "hinge",
    "squared_error",
    "squared_hinge",
    "top_k_accuracy",
    "weigh",
]

_NEVER = torch.iinfo(torch.int64).min
"""No class: by default torch skips targets of -100, and then the weight is not the number of examples."""


@dataclass(frozen=True)
class Mean:
    """A mean whose weight is not the number of examples (tokens without padding).

    Attributes:
        total: the weighted sum, a scalar; of a loss with its graph.
        weight: what it is to be divided by, a scalar.

    Examples:
        >>> def token_loss(output, target):
        ...     counts = target != 0
        ...     return hr.Mean(total=(output[counts] ** 2).sum(), weight=counts.sum())
        >>> token_loss(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5, 0, 7]))
        Mean(total=tensor(10.), weight=tensor(2))
    """

    total: Tensor
    weight: Tensor | float


def weigh(value: Any, examples: int, what: str = "the loss") -> tuple[Tensor, float | Tensor]:
    """Returns `(total, weight)` of what a loss or metric returned for a batch.

    A scalar is a mean over `examples`; a `Mean` brings its own weight. A mean of no examples weighs nothing.

    Args:
        value: a scalar tensor or a `Mean`.
        examples: the batch's length.
        what: who returned it, for the message.

    Raises:
        UsageError: it is neither.

    Examples:
        >>> hr.metrics.weigh(torch.tensor(0.5), examples=8)
        (tensor(4.), 8.0)
    """
    if isinstance(value, Mean):
        _require_scalar(value.total, f"the total of {what}", "sum")
        if isinstance(value.weight, Tensor):
            _require_scalar(value.weight, f"the weight of {what}", "sum")
        return value.total, value.weight
    _require_scalar(value, what, "mean")
    if examples == 0:
        return torch.zeros_like(value), 0.0
    return value * examples, float(examples)


def _require_scalar(value: Any, what: str, reduction: str) -> None:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{what} must be a scalar tensor or an hr.Mean, got {type(value).__name__} ({value!r:.60}); "
            "return the tensor itself, without .item()"
        )
    if value.dim() != 0:
        raise UsageError(f"{what} is no scalar but a tensor of shape {tuple(value.shape)}; reduce it by .{reduction}()")


def align(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in one shape and of the output's type.

    Args:
        output: `(batch, ...)`.
        target: the same shape; or either has a last dim of length 1 more, which is dropped.

    Raises:
        DataError: the shapes differ otherwise; they are never broadcast.

    Examples:
        >>> output, target = hr.metrics.align(torch.zeros(2, 1), torch.tensor([1, 2]))
        >>> target
        tensor([1., 2.])
    """
    if output.shape != target.shape:
        if output.shape == (*target.shape, 1):
            output = output.squeeze(-1)
        elif target.shape == (*output.shape, 1):
            target = target.squeeze(-1)
        else:
            raise DataError(
                f"output {tuple(output.shape)} and target {tuple(target.shape)} must have the same shape "
                "(only a last dim of length 1 may be missing in one); reshape the target or the output"
            )
    return output, target.to(output.dtype)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over all elements of `(batch, ...)`.

    Args:
        output, target: shapes as in `align`, with its error.

    Examples:
        >>> hr.metrics.squared_error(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0]))
        tensor(2.5000)
    """
    return F.mse_loss(*align(output, target))


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error over all elements of `(batch, ...)`.

    Args:
        output, target: shapes as in `align`, with its error.

    Examples:
        >>> hr.metrics.absolute_error(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0]))
        tensor(1.5000)
    """
    return F.l1_loss(*align(output, target))


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits against labels 0/1, probabilities, or labels -1/+1 (of which -1 means 0).

    Args:
        output, target: shapes as in `align`, with its error.

    Examples:
        >>> hr.metrics.binary_cross_entropy(torch.tensor([0.0]), torch.tensor([1]))
        tensor(0.6931)
    """
    logits, labels = align(output, target)
    return F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0))


def hinge(output: Tensor, target: Tensor) -> Tensor:
    """Mean of `max(0, 1 - sign * output)`; a target above 0 has the sign +1, 0 and -1 have -1.

    Args:
        output, target: shapes as in `align`, with its error.

    Examples:
        >>> hr.metrics.hinge(torch.tensor([0.5, 2.0]), torch.tensor([1, -1]))
        tensor(1.7500)
    """
    return _slack(output, target).mean()


def squared_hinge(output: Tensor, target: Tensor) -> Tensor:
    """Mean of `max(0, 1 - sign * output) ** 2`, signs as in `hinge`.

    Args:
        output, target: shapes as in `align`, with its error.

    Examples:
        >>> hr.metrics.squared_hinge(torch.tensor([0.5, 2.0]), torch.tensor([1, -1]))
        tensor(4.6250)
    """
    return _slack(output, target).square().mean()


def _slack(output: Tensor, target: Tensor) -> Tensor:
    scores, labels = align(output, target)
    # Element by element, so that a share whose labels are all 1 is read like the batch that it came from.
    return (1 - torch.where(labels > 0, scores, -scores)).clamp(min=0)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over classes, sparse or dense.

    Args:
        output: logits `(batch, classes, ...)`.
        target: class indices, integers `(batch, ...)`; or one-hot rows or probabilities, floating point
            `(batch, classes, ...)`.

    Examples:
        >>> hr.metrics.cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor(0.6931)
    """
    if target.is_floating_point():
        return F.cross_entropy(output, target.to(output.dtype))
    return F.cross_entropy(output, target.long(), ignore_index=_NEVER)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Part of the examples whose largest logit is their class.

    Args:
        output, target: shapes as in `cross_entropy`.

    Raises:
        DataError: the shapes do not fit.

    Examples:
        >>> hr.metrics.accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0])).item()
        0.5
    """
    return _part(output.argmax(dim=1) == _indices(output, target))


def top_k_accuracy(output: Tensor, target: Tensor, k: int = 5) -> Tensor:
    """Part of the examples whose class is among the `k` largest logits.

    Args:
        output, target: shapes as in `cross_entropy`.
        k: how many of the largest.

    Raises:
        DataError: the shapes do not fit.

    Examples:
        >>> logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
        >>> hr.metrics.top_k_accuracy(logits, torch.tensor([1, 2]), k=2).item()
        0.5
    """
    best = output.topk(k, dim=1).indices
    return _part((best == _indices(output, target).unsqueeze(1)).any(dim=1))


def _indices(output: Tensor, target: Tensor) -> Tensor:
    indices = target.argmax(dim=1) if target.is_floating_point() else target
    if indices.shape != (output.shape[0], *output.shape[2:]):
        raise DataError(
            f"target {tuple(target.shape)} ({target.dtype}) does not fit output {tuple(output.shape)}: class "
            "indices have the output's shape without dim 1, one-hot rows are floating point of the same shape"
        )
    return indices


def binary_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Part of the elements whose logit lies on the target's side; targets are 0/1, -1/+1 or probabilities.

    Args:
        output, target: shapes as in `align`, with its error.

    Examples:
        >>> hr.metrics.binary_accuracy(torch.tensor([2.0, -1.0]), torch.tensor([1, 1])).item()
        0.5
    """
    logits, labels = align(output, target)
    return _part((logits > 0) == (labels > 0.5))


def exact_match(output: Tensor, target: Tensor) -> Tensor:
    """Part of the examples of `(batch, labels)` that have every label right.

    Args:
        output: logits `(batch, labels)`.
        target: 0/1 or -1/+1, of the same shape; errors as in `align`.

    Examples:
        >>> logits, labels = torch.tensor([[2.0, -1.0], [3.0, 1.0]]), torch.tensor([[1, 0], [1, 0]])
        >>> hr.metrics.exact_match(logits, labels).item()
        0.5
    """
    logits, labels = align(output, target)
    return _part(((logits > 0) == (labels > 0.5)).flatten(1).all(dim=1))


def _part(right: Tensor) -> Tensor:
    # In double precision the part times the number of examples is the whole count again.
    return right.double().mean()
