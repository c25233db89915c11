"""From a model to the calls that it can be cut between."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batches import examples_of
from headrace.errors import in_one_line
from headrace.modules import set_train_modes
from headrace.pipeline.replay.check import CutCheck
from headrace.pipeline.replay.recording import CallRecorder, Calls, Irreplayable, RandomDraw, Source
from headrace.pipeline.replay.replayed import ReplayedModel
from headrace.pipeline.replay.tracked import is_whole, tracked_modules
from headrace.pipeline.trace.inputs import longer_batch, masked_otherwise, places
from headrace.pipeline.trace.layers import align, joined_by, layers_of
from headrace.training.user_code.trial import SavedModule
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
    saved = SavedModule(module)
    tracked = _owned(module, saved, tracked_modules(module), arguments)
    longer = longer_batch(*arguments)
    trained = _recorded(module, saved, tracked, [arguments, longer])
    for variant in masked_otherwise(*arguments):
        other = _record(module, saved, tracked, set(), variant)
        if not trained.differs_from(other):
            trained.merge(other)
    model = _traced(module, tracked, trained, arguments, inputs)
    if check:
        model = _checked(model, saved, [arguments, longer])
    saved = SavedModule(module.eval())
    evaluated = _recorded(module, saved, tracked, [arguments, longer])
    if not trained.differs_from(evaluated):
        evaluated.merge(trained)
    second = _traced(module, tracked, evaluated, arguments, inputs, whole=False)
    if check:
        second = _checked(second, saved, [arguments])
    layers, places_ = align(model.layers, second.layers)
    return replace(model, layers=layers, evaluated=replace(second, places=places_))


def _owned(module: nn.Module, saved: SavedModule, tracked: Modules, arguments: Arguments) -> Modules:
    """Returns the tracked modules without those that have no parameters, and whose output is made of inputs alone."""
    unsure = {path for path, part in tracked.items() if not any(True for _ in part.parameters())}
    if not unsure:
        return tracked
    first = _record(module, saved, tracked, unsure, arguments)
    return {path: part for path, part in tracked.items() if path not in unsure - first.owned}


def _recorded(module: nn.Module, saved: SavedModule, tracked: Modules, batches: Sequence[Arguments]) -> Calls:
    first, *others = [_record(module, saved, tracked, set(), batch) for batch in batches]
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
    names = [call.name for call in recording.calls]
    called = [(call.path, *call.inside) for call in recording.calls]
    return ReplayedModel(
        module=module,
        layers=layers_of(module, names, _used(module, tracked, recording), called, _joined(recording), whole),
        names={place: place for place in found},
        settled=settled,
        select=inputs,
        recording=recording,
        tracked=tracked,
        tree=tree,
    )


def _checked(traced: ReplayedModel, saved: SavedModule, batches: Sequence[Arguments]) -> ReplayedModel:
    """Returns the model with no cut where a stage would not do as the whole model does."""
    joined = [layer.joined for layer in traced.layers]
    CutCheck(traced, saved, [places(traced.module, *each)[0] for each in batches]).join(joined)
    return replace(traced, layers=joined_by(traced.layers, joined))


def _record(module: nn.Module, saved: SavedModule, tracked: Modules, unsure: set[str], arguments: Arguments) -> Calls:
    recorder = CallRecorder(module, tracked, unsure)
    args, kwargs = arguments
    try:
        with torch.enable_grad(), saved.restoring():
            recorder.run(lambda: module.forward(*args, **kwargs))
    except Irreplayable:
        raise
    except Exception as error:  # whatever a user's forward raises, of more examples or with another mask
        count = examples_of([*args, *kwargs.values()])
        raise Irreplayable(f"it fails on {count} examples: {in_one_line(error)}") from error
    return recorder.found


def _used(module: nn.Module, tracked: Modules, recording: Calls) -> list[set[str]]:
    """Returns the names of the parameters and buffers that each call uses."""
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    last = len(recording.calls) - 1
    used: list[set[str]] = []
    for index, call in enumerate(recording.calls):
        parts = [tracked[path] for path in (call.path, *call.inside)]
        own = {names[id(each)] for part in parts for each in (*part.parameters(), *part.buffers())}
        # What is read between the calls is held wherever that is run.
        used.append(own | {name for name, behind in recording.held.items() if min(behind, last) <= index})
    return used


def _joined(recording: Calls) -> list[str]:
    """Returns for each call why no cut may stand behind it, or ""."""
    joined = [""] * len(recording.calls)
    users: dict[Source, list[int]] = {}
    for index, call in enumerate(recording.calls):
        for source in call.needs:
            if isinstance(source, RandomDraw):
                users.setdefault(source, []).append(index)
    for source in recording.needs:
        if isinstance(source, RandomDraw):
            users.setdefault(source, []).append(len(joined) - 1)
    for indices in users.values():
        for index in range(min(indices), max(indices)):
            joined[index] = f"{recording.calls[index].name} and later ones get the same random numbers"
    return joined
