"""The user's loss, with what it takes of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headrace.batches import call, select_target
from headrace.metrics import Mean


@dataclass(frozen=True)
class Objective:
    """The loss, `loss(output, target)`, and how `inputs` and `target` are selected from a batch, as in `Job`.

    `weighed` tells whether the loss is a `Mean`, whose total weight is a sum over workers. Where a part of a model is
    trained, `model` is the whole one, and the loss is `loss(model, batch)`.
    """

    loss: Callable[..., Any]
    inputs: Any = None
    target: Any = None
    weighed: bool = False
    model: nn.Module | None = None

    def of(self, forward: Callable[..., Any], batch: Any) -> Tensor | Mean:
        """Returns the loss of a batch, whose output `forward` makes."""
        if self.model is not None:
            taken = self.model, batch
        else:
            taken = call(forward, batch, self.inputs), select_target(batch, self.target)
        loss: Tensor | Mean = self.loss(*taken)
        return loss
