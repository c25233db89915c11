"""Cross-entropy of a linear layer's outputs, of which only a chunk of rows is computed at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.errors import DataError, UsageError
from headrace.spec.options import require_count

_LOGITS = 1 << 24
"""Of a chunk by default: 64 MiB in single precision."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, without ever holding the logits of all tokens.

    Forward and backward each compute the logits of a chunk of tokens, and drop them; so backward computes them a second
    time. Call it in the model's forward, which has the head's weight under every strategy, and take
    `hr.tasks.own_loss(ignore_index=...)`, which weighs shares by their tokens.

    Args:
        hidden: what the head gets, `(..., features)`.
        weight: of the head, `(vocabulary, features)`.
        labels: class indices, integers `(...)`. For the next token give `hidden[:, :-1]` and `labels[:, 1:]`.
        bias: of the head, `(vocabulary,)`.
        ignore_index: the label of tokens that do not count.
        chunk: how many tokens' logits are computed at a time; None for 64 MiB of them in single precision.

    Returns:
        The mean over the tokens that count, a scalar: 0 if there are none. Half precision is summed in float32.

    Raises:
        DataError: the shapes do not fit, or labels are no integers.
        UsageError: `chunk` is no whole number of at least 1, `weight` is a part of a parameter, or (in backward) a
            second derivative is asked for.

    Examples:
        >>> hidden, weight = torch.zeros(2, 3, 4), torch.zeros(8, 4)
        >>> hr.linear_cross_entropy(hidden, weight, torch.tensor([[1, 2, -100], [3, 4, 5]]), chunk=2)
        tensor(2.0794)
    """
    if chunk is not None:
        require_count("chunk", chunk)
    _check(hidden, weight, labels, bias)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(half), weight.to(half)
        bias = None if bias is None else bias.to(half)
    flat = labels.reshape(-1).long()
    kept = flat != ignore_index
    size = chunk or max(1, _LOGITS // len(weight))
    with torch.autocast(device, enabled=False):
        total: Tensor = _ChunkedSum.apply(
            hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat.masked_fill(~kept, 0), kept, size
        )  # type: ignore[no-untyped-call]
    return total / kept.sum().clamp(min=1)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    # By its name, since importing the class takes a second.
    if type(weight).__name__ == "DTensor":
        raise UsageError(
            "weight is the part of the head that this worker holds: the head is a unit of its own, which is gathered "
            "in its own forward alone; leave it out of fully_sharded's units, and it is gathered with the model"
        )
    vocabulary = (len(weight),) if weight.dim() == 2 else ()
    fits = weight.dim() == 2 and hidden.dim() > 0 and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != labels.shape or (bias is not None and bias.shape != vocabulary):
        raise DataError(
            f"linear_cross_entropy takes hidden (..., features), weight (vocabulary, features), labels (...) and bias "
            f"(vocabulary,); got {tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(labels.shape)} and "
            f"{'no bias' if bias is None else tuple(bias.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"linear_cross_entropy takes class indices, integers, as labels; got {labels.dtype}")


class _ChunkedSum(torch.autograd.Function):
    """The sum over the rows that count."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, kept: Tensor, size: int
    ) -> Tensor:
        wide = _wide(hidden.dtype)
        logs = hidden.new_empty(len(hidden), dtype=wide)
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = F.linear(hidden[rows], weight, bias).to(wide)
            logs[rows] = logits.logsumexp(-1)
            losses = logs[rows] - logits.gather(1, labels[rows, None])[:, 0]
            total += losses.masked_fill(~kept[rows], 0.0).sum()
        ctx.save_for_backward(hidden, weight, bias, labels, kept, logs)
        ctx.size = size
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UsageError(
                "linear_cross_entropy has no second derivative (create_graph=True); use "
                "torch.nn.functional.cross_entropy of whole logits"
            )
        hidden, weight, bias, labels, kept, logs = ctx.saved_tensors
        wide = logs.dtype
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums of chunks, which half precision would round one by one.
        of_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        for start in range(0, len(hidden), ctx.size):
            rows = slice(start, start + ctx.size)
            logits = F.linear(hidden[rows], weight, bias).to(wide)
            slopes = logits.sub_(logs[rows, None]).exp_()
            slopes.scatter_add_(1, labels[rows, None], slopes.new_full((len(slopes), 1), -1.0))
            slopes.mul_((kept[rows] * gradient)[:, None])
            if of_bias is not None:
                of_bias += slopes.sum(0)
            slopes = slopes.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] = slopes @ weight
            if of_weight is not None:
                of_weight += slopes.t() @ hidden[rows]
        wide_ones = (of_weight, of_bias)
        return of_hidden, *(None if each is None else each.to(weight.dtype) for each in wide_ones), None, None, None


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
