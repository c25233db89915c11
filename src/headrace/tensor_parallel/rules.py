"""How the layers of a model are split over devices with few collectives.

A layer split by its outputs (column) leaves a slice of the features on every device; a layer split by its inputs (row)
takes such slices, and one sum over devices makes its outputs whole. So a pair of them with nothing between but
elementwise steps needs one sum forward, and one backward (Shoeybi et al., "Megatron-LM", 2019, section 3):

    x whole ─► column ─► relu ─► row ─► sum: whole
                  slices stay where they are

Where slices would reach any other step, they are gathered first, so every choice of rules is right, and some are slow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KINDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("column", "row"),
    "convolution": ("channels", "row"),
    "grouped": ("channels",),
    "embedding": ("column", "row"),
    "attention": ("heads",),
}
"""By which rules a sort of layer can be split. Of a grouped convolution each device has some groups."""

AXES: Mapping[str, str] = {"linear": "features", "convolution": "channels", "grouped": "channels"}
"""Along which axis the slices lie that a sort of layer makes and takes."""


@dataclass(frozen=True)
class Splittable:
    """A layer that can be split, of a sort in `KINDS`.

    `inputs` and `outputs` say how many features, channels, vectors or heads there are to be divided; 0 for none.
    """

    sort: str
    inputs: int
    outputs: int

    def divisible(self, kind: str, world: int) -> bool:
        """Returns whether a rule gives every device as much."""
        count = self.count(kind)
        return count > 0 and count % world == 0

    def count(self, kind: str) -> int:
        """Returns how many parts of its own a rule divides."""
        return self.inputs if kind == "row" else self.outputs


@dataclass(frozen=True)
class ValueStep:
    """One step of a model's forward.

    Attributes:
        does: "layer", "part" (computes a part of the batch on every device), "elementwise", "dropout", "pool",
            "flatten" (all but the first dim), or "other".
        name: of the layer, the part or the dropout; "" for what has none.
    """

    does: str
    name: str = ""
    inputs: tuple[int, ...] = ()


@dataclass
class Flow:
    """Where values are split: which layers gather theirs, and which value each takes.

    `takes` says by layer along which axis its input is split, `drops` by dropout; "" where values are whole. `makers`
    are, by layer, those whose slices it takes.
    """

    gathers: set[str] = field(default_factory=set)
    takes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    drops: dict[str, str] = field(default_factory=dict)
    makers: dict[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slices:
    """What a value is made of: slices along an axis, of so many features in all, that those layers make."""

    axis: str = ""
    width: int = 0
    makers: frozenset[str] = frozenset()


_WHOLE = _Slices()
_NONE: Mapping[str, frozenset[str]] = {}


def follow(
    steps: Sequence[ValueStep],
    layers: Mapping[str, Splittable],
    kinds: Mapping[str, str],
    inner: Mapping[str, frozenset[str]] = _NONE,
) -> Flow:
    """Returns where values can stay split, if layers are split by the rules `kinds`; all others are whole.

    The steps are in the order in which they happen. `inner` are the layers of blocks, with those whose slices each
    takes: what is between them has been looked at already.
    """
    gathers: set[str] = set()
    while True:
        flow, wrong = _walk(steps, layers, kinds, gathers, inner)
        if wrong <= gathers:
            # What takes the values of layers that were not called is not known.
            for name in kinds:
                if name not in flow.takes:
                    flow.gathers.add(name)
                    flow.takes[name] = ""
            return flow
        gathers |= wrong


def _walk(
    steps: Sequence[ValueStep],
    layers: Mapping[str, Splittable],
    kinds: Mapping[str, str],
    gathers: set[str],
    inner: Mapping[str, frozenset[str]],
) -> tuple[Flow, set[str]]:
    """Returns the flow if those layers gather, and which others would have to, too."""
    flow, wrong = Flow(set(gathers)), set[str]()
    values: list[_Slices] = []
    fed = flow.makers
    for step in steps:
        given = [values[index] for index in step.inputs]
        first = given[0] if given else _WHOLE
        alike = all((each.axis, each.width) == (first.axis, first.width) for each in given)
        makers = frozenset[str]().union(*(each.makers for each in given))
        made = _WHOLE
        if step.does == "layer" and step.name in kinds and step.name in inner:
            wrong |= makers
            flow.takes[step.name] = AXES["linear"] if kinds[step.name] == "row" else ""
            flow.makers[step.name] = inner[step.name]
            flow.sources[step.name] = step.inputs[0] if step.inputs else -1
        elif step.does == "layer" and step.name in kinds:
            layer, kind = layers[step.name], kinds[step.name]
            fits = first.axis in _taken(layer, kind)
            known = flow.takes.setdefault(step.name, first.axis if fits else "")
            fed[step.name] = fed.get(step.name, frozenset()) | makers
            if not fits or known != first.axis:
                wrong |= fed[step.name]
            flow.sources[step.name] = step.inputs[0] if step.inputs else -1
            made = _made(step.name, layer, kind, gathers)
        elif step.does == "part":
            wrong |= makers
            made = _WHOLE if step.name in gathers else _Slices("batch", 0, frozenset({step.name}))
        elif _passes(step.does, first.axis) and alike:
            axis = "features" if step.does == "flatten" and first.axis == "channels" else first.axis
            made = _Slices(axis, first.width, makers) if axis else _WHOLE
        else:
            wrong |= makers
        if step.does == "dropout" and flow.drops.setdefault(step.name, made.axis) != made.axis:
            wrong |= makers.union(*(each.makers for each in values))
        values.append(made)
    return flow, wrong


def _taken(layer: Splittable, kind: str) -> tuple[str, ...]:
    """Returns along which axes a layer may be given slices; "" if it may be given a whole value."""
    axis = AXES.get(layer.sort)
    if axis is None:
        return ("",)
    return ("", axis) if kind == "row" or layer.sort == "grouped" else ("", axis, "batch")


def _made(name: str, layer: Splittable, kind: str, gathers: set[str]) -> _Slices:
    axis = AXES.get(layer.sort)
    if axis is None or kind == "row" or name in gathers:
        return _WHOLE
    return _Slices(axis, layer.outputs, frozenset({name}))


def _passes(does: str, axis: str) -> bool:
    """Returns whether slices pass through a step as slices."""
    if does in ("elementwise", "dropout"):
        return True
    if does in ("pool", "flatten"):
        return axis in ("", "channels", "batch")
    return axis == ""


def choose(
    steps: Sequence[ValueStep], layers: Mapping[str, Splittable], world: int, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns rules that need few collectives: pairs of column and row, and heads; else single layers.

    `known` are rules that stay.
    """
    kinds = {
        name: "heads" for name, layer in layers.items() if layer.sort == "attention" and layer.divisible("heads", world)
    } | dict(known or {})
    users = _users(steps)
    for index, step in enumerate(steps):
        if step.does != "layer" or step.name in kinds or layers[step.name].sort not in ("linear", "convolution"):
            continue
        makers, takers = _neighbourhood(steps, users, index)
        wanted = {
            **{name: "column" if layers[name].sort == "linear" else "channels" for name in makers if name in layers},
            **{name: "row" for name in takers if name in layers},
        }
        if _is_pair(steps, layers, wanted, makers, takers, world) and not wanted.keys() & kinds.keys():
            kinds |= wanted
    alone: dict[str, str] = {}
    for name, layer in layers.items():
        fitting = [kind for kind in KINDS[layer.sort] if layer.divisible(kind, world)]
        if fitting:
            alone[name] = fitting[0]
    return kinds or alone


