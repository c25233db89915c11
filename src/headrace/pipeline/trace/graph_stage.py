"""Stages of a recorded forward: each runs its own nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from headrace.errors import JobError
from headrace.pipeline.stage import OUTPUT, Stage, TracedModel, Value, at_once, bounds_of
from headrace.pipeline.trace.recorded_forward import Recording, answer, execute
from headrace.trees import map_leaves


@dataclass(frozen=True, kw_only=True)
class RecordedModel(TracedModel):
    """A model whose forward is a graph; `layer` is the index of the layer that a node belongs to."""

    recording: Recording
    layer: Mapping[fx.Node, int]

    def stages(self, placed: Sequence[int], count: int) -> tuple[Stage, ...]:
        values = _values(self, placed, count - 1)
        return tuple(
            RecordedStage(self, index, bounds, values, index == count - 1)
            for index, bounds in enumerate(bounds_of(placed, count))
        )


class RecordedStage(Stage):
    """Runs the nodes of the layers within `bounds`."""

    def __init__(
        self, traced: RecordedModel, index: int, bounds: tuple[int, int], values: Sequence[Value], last: bool
    ) -> None:
        super().__init__(traced.module, traced.layers[slice(*bounds)], index, values, last)
        self._recording = traced.recording
        received = {value.name for value in self.receives}
        self._nodes = _needed(traced, bounds, received, last)
        self.inputs = tuple(node.name for node in self._nodes if node.op == "placeholder")
        self._outside = received | set(self.inputs)
        # A value that other stages hold, too, is copied before it is changed.
        self._copied = {target for writer, target in self._recording.writes if writer in self._nodes}
        self._drop = _last_uses(self._nodes)

    def run(self, values: Mapping[str, Any], begun: Callable[[], None] = at_once) -> dict[str, Any]:
        begun()
        recording = self._recording
        held: dict[fx.Node, Any] = {}
        out: dict[str, Any] = {}
        sent = {value.name for value in self.sends}
        for node, drop in zip(self._nodes, self._drop, strict=True):
            if node.op == "output":
                leaves: Any = map_arg(node.args[0], held.__getitem__)
                out[OUTPUT] = map_leaves(partial(_leaf, leaves), recording.output)
            elif node.name in self._outside:
                value = values[node.name]
                held[node] = value.clone() if node in self._copied else value
            else:
                held[node] = self._do(node, held)
                if node.name in sent:
                    out[node.name] = held[node]
            for old in drop:
                del held[old]
        return out

    def _do(self, node: fx.Node, held: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), held.__getitem__)
        recording = self._recording
        if node.op == "call_module" and len(args) == 1 and not kwargs and node not in recording.gradless:
            value = self.gradients.call(recording.module.get_submodule(str(node.target)), args[0])
        else:
            value = execute(recording, node, args, kwargs)
        guards = recording.guards
        if node in guards and answer(value) != guards[node]:
            owner = type(recording.owners[node]).__name__
            raise JobError(
                f"the model was cut by what it does where {node.name} in the forward of {owner} is {guards[node]!r}, "
                f"and now that is {answer(value)!r}; give every batch the same form, or move what depends on it into "
                "a submodule of its own"
            )
        return value


def _values(traced: RecordedModel, stage: Sequence[int], last: int) -> list[Value]:
    """Returns what crosses cuts; `stage` is that of each layer, and the output is that of the last one."""
    layer = traced.layer
    values = []
    for node, index in layer.items():
        users = {stage[layer[user]] if user in layer else last for user in node.users}
        later = users - {stage[index]}
        if later:
            values.append(Value(node.name, stage[index], tuple(sorted(later))))
    return values


def _needed(traced: RecordedModel, bounds: tuple[int, int], received: set[str], last: bool) -> tuple[fx.Node, ...]:
    """Returns the nodes of a stage, in order: its own, and what every stage does for itself."""
    layer, recording = traced.layer, traced.recording
    needed: set[fx.Node] = set()

    def need(node: fx.Node) -> None:
        if node not in needed:
            needed.add(node)
            if node.name not in received:
                for other in node.all_input_nodes:
                    need(other)

    for node in recording.graph.nodes:
        if node.op == "output":
            if last:
                need(node)
        elif bounds[0] <= layer.get(node, -1) < bounds[1]:
            need(node)
        elif bounds[0] == 0 and node not in layer and node in recording.guards:
            # One stage must check it.
            need(node)
    return tuple(node for node in recording.graph.nodes if node in needed)


def _last_uses(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Returns for each node whose value is not needed any more when it is done."""
    last = {other: place for place, node in enumerate(nodes) for other in (node, *node.all_input_nodes)}
    drop: list[list[fx.Node]] = [[] for _ in nodes]
    for node, place in last.items():
        if node.op != "output" and node in set(nodes):
            drop[place].append(node)
    return drop


def _leaf(leaves: Sequence[Any], name: str, index: int) -> Any:
    return leaves[index]
