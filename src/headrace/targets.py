"""Which targets a task takes, and what it says of others, with their type, shape and range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace import metrics
from headrace.errors import DataError, UsageError
from headrace.trees import UNSIGNED

_ROUNDING = 1e-2
"""How far a row of probabilities may be from summing up to 1: half precision over many classes."""


def check_regression(output: Any, target: Any) -> None:
    """Takes finite numbers in a shape that meets the output's; else a DataError, or a UsageError for the output."""
    _require_tensors("regression", output, target)
    metrics.align(output, target)
    if not bool(torch.isfinite(target).all()):
        count = int((~torch.isfinite(target)).sum())
        raise DataError(f"regression takes finite targets; {count} of {target.numel()} are NaN or infinite")


def check_binary(output: Any, target: Any, soft: bool) -> None:
    """Takes labels of one kind, one an example; else a DataError, or a UsageError for the output."""
    _require_tensors("binary", output, target)
    if output.dim() == 2 and output.shape[1] == 2 and target.dim() == 1:
        raise UsageError(
            f"binary takes one logit an example, (batch,) or (batch, 1), got output {tuple(output.shape)}; "
            "give the model one output, or use hr.tasks.multiclass(2)"
        )
    metrics.align(output, target)
    _check_labels("binary", target, soft)


def check_multilabel(output: Any, target: Any, labels: int, soft: bool) -> None:
    """Takes labels of one kind in the output's shape; else a DataError, or a UsageError for the output."""
    name = f"multilabel({labels})"
    _require_tensors(name, output, target)
    if output.dim() != 2 or output.shape[1] != labels:
        raise UsageError(f"{name} takes logits (batch, {labels}), got output {form_of(output)}")
    if target.shape != output.shape:
        raise DataError(
            f"{name} takes targets {tuple(output.shape)} of 0/1, got {form_of(target)}; "
            f"class indices become such rows by torch.nn.functional.one_hot(target, {labels})"
        )
    _check_labels(name, target, soft)


def _check_labels(name: str, target: Tensor, soft: bool) -> None:
    """Refuses labels that are neither 0/1 nor -1/+1 (nor probabilities, where those are meant)."""
    zero_one = bool(((target == 0) | (target == 1)).all())
    signs = bool(((target == -1) | (target == 1)).all())
    probabilities = soft and bool(((target >= 0) & (target <= 1)).all())
    if not (zero_one or signs or probabilities):
        allowed = "0/1, -1/+1 or probabilities between 0 and 1" if soft else "0/1 or -1/+1"
        raise DataError(f"{name} takes targets of {allowed}, not mixed; got {form_of(target)}")


def check_multiclass(output: Any, target: Any, classes: int) -> None:
    """Takes class indices, or rows of probabilities; else a DataError, or a UsageError for the output."""
    name = f"multiclass({classes})"
    _require_tensors(name, output, target)
    if output.dim() < 2 or output.shape[1] != classes:
        raise UsageError(
            f"{name} takes logits (batch, {classes}) or (batch, {classes}, d1, ...), got output {form_of(output)}"
        )
    indices = (output.shape[0], *output.shape[2:])
    rows = tuple(output.shape)
    wanted = f"class indices, integers {indices}, or one-hot rows or probabilities, floating point {rows}"
    if target.dtype is torch.bool:
        raise DataError(f"{name} takes {wanted}; got {form_of(target)}")
    if target.is_floating_point():
        if target.shape != rows:
            remedy = "; class indices must be integers: target.long()" if target.shape == indices else ""
            raise DataError(f"{name} takes {wanted}; got {form_of(target)}{remedy}")
        _check_rows(name, target)
        return
    if target.shape != indices:
        raise DataError(f"{name} takes {wanted}; got {form_of(target)}; {_remedy(target, indices, rows)}")
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < classes:
        raise DataError(f"{name} takes class indices between 0 and {classes - 1}; got {form_of(target)}")


def _remedy(target: Tensor, indices: tuple[int, ...], rows: tuple[int, ...]) -> str:
    if target.shape == rows:
        return "one-hot rows must be floating point: target.float()"
    if target.shape == (*indices, 1):
        return "drop the last dim: target.squeeze(-1)"
    return "look at how the batch is made"


def _check_rows(name: str, target: Tensor) -> None:
    sums = target.double().sum(dim=1)
    if bool((target < 0).any()) or not bool(((sums - 1).abs() <= _ROUNDING).all()):
        raise DataError(
            f"{name} takes rows of probabilities, at least 0 and summing up to 1 along dim 1; got "
            f"{form_of(target)}, sums from {float(sums.min()):.4g} to {float(sums.max()):.4g}; any number of "
            "labels at once is hr.tasks.multilabel"
        )


def _require_tensors(name: str, output: Any, target: Any) -> None:
    if not isinstance(output, Tensor):
        raise UsageError(
            f"{name} takes one tensor as the model's output, got {type(output).__name__}; "
            "give the job its own loss and metrics instead of a task"
        )
    if not isinstance(target, Tensor):
        raise DataError(
            f"{name} takes one tensor as the target, got {type(target).__name__}; "
            "select it from the batch with Job(target=...)"
        )
    if target.is_complex():
        raise DataError(f"{name} takes real targets, got {form_of(target)}")
    require_signed(name, target)


def require_signed(name: str, target: Tensor) -> None:
    """Raises a DataError for targets with which torch does not compute."""
    if target.dtype in UNSIGNED:
        raise DataError(f"{name} got {form_of(target)}, with which torch does not compute; give target.long() in a map")


def form_of(tensor: Tensor) -> str:
    """Returns type, shape and range of a tensor, for a message."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.numel() and not tensor.is_complex() and tensor.dtype not in UNSIGNED:
        text += f" from {tensor.min().item():.6g} to {tensor.max().item():.6g}"
    return text
