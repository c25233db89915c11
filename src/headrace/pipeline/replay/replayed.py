"""A model whose own forward every stage runs, and its stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.pipeline.replay.interception import intercepted
from headrace.pipeline.replay.recording import DEVICE, Calls, Leaf, RandomDraw
from headrace.pipeline.replay.run import Follower, Left, StageRun
from headrace.pipeline.replay.structure import OpaqueLeaf, fill, leaves_of, template
from headrace.pipeline.stage import OUTPUT, Stage, TracedModel, Value, at_once, bounds_of
from headrace.trees import map_leaves


@dataclass(frozen=True, kw_only=True)
class ReplayedModel(TracedModel):
    """A model that is cut between the calls of its tracked modules.

    Attributes:
        tracked: modules, by path.
        tree: the arguments of forward, with None in the places of tensors.
    """

    recording: Calls
    tracked: Mapping[str, nn.Module]
    tree: Mapping[str, Any]

    def stages(self, placed: Sequence[int], count: int) -> tuple[Stage, ...]:
        crossing = _Crossing(self.recording, placed, count)
        return tuple(
            ReplayedStage(self, index, bounds, crossing, index == count - 1)
            for index, bounds in enumerate(bounds_of(placed, count))
        )

    def call(self, values: Mapping[str, Tensor]) -> Any:
        """Calls forward with inputs by name."""
        bound = inspect.signature(self.module.forward).bind_partial()
        bound.arguments.update(
            {
                name: map_leaves(lambda place, leaf: values.get(place, leaf), tree, name)
                for name, tree in self.tree.items()
            }
        )
        return self.module.forward(*bound.args, **bound.kwargs)


class _Crossing:
    """What crosses the cuts of a replayed model.

    Attributes:
        data: tensors of calls, by the name that they cross under.
        sizes: those of which the size alone is needed, which each stage tells the next.
    """

    def __init__(self, recording: Calls, placed: Sequence[int], count: int) -> None:
        self.values: list[Value] = []
        self.data: dict[str, Leaf] = {}
        self.sizes: dict[str, Leaf] = {}
        bounds, last = bounds_of(placed, count), count - 1
        consumers: dict[Leaf, set[int]] = {}
        for index, call in enumerate(recording.calls):
            for source in call.needs:
                if not isinstance(source, RandomDraw):
                    consumers.setdefault(source, set()).add(placed[index])
        for source in recording.needs:
            if not isinstance(source, RandomDraw):
                consumers.setdefault(source, set()).add(last)
        for leaf in sorted(consumers.keys() | recording.touched.keys()):
            name, producer = f"{recording.calls[leaf[0]].name}/{leaf[1]}", placed[leaf[0]]
            later = {stage for stage in consumers.get(leaf, set()) if stage > producer}
            if later:
                self.values.append(Value(name, producer, tuple(sorted(later))))
                self.data[name] = leaf
            asking = [
                stage
                for stage in range(producer + 1, count)
                if leaf in recording.touched
                and stage not in later
                and (stage == last or recording.touched[leaf] < bounds[stage][1])
            ]
            for stage in range(producer + 1, max(asking, default=producer) + 1):
                self.values.append(Value(f"{name} size {stage}", stage - 1, (stage,)))
                self.sizes[f"{name} size {stage}"] = leaf


class ReplayedStage(Stage):
    """Runs the model's forward, in which only the calls within `bounds` are done."""

    def __init__(
        self, traced: ReplayedModel, index: int, bounds: tuple[int, int], crossing: _Crossing, last: bool
    ) -> None:
        super().__init__(traced.module, traced.layers[slice(*bounds)], index, crossing.values, last)
        self.inputs = tuple(traced.names)
        self._traced = traced
        self._bounds = bounds
        self._data = {each.name: crossing.data[each.name] for each in self.receives if each.name in crossing.data}
        self._sizes = {each.name: crossing.sizes[each.name] for each in self.receives if each.name in crossing.sizes}
        self._sent = {each.name: {**crossing.data, **crossing.sizes}[each.name] for each in self.sends}
        self._sent_sizes = {each.name for each in self.sends if each.name in crossing.sizes}

    def run(
        self, values: Mapping[str, Any], begun: Callable[[], None] = at_once, follow: Follower | None = None
    ) -> dict[str, Any]:
        """See `Stage.run`; `follow` is told of every call."""
        traced, recording = self._traced, self._traced.recording
        received = {leaf: values[name] for name, leaf in self._data.items()}
        sizes = {leaf: values[name] for name, leaf in self._sizes.items()}
        sent = frozenset(self._sent.values())
        run = StageRun(recording.calls, self._bounds, received, sizes, sent, self.last, begun, follow)
        out: dict[str, Any] = {}
        where = _Placed(next(iter(values.values())).device) if recording.places_asked else nullcontext()
        try:
            with intercepted(traced.tracked, run), where:
                output = traced.call(values)
            run.finish()
            out[OUTPUT] = _without_opaque(output) if self.index else output
        except Left as left:
            if left.run is not run:
                raise
        for name, leaf in self._sent.items():
            if name not in self._sent_sizes:
                out[name] = run.made[leaf]
            elif leaf in sizes:
                out[name] = sizes[leaf]
            else:
                tensor = run.made[leaf] if leaf in run.made else received[leaf]
                out[name] = tensor.new_empty((0, *tensor.shape))
        return out

    def given(self, made: Mapping[Leaf, Tensor]) -> dict[str, Tensor]:
        """Returns what it receives, where all calls have made this."""
        sizes = {name: made[leaf].new_empty((0, *made[leaf].shape)) for name, leaf in self._sizes.items()}
        return {name: made[leaf].detach().clone() for name, leaf in self._data.items()} | sizes

    def expected(self, made: Mapping[Leaf, Tensor]) -> dict[str, Tensor]:
        """Returns what it is to send, without what is a size alone, where all calls have made this."""
        return {name: made[leaf] for name, leaf in self._sent.items() if name not in self._sent_sizes}


def _without_opaque(output: Any) -> Any:
    """Returns an output without the objects, such as caches, that only a part of the layers has written to."""
    found, tensors = template(output)
    opaque = any(isinstance(leaf, OpaqueLeaf) for _, leaf in leaves_of(found))
    return fill(found, tensors.__getitem__, "the output") if opaque else output


class _Placed(TorchFunctionMode):
    """Answers where a parameter of another stage is with the device of this one, as code asks to place its tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return self._device if func == DEVICE and answer.type == "meta" else answer
