"""From a model to the layers that it can be cut between.

Two tracers are tried. The first records forward as a graph: cuts between any two operations, and stages that run
nothing but their own. It refuses what a graph cannot say: a choice by the data, attributes that forward sets, caches,
code that is no function of tensors. The second replays forward on every stage, without the modules of other stages; it
cuts between calls of modules alone, and what lies between these calls runs on every stage. `torch.export` is not used:
it records for one mode, for the sizes that it is told, and in operations that are no module's any more, so that hooks,
BatchNorm's buffers and checkpoints by module would have to be found again.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from headrace.errors import JobError
from headrace.modules import TRACING
from headrace.pipeline.replay.recording import Irreplayable
from headrace.pipeline.replay.tracing import trace_calls
from headrace.pipeline.stage import TracedModel
from headrace.pipeline.trace.graph_tracing import trace_graph
from headrace.pipeline.trace.inputs import arguments
from headrace.pipeline.trace.recorded_forward import Untraceable
from headrace.training.user_code.trial import unchanged


def trace(module: nn.Module, batch: Any, inputs: Any = None, check: bool = True) -> TracedModel:
    """Records what a model does, on two examples or more. Neither it nor the random numbers are changed.

    With `check` the cuts of a model that is replayed are tried. Raises a `JobError` if the model cannot be cut, with
    the remedy.
    """
    args, kwargs = arguments(batch, inputs)
    with TRACING:
        return _traced(module, args, kwargs, inputs, check)


def _traced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Any, check: bool) -> TracedModel:
    with unchanged(module):
        try:
            graph = trace_graph(module, args, kwargs, inputs)
        except Untraceable as error:
            refusal = error
        else:
            if not any("not cut" in notice for notice in graph.notices):
                return graph
            try:
                replayed: TracedModel = trace_calls(module, (args, kwargs), inputs, check)
            except Irreplayable:
                return graph
            return min(graph, replayed, key=_largest)
    with unchanged(module):
        try:
            return trace_calls(module, (args, kwargs), inputs, check)
        except Irreplayable as error:
            raise JobError(
                f"{type(module).__name__} cannot be cut into stages: {refusal.reason}; nor between the calls of its "
                f"modules: {error}. Move that into a submodule, which is then kept whole, or train the model by a "
                "strategy whose workers hold all of it, mirrored"
            ) from (refusal.__cause__ or error.__cause__)


def _largest(traced: TracedModel) -> int:
    """Returns the elements of the parameters of the largest part that is not cut."""
    largest = own = 0
    for layer in traced.layers:
        own += sum(traced.module.get_parameter(name).numel() for name in layer.parameters)
        largest = max(largest, own)
        own = own if layer.joined else 0
    return largest
