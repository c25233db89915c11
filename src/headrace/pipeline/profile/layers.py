"""What each layer of a model costs: its forward and backward, what autograd keeps, what crosses a cut behind it.

Every layer is a stage of its own, and a micro-batch goes through all of them, one after the other, so that there is
never more than one layer's activations and gradients. The first sweep counts bytes; of the seconds that layers compute
in the others the medians count, of those that they wait (for a file, say) the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.metrics import weigh
from headrace.pipeline.profile.sweep import LayerTiming, Sweep, typical
from headrace.pipeline.stages.stage import cut
from headrace.pipeline.trace.tracing import Traced, trace, unchanged
from headrace.spec.model import LayerSpec
from headrace.training.whole_model import Objective, select_target
from headrace.trees import nbytes

_LEAST, _MOST = 5, 30
"""Sweeps that count."""


@dataclass(frozen=True)
class MeasuredLayers:
    """A model's layers.

    Attributes:
        layers: in the order of forward.
        sweeps: how many counted.
        notices: modules that are one layer because they could not be looked into, for the user.
    """

    layers: tuple[LayerSpec, ...]
    sweeps: int
    notices: tuple[str, ...]


def profile(
    module: nn.Module,
    objective: Objective,
    batch: Any,
    *,
    sample: Any = None,
    seconds: float = 1.5,
    threads: int | None = None,
    autocast: torch.dtype | None = None,
) -> MeasuredLayers:
    """Measures a model's layers. The model and the random numbers are left as they were, its gradients empty.

    Layers that cannot be parted are measured together, and the last of them is said to take it all.

    Args:
        module: on the device that it is measured on.
        objective: its loss belongs to the last layer.
        batch: a micro-batch, on the same device.
        sample: a few examples to find the layers with, all of whose activations are held; None for `batch`.
        seconds: how long to measure at least; at least 5 sweeps, and at most 30.
        threads: of a worker; None for those that torch has now.
        autocast: type of mixed precision; None for none.

    Raises:
        JobError: the model cannot be cut.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    context = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    with unchanged(module), _threads(threads), context:
        traced = trace(module, batch if sample is None else sample, objective.inputs)
        groups = _groups(traced)
        sweep = Sweep(module.train(), cut(traced, groups), traced.inputs(batch), _loss(objective, batch), device)
        saved, crossing = sweep.count()
        times: list[list[LayerTiming]] = []
        until = perf_counter() + seconds
        while len(times) < _LEAST or (perf_counter() < until and len(times) < _MOST):
            times.append([each for layer in sweep.run() for each in layer])
    figures = typical(times)
    forward, backward = figures[::2], figures[1::2]
    size = {name: nbytes(parameter) for name, parameter in module.named_parameters()}
    last = {group[-1]: index for index, group in enumerate(groups)}
    layers = tuple(
        LayerSpec(
            name=layer.name,
            parameters=layer.parameters,
            parameter_bytes=sum(size[name] for name in layer.parameters),
            forward_s=forward[last[layer.name]] if layer.name in last else 0.0,
            backward_s=backward[last[layer.name]] if layer.name in last else 0.0,
            saved_bytes=saved[last[layer.name]] if layer.name in last else 0,
            crossing_bytes=crossing[last[layer.name]] if layer.name in last else 0,
            joined=bool(layer.joined),
        )
        for layer in traced.layers
    )
    return MeasuredLayers(layers, len(times), traced.notices)


def _loss(objective: Objective, batch: Any) -> Callable[[Any], Tensor]:
    def loss(output: Any) -> Tensor:
        total, weight = weigh(objective.loss(output, select_target(batch, objective.target)), 1, "the loss")
        return total / weight

    return loss


def _groups(traced: Traced) -> list[list[str]]:
    """Returns the names of layers, those together that cannot be parted."""
    groups: list[list[str]] = [[]]
    for layer in traced.layers:
        groups[-1].append(layer.name)
        if not layer.joined:
            groups.append([])
    return [group for group in groups if group]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
