"""A stage: a contiguous part of a model, on the model's own modules."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from headrace.errors import JobError, UsageError
from headrace.pipeline.backward import WeightGradients
from headrace.pipeline.buffers import SavedBuffers
from headrace.pipeline.trace.recorded_forward import answer, execute
from headrace.pipeline.trace.tracing import Traced
from headrace.trees import map_leaves, nbytes

OUTPUT = "output"
"""Under this name the last stage gives what the model returns."""


@dataclass(frozen=True)
class Value:
    """What crosses a cut: a tensor, a number or a shape."""

    name: str
    producer: int
    consumers: tuple[int, ...]


class Stage:
    """One of the parts that a model is cut into.

    It holds the model's own modules, which follow `train()` and `eval()`, and whose hooks run. Its layers are those
    within `bounds`; `values` are all that cross cuts.

    Attributes:
        parameters, buffers: the names of those that it uses; what is tied is used by several stages.
        inputs: names of the model's inputs that it needs, from `Traced.inputs`.
        evaluated: the stage that runs in evaluation: itself, unless the model's forward is another one there.
    """

    def __init__(
        self, traced: Traced, index: int, bounds: tuple[int, int], values: Sequence[Value], last: bool
    ) -> None:
        layers = traced.layers[slice(*bounds)]
        self.index = index
        self.layers = tuple(layer.name for layer in layers)
        self.parameters = _once(name for layer in layers for name in layer.parameters)
        self.buffers = _once(name for layer in layers for name in layer.buffers)
        self.last = last
        self.evaluated = self
        self.gradients = WeightGradients()
        self.receives = tuple(value for value in values if index in value.consumers)
        self.sends = tuple(value for value in values if value.producer == index)
        self.producers = sorted({value.producer for value in self.receives})
        self.consumers = sorted({consumer for value in self.sends for consumer in value.consumers})
        self._recording = traced.recording
        received = {value.name for value in self.receives}
        self._nodes = _needed(traced, bounds, received, last)
        self.inputs = tuple(node.name for node in self._nodes if node.op == "placeholder")
        self._outside = received | set(self.inputs)
        # A value that other stages hold, too, is copied before it is changed.
        self._copied = {target for writer, target in self._recording.writes if writer in self._nodes}
        self._drop = _last_uses(self._nodes)

    def parameter_bytes(self) -> int:
        """Returns the bytes of the parameters that it uses."""
        return sum(nbytes(self._recording.module.get_parameter(name)) for name in self.parameters)

    def changing_buffers(self) -> SavedBuffers:
        """Returns its buffers, which forward may change."""
        return SavedBuffers(self._recording.module, self.buffers)

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Runs its part of forward on the inputs that it needs and the values that it receives, by name.

        Returns what it sends, by name; of the last stage the model's output, as `OUTPUT`. Raises a `JobError` if
        forward would do something else than for the examples that it was traced with.
        """
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


def cut(traced: Traced, partition: Sequence[Sequence[str]]) -> tuple[Stage, ...]:
    """Cuts a model into stages of its layers, all of them in order, by name."""
    names = [layer.name for layer in traced.layers]
    if [name for part in partition for name in part] != names or not all(partition):
        raise UsageError(
            f"a partition must have all {len(names)} layers of the model, in order, at least one a stage; got "
            f"{[list(part) for part in partition]} of {names}"
        )
    stops = list(accumulate(map(len, partition)))
    for stop in stops[:-1]:
        if traced.layers[stop - 1].joined:
            raise UsageError(
                f"no cut can stand between {names[stop - 1]} and {names[stop]}: {traced.layers[stop - 1].joined}"
            )
    placed = [bisect_right(stops, index) for index in range(len(names))]
    stages = _stages(traced, placed, len(stops))
    if traced.evaluated:
        others = _stages(traced.evaluated, [placed[place] for place in traced.evaluated.places], len(stops))
        for stage, other in zip(stages, others, strict=True):
            stage.evaluated = other
    return stages


def _stages(traced: Traced, placed: Sequence[int], count: int) -> tuple[Stage, ...]:
    """Returns the stages of a forward; `placed` is that of each layer, ascending."""
    values = _values(traced, placed, count - 1)
    bounds = pairwise(bisect_left(placed, index) for index in range(count + 1))
    return tuple(Stage(traced, index, bound, values, index == count - 1) for index, bound in enumerate(bounds))


def _values(traced: Traced, stage: Sequence[int], last: int) -> list[Value]:
    """Returns what crosses cuts; `stage` is that of each layer, and the output is that of the last one."""
    layer = traced.layout.layer
    values = []
    for node, index in layer.items():
        users = {stage[layer[user]] if user in layer else last for user in node.users}
        later = users - {stage[index]}
        if later:
            values.append(Value(node.name, stage[index], tuple(sorted(later))))
    return values


def _needed(traced: Traced, bounds: tuple[int, int], received: set[str], last: bool) -> tuple[fx.Node, ...]:
    """Returns the nodes of a stage, in order: its own, and what every stage does for itself."""
    layer, recording = traced.layout.layer, traced.recording
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


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
