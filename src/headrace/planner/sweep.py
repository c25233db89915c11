"""A micro-batch through all stages of a model and back, in one process: how long each takes, what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from headrace.pipelining import OUTPUT, Stage
from headrace.trees import nbytes

__all__ = ["Sweep", "typical"]

Story = list[tuple[Stage, dict[str, Any], dict[str, Any]]]
"""What each stage got and gave in one forward."""


@dataclass
class Sweep:
    """Micro-batches through all layers and back.

    Attributes:
        module: the model.
        stages: one a layer.
        inputs: of the model.
        loss: of the model's output.
        device: that they are on.
    """

    module: nn.Module
    stages: Sequence[Stage]
    inputs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    device: torch.device

    def run(self) -> tuple[list[float], list[float]]:
        """Returns the seconds of each layer, forward and backward."""
        story, loss, forward = self._forward()
        # Gradients add up from sweep to sweep, as they do from micro-batch to micro-batch.
        return forward, self._backward(story, loss)

    def count(self) -> tuple[list[int], list[int]]:
        """Returns the bytes that autograd keeps for each layer and for none before it, and those alive behind it."""
        model = {tensor.untyped_storage().data_ptr() for tensor in (*self.module.parameters(), *self.module.buffers())}
        kept: dict[int, int] = {}
        saved: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in model:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def counted(stage: Stage) -> None:
            saved.append(sum(kept.values()) - sum(saved))

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            story, loss, _ = self._forward(counted)
        self._backward(story, loss)
        crossing = [0] * len(self.stages)
        for stage, _, gave in story:
            for value in stage.sends:
                for index in range(value.producer, value.consumers[-1]):
                    crossing[index] += nbytes(gave[value.name])
        return saved, crossing

    def _forward(self, after: Callable[[Stage], None] = lambda stage: None) -> tuple[Story, Tensor, list[float]]:
        given: dict[str, Any] = dict(self.inputs)
        story: Story = []
        seconds = []
        loss = torch.zeros(())
        for stage in self.stages:
            got = {name: given[name] for name in stage.inputs}
            got |= {value.name: _received(given[value.name]) for value in stage.receives}
            started = self._now()
            gave = stage.run(got)
            if stage.last:
                loss = self.loss(gave[OUTPUT])
            seconds.append(self._now() - started)
            after(stage)
            story.append((stage, got, gave))
            given |= gave
        return story, loss, seconds

    def _backward(self, story: Story, loss: Tensor) -> list[float]:
        gradients: dict[str, Tensor] = {}
        seconds = []
        for stage, got, gave in reversed(story):
            pairs = [(gave[value.name], gradients[value.name]) for value in stage.sends if value.name in gradients]
            if stage.last:
                pairs.append((loss, torch.ones_like(loss)))
            roots, incoming = zip(*pairs, strict=True) if pairs else ((), ())
            started = self._now()
            if roots:
                torch.autograd.backward(roots, incoming)
            seconds.append(self._now() - started)
            for value in stage.receives:
                gradient = got[value.name].grad if isinstance(got[value.name], Tensor) else None
                if gradient is not None:
                    before = gradients.get(value.name)
                    gradients[value.name] = gradient if before is None else before + gradient
        return seconds[::-1]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return perf_counter()
        # Of this thread, which autograd's backward runs in, too: neighbours who take its processor do not count.
        return thread_time()


def typical(sweeps: Sequence[Sequence[float]]) -> list[float]:
    """Returns the median of each column.

    Every sweep does the same, so each is brought to the length of the median one first: machines drift, and more from
    sweep to sweep than within one.
    """
    length = median(map(sum, sweeps))
    scaled = [[each * length / (sum(sweep) or 1.0) for each in sweep] for sweep in sweeps]
    return [median(column) for column in zip(*scaled, strict=True)]


def _received(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