def _is_pair(
    steps: Sequence[ValueStep],
    layers: Mapping[str, Splittable],
    wanted: Mapping[str, str],
    makers: set[str],
    takers: set[str],
    world: int,
) -> bool:
    if not takers or makers & takers or not makers | takers <= layers.keys():
        return False
    if any(layers[name].sort not in ("linear", "convolution") for name in wanted):
        return False
    if not all(layers[name].divisible(kind, world) for name, kind in wanted.items()):
        return False
    flow = follow(steps, layers, wanted)
    return not flow.gathers & makers and all(flow.takes[name] for name in takers)


def _users(steps: Sequence[ValueStep]) -> dict[int, list[int]]:
    """Returns which steps take each step's value."""
    users: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        for given in step.inputs:
            users.setdefault(given, []).append(index)
    return users


def _neighbourhood(
    steps: Sequence[ValueStep], users: Mapping[int, Sequence[int]], start: int
) -> tuple[set[str], set[str]]:
    """Returns the names of the layers that make the values which elementwise steps mix with a step's, and of those that
    take them; "" stands for a step that is no layer.
    """
    makers, takers, seen, ahead = set[str](), set[str](), set[int](), [start]
    while ahead:
        index = ahead.pop()
        if index in seen:
            continue
        seen.add(index)
        if index == start or not _goes_through(steps[index]):
            makers.add(steps[index].name)
        else:
            ahead += steps[index].inputs
        for user in users.get(index, ()):
            if _goes_through(steps[user]):
                ahead.append(user)
            else:
                takers.add(steps[user].name)
    return makers, takers


def _goes_through(step: ValueStep) -> bool:
    return step.does in ("elementwise", "dropout", "pool", "flatten")


def any_number(text: str) -> str:
    """Returns a text with a star in the place of a number between names: that of a block in a list of blocks."""
    return re.sub(r"(?<=\.)\d+(?=\.[A-Za-z_])", "*", text)
