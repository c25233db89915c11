"""A micro-batch through a model and back, layer by layer, in one process: how long each takes, what it keeps.

    forward    x ─► layer 0 ─► detached ─► layer 1 ─► detached ─► ...
                     │ ▲                    │ ▲
    backward         └─┘                    └─┘ ones

Each layer's backward follows its forward at once, from a gradient of ones, and its gradients are dropped before the
next layer is run: so a model can be measured whose activations and gradients there is no room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from headrace.pipeline.stages.stage import OUTPUT, Stage
from headrace.trees import nbytes


@dataclass(frozen=True)
class LayerTiming:
    """What a layer took for one forward or backward.

    Attributes:
        busy_s: seconds that it computed.
        waited_s: seconds that it did not, because it slept, or read, or others had the processor.
    """

    busy_s: float
    waited_s: float


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

    def run(self) -> list[tuple[LayerTiming, LayerTiming]]:
        """Returns what each layer took, forward and backward."""
        passes = []

        def measure(stage: Stage, got: Mapping[str, Any]) -> dict[str, Any]:
            # The second time counts, when gradients add up, as they do from micro-batch to micro-batch.
            for _ in range(2):
                values = _received(got)
                began = self._now()
                gave, roots = self._forward(stage, values)
                forwarded = self._now()
                self._backward(stage, roots)
                ended = self._now()
            passes.append((_between(began, forwarded), _between(forwarded, ended)))
            return gave

        self._each(measure)
        return passes

    def count(self) -> tuple[list[int], list[int]]:
        """Returns the bytes that autograd keeps for each layer and for none before it, and those alive behind it."""
        model = {_place(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        saved: list[int] = []
        crossing = [0] * len(self.stages)
        # Names of values that are kept for a layer already. Places in memory are taken again.
        counted: set[str] = set()

        def measure(stage: Stage, got: Mapping[str, Any]) -> dict[str, Any]:
            kept, gave = self._kept(stage, got)
            before = model | {_place(got[name]) for name in counted & got.keys()}
            saved.append(sum(size for place, size in kept.items() if place not in before))
            held = {**got, **gave}
            tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
            counted.update(name for name, tensor in tensors.items() if _place(tensor) in kept.keys() | before)
            for value in stage.sends:
                for index in range(value.producer, value.consumers[-1]):
                    crossing[index] += nbytes(gave[value.name])
            return gave

        self._each(measure)
        return saved, crossing

    def _each(self, measure: Callable[[Stage, Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Does something with every layer and what it gets, which returns what the layer gives."""
        alive: dict[str, Any] = {}
        for stage in self.stages:
            got = {name: self.inputs[name] for name in stage.inputs}
            got |= {value.name: alive[value.name] for value in stage.receives}
            gave = measure(stage, got)
            alive |= _received({value.name: gave[value.name] for value in stage.sends})
            del got, gave
            for value in stage.receives:
                if value.consumers[-1] == stage.index:
                    del alive[value.name]
            for name in stage.parameters:
                self.module.get_parameter(name).grad = None

    def _forward(self, stage: Stage, values: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """Returns what a layer gives, and what of it has a gradient."""
        gave = stage.run(values)
        if stage.last:
            gave[OUTPUT] = self.loss(gave[OUTPUT])
        roots = [value for value in gave.values() if isinstance(value, Tensor) and value.requires_grad]
        return gave, roots

    def _kept(self, stage: Stage, got: Mapping[str, Any]) -> tuple[dict[int, int], dict[str, Any]]:
        """Returns the bytes that autograd keeps for a layer, by their place in memory, and what the layer gives."""
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[_place(tensor)] = tensor.untyped_storage().nbytes()
            # Detached, because a layer that keeps what it has made would hold itself for ever.
            return tensor.detach()

        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return kept, self._forward(stage, _received(got))[0]
        except RuntimeError:
            # torch.func.grad lets nobody look on; what else went wrong goes wrong again.
            gave, roots = self._forward(stage, _received(got))
            return {_place(tensor): tensor.untyped_storage().nbytes() for tensor in _saved(roots)}, gave

    def _backward(self, stage: Stage, roots: Sequence[Tensor]) -> None:
        if roots:
            with stage.accumulation.going_on():
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def _now(self) -> tuple[float, float]:
        """Returns the time of the clock, and of the processor."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            now = perf_counter()
            return now, now
        # Of this thread, which autograd's backward runs in, too: neighbours who take its processor do not count.
        return perf_counter(), thread_time()


def typical(sweeps: Sequence[Sequence[LayerTiming]]) -> list[float]:
    """Returns the seconds of each column: the median that it computed, and the least that it waited.

    Every sweep does the same, so each is brought to the length of the median one first: machines drift, and more from
    sweep to sweep than within one. Whoever has no processor for a while waits, too, but hardly every time.
    """
    busy = [[each.busy_s for each in sweep] for sweep in sweeps]
    length = median(map(sum, busy))
    scaled = [[each * length / (sum(sweep) or 1.0) for each in sweep] for sweep in busy]
    waited = [min(each.waited_s for each in column) for column in zip(*sweeps, strict=True)]
    return [median(column) + wait for column, wait in zip(zip(*scaled, strict=True), waited, strict=True)]


def _between(began: tuple[float, float], ended: tuple[float, float]) -> LayerTiming:
    busy = ended[1] - began[1]
    return LayerTiming(busy, max(0.0, ended[0] - began[0] - busy))


def _saved(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields what the nodes of a graph keep, as far as they show it."""
    nodes = {root.grad_fn for root in roots}
    left = list(nodes)
    while left:
        node: Any = left.pop()
        shown = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
        for kept in (*shown, getattr(node, "saved_tensors", ())):
            yield from (each for each in (kept if isinstance(kept, tuple) else (kept,)) if isinstance(each, Tensor))
        further = {following for following, _ in node.next_functions if following is not None} - nodes
        nodes |= further
        left += further


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _received(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values as a stage gets them: without what they were made of."""
    return {
        name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
