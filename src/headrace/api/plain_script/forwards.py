"""Does a script train on all examples of its share? Gradients are weighted by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.api.plain_script.deliveries import Deliveries


class ForwardCounts:
    """Counts the examples that a model's forward gets, where no call gets all of its share."""

    def __init__(self, model: nn.Module, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._examples = 0
        self._is_whole = False
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def take(self) -> int:
        """Returns how many examples forward got since the last call; 0 where a call got all of a share."""
        examples = 0 if self._is_whole else self._examples
        self._examples, self._is_whole = 0, False
        return examples

    def _see(self, model: nn.Module, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        share = None if torch.compiler.is_compiling() else self._deliveries.last
        if share is None or not share.examples or not model.training or not torch.is_grad_enabled():
            return
        first = next((value for value in (*values, *named.values()) if isinstance(value, Tensor) and value.dim()), None)
        if first is None:
            return
        # There may be several rows for an example, the batch may be another dim than the first, and one row may have
        # all sequences side by side.
        is_packed = len(first) == 1 and first.dim() > 1 and first.shape[1] >= share.examples
        self._is_whole |= len(first) >= share.examples or share.examples in first.shape or is_packed
        self._examples += len(first)
