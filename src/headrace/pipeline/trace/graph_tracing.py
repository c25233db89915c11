"""A model's forward as a graph, from which layers are cut: recorded in training and in evaluation, and verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from headrace import internals
from headrace.errors import in_one_line
from headrace.hooks import silenced
from headrace.modules import evaluating, same_values, set_train_modes, stateful_modules
from headrace.pipeline.replay.structure import template
from headrace.pipeline.trace.fx_tracer import record
from headrace.pipeline.trace.graph_stage import RecordedModel
from headrace.pipeline.trace.inputs import longer_batch, masked_otherwise, places
from headrace.pipeline.trace.layers import align, lay_out
from headrace.pipeline.trace.recorded_forward import Recording, Untraceable, answer, execute
from headrace.training.deferred.lending import lent
from headrace.training.user_code.sketches import gradients_of
from headrace.training.user_code.trial import largest_difference, largest_element, rounding, trial

_NUMBER = "what it does depends on the number of examples"
_MASK = "what it does depends on the mask"


def trace_graph(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Any) -> RecordedModel:
    """Records what a model does as a graph.

    What cannot be recorded of a submodule keeps it whole, as one layer. Where evaluation is something else than
    training, both are recorded. Raises an `Untraceable` if the model itself cannot be recorded.
    """
    whole: dict[type[nn.Module], str] = {}
    for _, owner in stateful_modules(module):
        # Forward may change the state by means that are not seen, such as the items of a dictionary.
        reason = "its get_extra_state returns what forward may change, and a graph has no more than tensors"
        if owner is module:
            raise Untraceable(module, reason)
        whole[type(owner)] = reason
    while True:
        try:
            set_train_modes(module)
            recording = record(module, args, kwargs, tuple(whole))
            longer = longer_batch(args, kwargs)
            _verify(recording, module, *longer, _NUMBER)
            _require_same(recording, module, *longer)
            if recording.constants:
                _compare_constants(recording, record(module, *longer, tuple(whole)))
            for masked in masked_otherwise(args, kwargs):
                _verify(recording, module, *masked, _MASK)
            with evaluating(module):
                evaluated = _evaluated(recording, module, args, kwargs, tuple(whole))
            break
        except Untraceable as error:
            if error.owner is module or type(error.owner) in whole:
                raise
            whole[type(error.owner)] = error.reason
    notices = [f"{kind.__name__} is one layer, not cut: {reason}" for kind, reason in whole.items()]
    if recording.recomputes:
        notices.append("torch.utils.checkpoint is left out of what is cut; recompute='always' does as much here")
    traced = _laid_out(recording, inputs)
    if evaluated is None:
        return replace(traced, notices=tuple(notices))
    other = _laid_out(evaluated, inputs, whole=False)
    layers, places_ = align(traced.layers, other.layers)
    return replace(traced, layers=layers, notices=tuple(notices), evaluated=replace(other, places=places_))


def _compare_constants(recording: Recording, other: Recording) -> None:
    """Raises an `Untraceable` if tensors that forward has created itself are others for other examples."""
    for node in recording.graph.nodes:
        if node.op == "get_attr" and node.target in recording.constants:
            found = other.constants.get(node.target)
            if found is None or not same_values(found, recording.constants[node.target]):
                reason = "it computes with what is left in an attribute by forward, or made by means that are not seen"
                raise Untraceable(recording.owners[node], reason)


def _laid_out(recording: Recording, select: Any, whole: bool = True) -> RecordedModel:
    layers, layer = lay_out(recording, whole)
    recording.values.clear()
    return RecordedModel(
        module=recording.module,
        layers=layers,
        names=recording.inputs,
        settled=recording.settled,
        select=select,
        recording=recording,
        layer=layer,
    )


def _evaluated(
    recording: Recording,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: tuple[type[nn.Module], ...],
) -> Recording | None:
    """Records what a model does in evaluation, where that is something else than was recorded."""
    longer = longer_batch(args, kwargs)
    try:
        _verify(recording, module, *longer, "what it does in training is not what it does else")
        _require_same(recording, module, *longer)
    except Untraceable:
        evaluated = record(module, args, kwargs, whole)
        _verify(evaluated, module, *longer, "what it does in evaluation depends on the number of examples")
        _require_same(evaluated, module, *longer)
        return evaluated
    return None


def _require_same(recording: Recording, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises an `Untraceable` if forward, or its backward pass in training, is another one than what was recorded.

    What Python asks of the type of a value is answered for a proxy. Hooks of autograd's graph, and of what it saves,
    are not recorded.
    """
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    trained = [*named.values()]

    def results(run: Callable[[], Any]) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        with trial(module), torch.enable_grad(), silenced(trained):
            outputs = template(run())[1]
            leaves = [each for each in outputs if each.requires_grad]
            # torch.utils.checkpoint may take no other gradients than those of backward().
            if not leaves or recording.recomputes or not module.training:
                return outputs, ()
            weighed = [each.flatten() @ torch.linspace(1, 2, each.numel()).to(each) for each in leaves]
            total = torch.stack([each.double() for each in weighed]).sum()
            found = gradients_of(total, named, lent(module)).values()
            return outputs, [part for each in found for part in (each or (None,))]

    def forward() -> Any:
        try:
            return module.forward(*args, **kwargs)
        except Exception as error:  # whatever a user's forward raises, of one example more
            raise Untraceable(module, f"{_NUMBER}: {in_one_line(error)}") from error

    before = [internals.version(each) for each in trained]
    one, of_one = results(forward)
    if before != [internals.version(each) for each in trained]:
        return  # a forward that writes to what is trained is refused by that name; here it is another model each time
    other, of_other = results(lambda: _verify(recording, module, args, kwargs, _NUMBER, gradients=True))
    if _apart(one, other):
        raise Untraceable(module, "it computes something else than was seen of it, as where Python asks for a type")
    if _apart(of_one, of_other):
        raise Untraceable(module, "its backward pass is not that of its operations (hooks of autograd's graph)")


def _apart(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Tells whether tensors differ by more than rounding of the largest: one that should be 0 is all rounding."""
    if [each is None for each in some] != [each is None for each in others]:
        return True
    pairs = [(one, other) for one, other in zip(some, others, strict=True) if one is not None and other is not None]
    largest = max((largest_element(other) for _, other in pairs), default=0.0)
    return any(largest_difference(one, other) > largest * rounding(one.dtype) for one, other in pairs)


def _verify(
    recording: Recording,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    why: str,
    gradients: bool = False,
) -> Any:
    """Runs what was recorded once more, and returns the leaves of its output.

    Raises an `Untraceable` if forward's questions do not get the same answers.
    """
    found, _ = places(module, args, kwargs)
    values: dict[fx.Node, Any] = {}
    for node in recording.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], values.__getitem__)
        if node.op == "placeholder":
            values[node] = found[node.target]
            continue
        try:
            with torch.set_grad_enabled(gradients):
                values[node] = execute(recording, node, *map_arg((node.args, node.kwargs), values.__getitem__))
        except Exception as error:
            raise Untraceable(recording.owners[node], f"{why}: {type(error).__name__}: {error}") from error
        if node in recording.guards and answer(values[node]) != recording.guards[node]:
            raise Untraceable(recording.owners[node], why)
