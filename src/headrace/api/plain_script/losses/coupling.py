"""Is a script's loss a mean over examples? What each process divides by its own number, or compares, is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SMALL = 1e-7
"""Of the largest second derivative: what is below is rounding."""


def findings_of(loss: Tensor, outputs: Tensor) -> Iterator[str]:
    """Yields lines about a loss that is not a mean over examples, from its derivatives by outputs `(examples, ...)`.

    In a mean, each example has a part of its own: second derivatives by two examples are 0.
    """
    gradient = _gradient(loss, outputs, create_graph=True)
    if gradient is None or len(outputs) < 2:
        return
    rows = gradient.detach().reshape(len(outputs), -1)
    without = int((rows == 0).all(1).sum())
    if 0 < without < len(rows):
        yield (
            "some examples of a share have no gradient: if the loss is a mean over chosen ones (a mask, ignore_index), "
            "each process divides by its own number, and the result is not that of one process; divide their sum by "
            "len(batch)"
        )
    if not gradient.requires_grad:
        return
    # Not their sum, which is 0 where outputs go through a softmax.
    first = gradient[0].reshape(-1)
    second = _gradient(first @ torch.linspace(1, 2, len(first), dtype=first.dtype), outputs)
    if second is None:
        return
    sizes = second.reshape(len(outputs), -1).abs().amax(1)
    if float(sizes[1:].max()) > _SMALL * float(sizes.max()):
        yield (
            "the loss of an example depends on other examples of its share (they are compared, or a root or a ratio is "
            "taken over the batch): each process has that of its share, and the result is not that of one process"
        )


def _gradient(value: Tensor, outputs: Tensor, create_graph: bool = False) -> Tensor | None:
    try:
        (gradient,) = torch.autograd.grad(
            value, outputs, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    except RuntimeError:
        # Not every operation has a second derivative; what has none here is not looked at.
        return None
    return gradient


class LastOutput:
    """Keeps the outputs of a model's last forward, as far as there is a row for each example."""

    def __init__(self) -> None:
        self.outputs: Tensor | None = None

    def keep(self, model: object, values: object, outputs: Any) -> None:
        """Is called after a forward."""
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        first = next((each for each in tensors if isinstance(each, Tensor) and each.requires_grad and each.dim()), None)
        self.outputs = first

    def take(self, examples: int) -> Tensor | None:
        """Returns them once."""
        outputs, self.outputs = self.outputs, None
        return outputs if outputs is not None and len(outputs) == examples else None
