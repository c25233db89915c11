"""A stage: a contiguous part of a model, on the model's own modules; and what a model must be to be cut into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from headrace.errors import JobError, UsageError
from headrace.modules import memory_of
from headrace.pipeline.backward import WeightGradients
from headrace.pipeline.buffers import SavedBuffers
from headrace.pipeline.trace.inputs import arguments, form, places
from headrace.pipeline.trace.layers import Layer
from headrace.trees import nbytes

OUTPUT = "output"
"""Under this name the last stage gives what the model returns."""


@dataclass(frozen=True)
class Value:
    """What crosses a cut: a tensor, a number or a shape."""

    name: str
    producer: int
    consumers: tuple[int, ...]


def at_once() -> None:
    """Does nothing, for callers of `Stage.run` that do not ask when its layers begin."""


class Stage(ABC):
    """One of the parts that a model is cut into.

    It holds the model's own modules, which follow `train()` and `eval()`, and whose hooks run. `values` are all that
    cross cuts.

    Attributes:
        layers: the names of those that it has.
        parameters, buffers: the names of those that it uses; what is tied is used by several stages.
        modules: paths of the modules that its layers call.
        receives, sends: what it gets from earlier stages, and gives to later ones.
        producers, consumers: the indices of these stages, ascending.
        inputs: names of the model's inputs that it needs, from `TracedModel.inputs`.
        evaluated: the stage that runs in evaluation: itself, unless the model's forward is another one there.
        gradients: calls layers whose weights' gradients can be added up in place, or made later.
    """

    inputs: tuple[str, ...] = ()

    def __init__(
        self, module: nn.Module, layers: Sequence[Layer], index: int, values: Sequence[Value], last: bool
    ) -> None:
        self.module = module
        self.index = index
        self.last = last
        self.layers = tuple(layer.name for layer in layers)
        self.parameters = _once(name for layer in layers for name in layer.parameters)
        self.buffers = _once(name for layer in layers for name in layer.buffers)
        self.modules = _once(path for layer in layers for path in layer.modules)
        self.receives = tuple(value for value in values if index in value.consumers)
        self.sends = tuple(value for value in values if value.producer == index)
        self.producers = sorted({value.producer for value in self.receives})
        self.consumers = sorted({consumer for value in self.sends for consumer in value.consumers})
        self.evaluated: Stage = self
        self.gradients = WeightGradients()

    @abstractmethod
    def run(self, values: Mapping[str, Any], begun: Callable[[], None] = at_once) -> dict[str, Any]:
        """Runs its part of forward on the inputs that it needs and the values that it receives, by name.

        Returns what it sends, by name; of the last stage the model's output, as `OUTPUT`. `begun` is called when the
        first of its own layers begins. Raises a `JobError` if forward would do something else than for the examples
        that it was traced with.
        """

    def parameter_bytes(self) -> int:
        """Returns the bytes of the parameters that it uses."""
        return sum(nbytes(self.module.get_parameter(name)) for name in self.parameters)

    def changing_buffers(self) -> SavedBuffers:
        """Returns its buffers and frozen parameters, which forward may change."""
        return SavedBuffers(self.module, (*self.buffers, *self.parameters))


@dataclass(frozen=True, kw_only=True)
class TracedModel(ABC):
    """A model whose forward is known, and can be cut between its layers.

    Attributes:
        module: the model itself.
        layers: in the order of forward.
        names: by which stages know the tensors in the arguments of forward, by their places there.
        settled: what else there is in the arguments, by its place.
        select: of a batch, as `Job.inputs`.
        notices: what the user should know of the cuts.
        evaluated: what it does in evaluation, where that is something else; None where it is the same.
        places: of `evaluated`: for each of its layers the index of the one in training that it stays with.
    """

    module: nn.Module
    layers: tuple[Layer, ...]
    names: Mapping[str, str]
    settled: Mapping[str, Any]
    select: Any = None
    notices: tuple[str, ...] = ()
    evaluated: TracedModel | None = None
    places: tuple[int, ...] = ()

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """Returns the model's inputs in a batch of the form that was traced, by the names that stages know them by."""
        found, settled = places(self.module, *arguments(batch, self.select))
        if found.keys() != self.names.keys() or settled != self.settled:
            raise JobError(
                f"the model was cut for a batch with {form(self.names, self.settled)}, and now gets "
                f"{form(found, settled)}; give every batch the same form"
            )
        return {self.names[place]: tensor for place, tensor in found.items()}

    @abstractmethod
    def stages(self, placed: Sequence[int], count: int) -> tuple[Stage, ...]:
        """Returns `count` stages; `placed` is that of each layer, ascending."""


def cut(traced: TracedModel, partition: Sequence[Sequence[str]]) -> tuple[Stage, ...]:
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
    stages = traced.stages(placed, len(stops))
    if traced.evaluated:
        others = traced.evaluated.stages([placed[place] for place in traced.evaluated.places], len(stops))
        for stage, other in zip(stages, others, strict=True):
            stage.evaluated = other
    return stages


def bounds_of(placed: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Returns the layers [start, stop) of each stage; `placed` is that of each layer, ascending."""
    return list(pairwise(bisect_left(placed, index) for index in range(count + 1)))


def buffers_of(stages: Sequence[Stage]) -> frozenset[int]:
    """Returns the memory of the buffers of the model that is cut into stages; see `memory_of`."""
    return frozenset(memory_of(buffer) for buffer in stages[0].module.buffers())


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
