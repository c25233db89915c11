"""Compute with the whole model on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.metrics import Mean
from headrace.replica.compute import Compute, Computed
from headrace.replica.gradients import GradientSink
from headrace.replica.selection import call, select_target
from headrace.spec.share import Share

__all__ = ["Objective", "WholeModel"]


@dataclass(frozen=True)
class Objective:
    """What a model is trained on.

    Attributes:
        loss: `loss(output, target)`, a scalar mean or a `Mean`.
        inputs, target: select from a batch, as in `Job`.
        weighed: whether the loss is a `Mean`, whose weight only the workers together know.
    """

    loss: Callable[..., Any]
    inputs: Any = None
    target: Any = None
    weighed: bool = False


class WholeModel(Compute):
    """Runs forward and backward on a worker's share.

    Gradients come from `torch.autograd.grad` in one call and go to `sink` as they are, or into `.grad` by
    `backward()` where there is no sink.

    Args:
        module: on its device.
        objective: see there.
        sink: takes the gradients; None leaves them in `.grad`.
        total: sums numbers over workers.
        always: run forward also on an empty share (its layers talk to the other workers).
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        sink: GradientSink | None = None,
        total: Callable[[Sequence[float]], list[float]] = list,
        always: bool = False,
    ) -> None:
        self.module = module
        self._objective = objective
        self._sink = sink
        self._total = total
        self._always = always
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def run(self, share: Share) -> Computed:
        if share.examples == 0 and not self._always:
            if self._objective.weighed:
                self._total([0.0])
            return self._leave_nothing()
        batch = self.place(share.batch)
        output = call(self.module, batch, self._objective.inputs)
        loss = self._objective.loss(output, select_target(batch, self._objective.target))
        return self.backward(loss, share)

    def backward(self, loss: Tensor | Mean, share: Share) -> Computed:
        """Differentiates this share's part of the global mean: of `loss`, whose mean is over the share.

        An empty share's loss matters only for what its layers and its weight tell the other workers.
        """
        if isinstance(loss, Mean):
            weight = float(loss.weight)
            (all_weight,) = self._total([weight])
            part = loss.total / all_weight if all_weight else loss.total * 0
            mean = loss.total.detach() / weight if weight else None
        else:
            weight = float(share.examples)
            part = loss if share.examples == share.of else loss * (share.examples / share.of)
            mean = loss.detach()
        if share.examples == 0:
            if self._always:
                torch.autograd.grad(part, self._trained, allow_unused=True)
            return self._leave_nothing()
        self._differentiate(part)
        return Computed(mean, weight)

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        return call(self.module, self.place(batch), self._objective.inputs)

    def place(self, batch: Any) -> Any:
        """Returns a batch on the model's device."""
        return batch if self._device.type == "cpu" else _to(batch, self._device)

    def _differentiate(self, loss: Tensor) -> None:
        if self._sink is None:
            loss.backward()
            return
        self._sink.store(torch.autograd.grad(loss, self._trained, allow_unused=True))

    def _leave_nothing(self) -> Computed:
        if self._sink is not None:
            self._sink.store_nothing()
        return Computed(None, 0.0)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_to(value, device) for value in batch)
    return batch
