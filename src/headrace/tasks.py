"""What a model is trained to do: loss, prediction and metrics in one, and which targets it takes.

A task looks at the first batch (`Task.check`) and refuses a target whose form it would misread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace import metrics
from headrace.errors import DataError, UnknownName, UsageError
from headrace.spec.options import require_count
from headrace.targets import (
    check_binary,
    check_multiclass,
    check_multilabel,
    check_regression,
    form_of,
    require_signed,
)

__all__ = ["Task", "binary", "language_model", "multiclass", "multilabel", "own_loss", "regression"]

Metric = Callable[[Any, Any], Tensor | metrics.Mean]

_REGRESSION: Mapping[str, Metric] = {
    "squared_error": metrics.squared_error,
    "absolute_error": metrics.absolute_error,
}
_BINARY: Mapping[str, Metric] = {
    "cross_entropy": metrics.binary_cross_entropy,
    "hinge": metrics.hinge,
    "squared_hinge": metrics.squared_hinge,
}


@dataclass(frozen=True)
class Task:
    """What a model is trained to do.

    Attributes:
        name: for messages and reports, "multiclass(10)".
        loss: takes output and target, returns the mean over the batch.
        activation: turns the model's output into predictions.
        metrics: name to `metric(output, target)`.
        check: takes output and target of a batch, raises `DataError` if the target does not have the task's
            form and `UsageError` if the output does not.
        scores_and_labels: takes output and target, returns what metrics of torchmetrics take: predictions, and labels
            as whole numbers (or numbers, in a regression). None where there are no such metrics.

    Examples:
        >>> hr.tasks.binary("hinge").name
        'binary'
    """

    name: str
    loss: Metric
    activation: Callable[[Any], Any]
    metrics: Mapping[str, Metric]
    check: Callable[[Any, Any], None]
    scores_and_labels: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None


def regression(loss: str = "squared_error") -> Task:
    """Numbers. Output and target have the same shape `(batch, ...)`; `(batch, 1)` meets `(batch,)`.

    Args:
        loss: "squared_error" or "absolute_error".

    Raises:
        UnknownName: there is no such loss.

    Examples:
        >>> task = hr.tasks.regression()
        >>> task.loss(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
        tensor(2.)
    """
    return Task(
        name="regression",
        loss=_choose(loss, _REGRESSION),
        activation=_identity,
        metrics={
            "mean_squared_error": metrics.squared_error,
            "mean_absolute_error": metrics.absolute_error,
        },
        check=check_regression,
        scores_and_labels=_numbers,
    )


def binary(loss: str = "cross_entropy") -> Task:
    """Yes or no. One logit an example, `(batch,)` or `(batch, 1)`; targets are 0/1 or -1/+1.

    Args:
        loss: "cross_entropy" (targets may be probabilities too), "hinge" or "squared_hinge".

    Raises:
        UnknownName: there is no such loss.

    Examples:
        >>> task = hr.tasks.binary()
        >>> task.activation(torch.tensor([0.0]))
        tensor([0.5000])
    """
    return Task(
        name="binary",
        loss=_choose(loss, _BINARY),
        activation=torch.sigmoid,
        metrics={"accuracy": metrics.binary_accuracy},
        check=partial(check_binary, soft=loss == "cross_entropy"),
        scores_and_labels=_yes_or_no,
    )


def multilabel(labels: int, loss: str = "cross_entropy") -> Task:
    """Any number of `labels` at once. Output and target are `(batch, labels)`, targets 0/1 or -1/+1.

    Metrics: "accuracy" over all labels, "exact_match" over examples with every label right.

    Args:
        labels: how many there are.
        loss: as of `binary`.

    Raises:
        UnknownName: there is no such loss.
        UsageError: `labels` is no whole number of at least 1.

    Examples:
        >>> task = hr.tasks.multilabel(2)
        >>> logits, labels = torch.tensor([[2.0, -1.0], [3.0, 1.0]]), torch.tensor([[1, 0], [1, 0]])
        >>> task.metrics["exact_match"](logits, labels).item()
        0.5
    """
    require_count("labels", labels)
    return Task(
        name=f"multilabel({labels})",
        loss=_choose(loss, _BINARY),
        activation=torch.sigmoid,
        metrics={"accuracy": metrics.binary_accuracy, "exact_match": metrics.exact_match},
        check=partial(check_multilabel, labels=labels, soft=loss == "cross_entropy"),
        scores_and_labels=_yes_or_no,
    )


def multiclass(classes: int, *, top_k: int | None = None) -> Task:
    """One of `classes`. Output: logits `(batch, classes)`, or `(batch, classes, d1, ...)` for dense tasks.

    Targets are class indices, integers `(batch,)` or `(batch, d1, ...)`; or one-hot rows or probabilities,
    floating point, of the output's shape. The type tells them apart.

    Args:
        classes: how many there are.
        top_k: also measures "top_<k>_accuracy".

    Raises:
        UsageError: `classes` is no whole number of at least 2, or `top_k` none between 1 and `classes`.

    Examples:
        >>> task = hr.tasks.multiclass(3)
        >>> logits, classes = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 4.0]]), torch.tensor([0, 1])
        >>> task.metrics["accuracy"](logits, classes).item()
        0.5
    """
    require_count("classes", classes, 2)
    measured: dict[str, Metric] = {"accuracy": metrics.accuracy}
    if top_k is not None:
        require_count("top_k", top_k)
        if top_k > classes:
            raise UsageError(f"top_k must be at most the number of classes, {classes}, got {top_k}")
        measured[f"top_{top_k}_accuracy"] = partial(metrics.top_k_accuracy, k=top_k)
    return Task(
        name=f"multiclass({classes})",
        loss=metrics.cross_entropy,
        activation=_softmax,
        metrics=measured,
        check=partial(check_multiclass, classes=classes),
        scores_and_labels=_classes,
    )


def language_model(ignore_index: int = -100, *, shifted: bool = True) -> Task:
    """The next token of every token, or masked tokens; the mean is over the tokens that count, on any split.

    Output: logits `(batch, tokens, vocabulary)`, or an object with them as `.logits`. Target: labels, integers
    `(batch, tokens)`, or a dict with them as "labels".

    Args:
        ignore_index: the label of tokens that do not count, such as padding.
        shifted: compares the prediction at each token with the label of the next, so that labels may be the input
            itself. Give False where the label at a token is what is predicted there.

    Examples:
        >>> task = hr.tasks.language_model()
        >>> logits, tokens = torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])
        >>> task.loss(logits, tokens).weight
        tensor(1)
    """
    cross_entropy = partial(torch.nn.functional.cross_entropy, reduction="none")
    return Task(
        name=f"language_model(ignore_index={ignore_index}, shifted={shifted})",
        loss=TokenMean(cross_entropy, ignore_index, shifted),
        activation=lambda output: _logits(output).softmax(dim=-1),
        metrics={"accuracy": TokenMean(_token_hits, ignore_index, shifted)},
        check=partial(_check_language_model, ignore_index=ignore_index),
    )


@dataclass(frozen=True)
class TokenMean:
    """The mean of a measure over the tokens that count, as `language_model` has it.

    Attributes:
        measure: from logits `(n, vocabulary)` and labels `(n,)` to values `(n,)`.
        ignore_index, shifted: as of `language_model`.
    """

    measure: Callable[[Tensor, Tensor], Tensor]
    ignore_index: int
    shifted: bool

    def __call__(self, output: Any, target: Any) -> metrics.Mean:
        logits, labels = _logits(output), _labels(target)
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        counts = labels != self.ignore_index
        values = self.measure(logits.flatten(0, 1), labels.masked_fill(~counts, 0).flatten().long())
        return metrics.Mean((values * counts.flatten()).sum(), counts.sum())

    def labels_by_token(self, target: Any) -> Tensor:
        """Returns what is predicted at each token, `(batch, tokens)`: labels for a measure that does not shift them."""
        labels = _labels(target)
        if not self.shifted:
            return labels
        return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], self.ignore_index)], 1)


def _token_hits(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).to(logits.dtype)


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else _named(output, "logits")
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        found = form_of(logits) if isinstance(logits, Tensor) else type(output).__name__
        raise UsageError(f"language_model takes logits (batch, tokens, vocabulary), or .logits, got output {found}")
    return logits


def _named(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)


def _check_language_model(output: Any, target: Any, ignore_index: int) -> None:
    logits, labels = _logits(output), _labels(target)
    require_signed("language_model", labels)
    counted = labels[labels != ignore_index]
    whole = labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    low, high = (int(counted.min()), int(counted.max())) if whole and counted.numel() else (0, 0)
    if not whole or labels.shape != logits.shape[:2] or not 0 <= low <= high < logits.shape[2]:
        raise DataError(
            f"language_model takes labels, integers {tuple(logits.shape[:2])} between 0 and {logits.shape[2] - 1}, or "
            f"{ignore_index} for tokens that do not count; got {form_of(labels)}"
        )


def own_loss(ignore_index: int | None = None, *, shifted: bool = True) -> Task:
    """The model computes its loss: it gets the whole batch, a dict with labels, and returns an object with `.loss`.

    The loss is a mean over the examples of the batch. With `ignore_index` it is a mean over tokens, and becomes an
    `hr.Mean` whose weight is the number of `batch["labels"]` that are not `ignore_index`. So shares with more padding
    than others weigh less.

    Args:
        ignore_index: the label of tokens that the loss leaves out, usually -100.
        shifted: a causal language model (GPT-2, Llama) compares the prediction at each token with the next label, so
            the first label of every sequence does not count. Give False for masked language models (BERT), for those
            with an encoder and a decoder (T5), and for token classes.

    Examples:
        >>> task = hr.tasks.own_loss(ignore_index=-100)
        >>> task.name
        'own_loss(ignore_index=-100, shifted=True)'
    """
    name = "own_loss" if ignore_index is None else f"own_loss(ignore_index={ignore_index}, shifted={shifted})"
    return Task(
        name=name,
        loss=partial(_own_loss, ignore_index=ignore_index, shifted=shifted),
        activation=_identity,
        metrics={},
        check=partial(_check_own_loss, ignore_index=ignore_index, shifted=shifted),
    )


def _own_loss(output: Any, target: Any, ignore_index: int | None, shifted: bool) -> Tensor | metrics.Mean:
    loss = _named(output, "loss")
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"own_loss takes what the model returns as .loss, and {type(output).__name__} has none; put labels into "
            "the batch, a dict that the model gets as keywords, or give the job a loss"
        )
    if ignore_index is None:
        return loss
    labels = _labels(target)[..., 1:] if shifted else _labels(target)
    count = (labels != ignore_index).sum().to(loss.dtype)
    # A mean over no tokens is NaN, and its gradients are 0.
    return metrics.Mean(torch.where(count > 0, loss * count, torch.zeros_like(loss)), count)


def _labels(target: Any) -> Tensor:
    labels = target if isinstance(target, Tensor) else _named(target, "labels")
    if not isinstance(labels, Tensor):
        raise DataError(
            f"the loss counts batch['labels'], and gets a {type(target).__name__} without them; let batches be dicts "
            "with labels, or select these with Job(target=...)"
        )
    return labels


def _check_own_loss(output: Any, target: Any, ignore_index: int | None, shifted: bool) -> None:
    """Refuses a wrong `shifted`, where the logits beside the loss tell."""
    if ignore_index is None:
        return
    labels = _labels(target)
    logits = _named(output, "logits")
    loss = _named(output, "loss")
    if not isinstance(logits, Tensor) or not isinstance(loss, Tensor) or logits.shape[:-1] != labels.shape:
        return
    plain, moved = (
        torch.nn.functional.cross_entropy(scores.flatten(0, -2).float(), wanted.flatten(), ignore_index=ignore_index)
        for scores, wanted in ((logits, labels), (logits[..., :-1, :], labels[..., 1:]))
    )
    near = [bool(torch.isclose(each, loss.float(), rtol=1e-3)) for each in (plain, moved)]
    if near == ([True, False] if shifted else [False, True]):
        raise UsageError(
            f"own_loss(shifted={shifted}) does not fit the model: its loss {loss.item():.6g} is the cross-entropy "
            f"{'without' if shifted else 'with'} labels shifted by one; use shifted={not shifted}"
        )


def _identity(output: Tensor) -> Tensor:
    return output


def _softmax(output: Tensor) -> Tensor:
    return output.softmax(dim=1)


def _numbers(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return metrics.align(_single(output), target)


def _yes_or_no(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits, labels = metrics.align(_single(output), target)
    return logits.sigmoid(), (labels > 0.5).long()


def _classes(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return _softmax(_single(output)), target.argmax(dim=1) if target.is_floating_point() else target.long()


def _single(output: Tensor) -> Tensor:
    # In half precision many scores would be the same, and the order of examples is what some metrics are about.
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _choose(name: str, losses: Mapping[str, Metric]) -> Metric:
    if name not in losses:
        raise UnknownName("loss", name, losses)
    return losses[name]
