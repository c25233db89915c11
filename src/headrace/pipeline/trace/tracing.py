"""From a model to the layers that it can be cut between."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from headrace.errors import JobError
from headrace.pipeline.trace.fx_tracer import record
from headrace.pipeline.trace.layers import Layer, LayerMap, align, lay_out
from headrace.pipeline.trace.recorded_forward import Recording, Untraceable, answer, execute, places
from headrace.training.whole_model import call, examples_of
from headrace.trees import map_tensors


@dataclass(frozen=True)
class Traced:
    """A model whose forward is known.

    Attributes:
        notices: which modules could not be looked into, and why, for the user.
        select: of a batch, as `Job.inputs`.
        evaluated: what it does in evaluation, where that is something else; None where it is the same.
        places: of `evaluated`: for each of its layers the index of the one in training that it stays with.
    """

    module: nn.Module
    layers: tuple[Layer, ...]
    recording: Recording
    layout: LayerMap
    notices: tuple[str, ...]
    select: Any = None
    evaluated: Traced | None = None
    places: tuple[int, ...] = ()

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """Returns the model's inputs in a batch of the form that was traced, by the names that stages know them by."""
        given = self.recording
        found, settled = places(self.module, *arguments(batch, self.select))
        if found.keys() != given.inputs.keys() or settled != given.settled:
            raise JobError(
                f"the model was cut for a batch with {_form(given.inputs, given.settled)}, and now gets "
                f"{_form(found, settled)}; give every batch the same form"
            )
        return {given.inputs[place]: tensor for place, tensor in found.items()}


def trace(module: nn.Module, batch: Any, inputs: Any = None) -> Traced:
    """Records what a model does, on two examples or more. Neither it nor the random numbers are changed.

    What cannot be recorded of a submodule keeps it whole, as one layer. Where evaluation is something else than
    training, both are recorded. Raises a `JobError` if the model itself cannot be recorded, with the remedy.
    """
    args, kwargs = arguments(batch, inputs)
    whole: dict[type[nn.Module], str] = {}
    with unchanged(module):
        while True:
            try:
                recording = record(module.train(), args, kwargs, tuple(whole))
                _verify(recording, module, *_longer(args, kwargs), "what it does depends on the number of examples")
                evaluated = _evaluated(recording, module.eval(), args, kwargs, tuple(whole))
                break
            except Untraceable as error:
                if error.owner is module or type(error.owner) in whole:
                    raise JobError(_refusal(module, error.reason)) from error.__cause__
                whole[type(error.owner)] = error.reason
    notices = [f"{kind.__name__} is one layer, not cut: {reason}" for kind, reason in whole.items()]
    if recording.recomputes:
        notices.append("torch.utils.checkpoint is left out of what is cut; recompute='always' does as much here")
    layout = _laid_out(recording)
    traced = Traced(module, layout.layers, recording, layout, tuple(notices), inputs)
    if evaluated is None:
        return traced
    other = _laid_out(evaluated, whole=False)
    layers, places_ = align(layout.layers, other.layers)
    return replace(
        traced,
        layers=layers,
        evaluated=Traced(module, other.layers, evaluated, other, select=inputs, notices=(), places=places_),
    )


def arguments(batch: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what the model is called with for a batch; `inputs` is as in `Job`."""
    given: tuple[tuple[Any, ...], dict[str, Any]] = call(lambda *args, **kwargs: (args, kwargs), batch, inputs)
    return given


def _laid_out(recording: Recording, whole: bool = True) -> LayerMap:
    layout = lay_out(recording, whole)
    recording.values.clear()
    return layout


def _evaluated(
    recording: Recording,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: tuple[type[nn.Module], ...],
) -> Recording | None:
    """Records what a model does in evaluation, where that is something else than was recorded."""
    try:
        _verify(recording, module, args, kwargs, "what it does in training is not what it does else")
    except Untraceable:
        evaluated = record(module, args, kwargs, whole)
        _verify(
            evaluated, module, *_longer(args, kwargs), "what it does in evaluation depends on the number of examples"
        )
        return evaluated
    return None


def _verify(
    recording: Recording, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str
) -> None:
    """Runs what was recorded once more; raises an `Untraceable` if forward's questions do not get the same answers."""
    found, _ = places(module, args, kwargs)
    values: dict[fx.Node, Any] = {}
    for node in recording.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            values[node] = found[node.target]
            continue
        try:
            with torch.no_grad():
                values[node] = execute(recording, node, *map_arg((node.args, node.kwargs), values.__getitem__))
        except Exception as error:
            raise Untraceable(recording.owners[node], f"{why}: {type(error).__name__}: {error}") from error
        if node in recording.guards and answer(values[node]) != recording.guards[node]:
            raise Untraceable(recording.owners[node], why)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Gives modes, attributes, buffers and random numbers back as they were."""
    modes = [(part, part.training) for part in module.modules()]
    # What a forward has kept in attributes may belong to a graph, which cannot be copied.
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {parameter.device.index for parameter in module.parameters() if parameter.device.type == "cuda"}
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(index or 0 for index in devices)):
            yield
    finally:
        random.setstate(python_state)
        for part, held in attributes:
            vars(part).clear()
            vars(part).update(held)
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for buffer, was in buffers:
                buffer.copy_(was)


def _longer(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the arguments with one example more: the first one again."""
    examples = examples_of([*args, *kwargs.values()])

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:1]]) if tensor.dim() and len(tensor) == examples else tensor

    changed: tuple[tuple[Any, ...], Mapping[str, Any]] = map_tensors(longer, (args, kwargs))
    return changed


def _refusal(module: nn.Module, reason: str) -> str:
    return (
        f"{type(module).__name__} cannot be cut into stages: {reason}. Move that into a submodule, which is then kept "
        "whole, or train the model by a strategy whose workers hold all of it, mirrored"
    )


def _form(tensors: Mapping[str, Any], settled: Mapping[str, Any]) -> str:
    others = [f"{name}={value!r:.40}" for name, value in settled.items()]
    return ", ".join([*tensors, *others]) or "nothing"
