"""From a model to the calls that it can be cut between."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.modules import set_train_modes
from headrace.pipeline.replay.check import CutCheck
from headrace.pipeline.replay.isolation import Isolation
from headrace.pipeline.replay.recording import CallRecorder, Calls, Irreplayable, RandomDraw, Source
from headrace.pipeline.replay.replayed import ReplayedModel
from headrace.pipeline.replay.tracked import is_whole, tracked_modules
from headrace.pipeline.trace.inputs import longer_batch, masked_otherwise, places
from headrace.pipeline.trace.layers import Layer, align, shared_states
from headrace.trees import map_leaves

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
Modules = Mapping[str, nn.Module]


def trace_calls(module: nn.Module, arguments: Arguments, inputs: Any, check: bool) -> ReplayedModel:
    """Records which calls of its modules a model makes, in training and in evaluation.

    With `check` every cut is tried, and where a stage would not do as the whole model does there is none; that is done
    once, before the start, and not again by each worker. Raises an `Irreplayable` if the model cannot be cut.
    """
    if is_whole(module, root=True):
        raise Irreplayable(
            "forward hooks, parametrizations and a forward that is scripted or compiled are for the whole model"
        )
    set_train_modes(module)
    isolation = Isolation(module)
    tracked = _owned(module, isolation, tracked_modules(module), arguments)
    longer = longer_batch(*arguments)
    trained = _recorded(module, isolation, tracked, [arguments, longer])
    for variant in masked_otherwise(*arguments):
        other = _record(module, isolation, tracked, set(), variant)
        if not trained.differs_from(other):
            trained.merge(other)
    model = _traced(module, tracked, trained, arguments, inputs)
    if check:
        model = _checked(model, isolation, [arguments, longer])
    isolation = Isolation(module.eval())
    evaluated = _recorded(module, isolation, tracked, [arguments, longer])
    if not trained.differs_from(evaluated):
        evaluated.merge(trained)
    second = _traced(module, tracked, evaluated, arguments, inputs, whole=False)
    if check:
        second = _checked(second, isolation, [arguments])
    layers, places_ = align(model.layers, second.layers)
    return replace(model, layers=layers, evaluated=replace(second, places=places_))


def _owned(module: nn.Module, isolation: Isolation, tracked: Modules, arguments: Arguments) -> Modules:
    """Returns the tracked modules without those that have no parameters, and whose output is made of inputs alone."""
    unsure = {path for path, part in tracked.items() if not any(True for _ in part.parameters())}
    if not unsure:
        return tracked
    first = _record(module, isolation, tracked, unsure, arguments)
    return {path: part for path, part in tracked.items() if path not in unsure - first.owned}


def _recorded(module: nn.Module, isolation: Isolation, tracked: Modules, batches: Sequence[Arguments]) -> Calls:
    first, *others = [_record(module, isolation, tracked, set(), batch) for batch in batches]
    if len(first.calls) < 2:
        raise Irreplayable("it calls fewer than two modules with parameters")
    for other in others:
        if difference := first.differs_from(other):
            raise Irreplayable(f"what it does depends on the number of examples: {difference}")
        first.merge(other)
    return first


def _traced(
    module: nn.Module,
    tracked: Mapping[str, nn.Module],
    recording: Calls,
    arguments: Arguments,
    inputs: Any,
    whole: bool = True,
) -> ReplayedModel:
    found, settled = places(module, *arguments)
    bound = inspect.signature(module.forward).bind(*arguments[0], **arguments[1])
    tree = {
        name: map_leaves(lambda _, leaf: None if isinstance(leaf, Tensor) else leaf, value, name)
        for name, value in bound.arguments.items()
    }
    layers = _layers(module, tracked, recording, whole)
    traced = ReplayedModel(module, layers, recording, tracked, settled, tuple(found), tree, select=inputs)
    joined = _joined(recording, layers)
    for first, last, why in shared_states(module, [layer.modules for layer in layers]):
        joined[first:last] = [each or why for each in joined[first:last]]
    return replace(traced, layers=_with_joints(layers, joined))


def _checked(traced: ReplayedModel, isolation: Isolation, batches: Sequence[Arguments]) -> ReplayedModel:
    """Returns the model with no cut where a stage would not do as the whole model does."""
    joined = [layer.joined for layer in traced.layers]
    CutCheck(traced, isolation, [places(traced.module, *each)[0] for each in batches]).join(joined)
    return replace(traced, layers=_with_joints(traced.layers, joined))


def _with_joints(layers: Sequence[Layer], joined: Sequence[str]) -> tuple[Layer, ...]:
    return tuple(replace(layer, joined=why) for layer, why in zip(layers, joined, strict=True))


def _record(module: nn.Module, isolation: Isolation, tracked: Modules, unsure: set[str], arguments: Arguments) -> Calls:
    recorder = CallRecorder(module, tracked, unsure)
    args, kwargs = arguments
    with torch.enable_grad(), isolation.isolated():
        recorder.run(lambda: module.forward(*args, **kwargs))
    return recorder.found


def _layers(module: nn.Module, tracked: Mapping[str, nn.Module], recording: Calls, whole: bool) -> tuple[Layer, ...]:
    """Returns a layer for each call; with `whole`, unused tensors belong to the first."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    last = len(recording.calls) - 1
    used: list[set[str]] = []
    for index, call in enumerate(recording.calls):
        parts = [tracked[path] for path in (call.path, *call.inside)]
        own = {names[id(each)] for part in parts for each in (*part.parameters(), *part.buffers())}
        # What is read between the calls is held wherever that is run.
        used.append(own | {name for name, behind in recording.held.items() if min(behind, last) <= index})
    if whole:
        used[0] |= set(names.values()) - set().union(*used)
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    return tuple(
        Layer(
            call.name,
            tuple(name for name in parameters if name in tensors),
            tuple(name for name in buffers if name in tensors),
            modules=(call.path, *call.inside),
        )
        for call, tensors in zip(recording.calls, used, strict=True)
    )


def _joined(recording: Calls, layers: tuple[Layer, ...]) -> list[str]:
    """Returns for each layer why no cut may stand behind it, or ""."""
    joined = [""] * len(layers)
    users: dict[Source, list[int]] = {}
    for index, call in enumerate(recording.calls):
        for source in call.needs:
            if isinstance(source, RandomDraw):
                users.setdefault(source, []).append(index)
    for source in recording.needs:
        if isinstance(source, RandomDraw):
            users.setdefault(source, []).append(len(layers) - 1)
    for indices in users.values():
        for index in range(min(indices), max(indices)):
            joined[index] = f"{layers[index].name} and later ones get the same random numbers"
    return joined
