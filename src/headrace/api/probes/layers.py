"""Which layers are kept in eval mode, and which draw random numbers?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from headrace.api.probes.finding import Finding, Scope, drawn, names_of, run_forward, trial
from headrace.internals import DropoutNd
from headrace.training.compute import Objective


def probe_random_layers(module: nn.Module, batch: Any, objective: Objective) -> Sequence[Finding]:
    """Tells whether forward draws random numbers, and the dropout layers."""
    with trial(module):
        before = drawn()
        run_forward(module, batch, objective)
        draws = drawn() != before
    if not draws:
        return ()
    dropouts = [
        name for name, layer in module.named_modules() if isinstance(layer, DropoutNd) and layer.training and layer.p
    ]
    return (
        Finding(
            "forward draws random numbers, others on each worker, so no number equals one device's exactly",
            names_of(dropouts) if dropouts else "the model",
            "set them to 0 to compare strategies to the last digit",
            Scope.EQUALITY,
        ),
    )


def modes_text(module: nn.Module, came_in_eval: bool) -> tuple[str, ...]:
    """Returns lines on the modes that layers train in: `came_in_eval` is that of the whole model."""
    lines = []
    if came_in_eval:
        lines.append(
            "the model came in eval mode and trains in train mode, with dropout and BatchNorm at work; to keep a "
            "submodule in eval mode, give the model in train mode and that submodule in eval mode"
        )
    kept = [
        f"{name}.{below}" if name else below
        for name, layer in module.named_modules()
        if layer.training
        for below, child in layer.named_children()
        if not child.training
    ]
    if kept:
        lines.append(f"in eval mode during training, as the model has it: {names_of(kept)}")
    return tuple(lines)
