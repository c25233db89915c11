"""Which layers make up which stage of a pipeline.

A pipeline is as fast as its slowest stage. So layers are split into contiguous stages such that the largest cost of a
stage is as small as it can be:

    layers      a ██ b ████ c █ d ███████ e ███         5 layers, 17 units of time
    3 stages    a b c ███████ │ d ███████ │ e ███       the slowest takes 7, and 8 or more in any other split

    best(k, j) = min over i < j of max(best(k - 1, i), cost of layers [i, j) as stage k - 1)

This is PipeDream's recurrence without replicated stages (arXiv 1806.03377, section 3.2); GPipe's minimises the variance
of the stages instead, which says less about the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.spec.model import LayerSpec, ModelSpec
from headrace.spec.plan import StageCost

Partition = tuple[tuple[str, ...], ...]
"""Names of the layers of each stage."""


@dataclass(frozen=True)
class Terms:
    """How stages are compared, and what they may take.

    Attributes:
        cost: a key of `COSTS`.
        held: micro-batches whose activations each stage keeps at a time; of one number the last holds for all stages
            behind it.
        limit_bytes: that a stage may take; None for any number.
        again: the part of the micro-batches whose forward is done again before their backward (recompute).
        bytes_per_s: at which what crosses a cut is copied; memory's, of one core.
        link_bytes_per_s: at which what crosses the cut before each stage is sent; infinite within a host, and for
            stages that it has no number of.
    """

    cost: str = "time"
    held: tuple[int, ...] = (1,)
    limit_bytes: int | None = None
    again: float = 0.0
    bytes_per_s: float = 5e9
    link_bytes_per_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.cost not in COSTS:
            raise UnknownName("cost of a stage", self.cost, COSTS)

    def held_by(self, stage: int) -> int:
        """Returns how many micro-batches a stage keeps."""
        return self.held[min(stage, len(self.held) - 1)]

    def sent_per_s(self, stage: int) -> float:
        """Returns the bytes/s of the link before a stage; infinite where that is on the same host."""
        return self.link_bytes_per_s[stage] if stage < len(self.link_bytes_per_s) else math.inf


COSTS: Mapping[str, Callable[[StageCost, StageCost], float]] = {
    "time": lambda stage, model: stage.seconds,
    "memory": lambda stage, model: stage.bytes,
    "both": lambda stage, model: max(stage.seconds / (model.seconds or 1.0), stage.bytes / (model.bytes or 1)),
}
"""Costs by name: from a stage, and all layers as one stage, to what is made small."""


def split(model: ModelSpec, stages: int, terms: Terms) -> Partition:
    """Returns the split whose most expensive stage costs least.

    Raises an `InfeasiblePlan` if there are fewer layers than stages, or no split keeps the limit of memory.
    """
    names = [layer.name for layer in model.layers]
    _require_layers(model.layers, stages)
    stops, worst = _best(model, stages, terms)
    if math.isinf(worst):
        without = replace(terms, cost="memory", limit_bytes=None)
        best = _parts(names, _best(model, stages, without)[0])
        taken = [stage.bytes for stage in costs(model, best, without)]
        most = max(taken)
        raise InfeasiblePlan(
            f"no split of {len(names)} layers into {stages} stages keeps every stage within {terms.limit_bytes:,} "
            f"bytes: of the one that needs least, stage {taken.index(most)} ({_named(best[taken.index(most)])}) needs "
            f"{most:,}; use more stages, more micro-batches, or recompute='always', or allow more"
        )
    return _parts(names, stops)


def read(layers: Sequence[LayerSpec], wish: Sequence[int | Sequence[str]], stages: int) -> Partition:
    """Returns the partition that a user has written down.

    `wish` says how many layers each stage has, or their names; a module's name stands for all layers inside. Raises a
    `UsageError` if it does not add up, or cuts where no cut can be.
    """
    names = [layer.name for layer in layers]
    if len(wish) != stages:
        raise UsageError(f"partition has {len(wish)} stages, and stages={stages}; give one entry a stage")
    counts = [_count(entry, names) for entry in wish]
    if sum(counts) != len(names) or min(counts) < 1:
        raise UsageError(
            f"partition has {' + '.join(map(str, counts))} = {sum(counts)} layers, and the model has {len(names)}, of "
            f"which every stage needs at least one: {_named(names)}{_missing(wish, names)}"
        )
    partition = _parts(names, list(accumulate(counts)))
    for index, (entry, part) in enumerate(zip(wish, partition, strict=True)):
        if not isinstance(entry, int) and not all(any(_within(name, given) for given in entry) for name in part):
            raise UsageError(
                f"partition gives stage {index} {_named(list(entry))}, and in the order of forward its layers are "
                f"{_named(part)}; name the layers in that order"
            )
    for stop in list(accumulate(counts))[:-1]:
        if layers[stop - 1].joined:
            raise UsageError(
                f"partition cuts between {names[stop - 1]} and {names[stop]}, where no cut can be, because they share "
                "memory that one of them writes to; cut before or behind both"
            )
    return partition


def is_partition(value: object) -> bool:
    """Returns whether each stage has a number of layers, or a list of names."""
    return isinstance(value, list | tuple) and all(
        type(entry) is int or (isinstance(entry, list | tuple) and all(isinstance(name, str) for name in entry))
        for entry in value
    )


def costs(model: ModelSpec, partition: Partition, terms: Terms) -> tuple[StageCost, ...]:
    """Returns what each stage of a partition takes."""
    places = list(accumulate(map(len, partition), initial=0))
    pieces = _pieces(model, places)
    return tuple(_cost(pieces[bounds], stage, terms) for stage, bounds in enumerate(pairwise(places)))


def _best(model: ModelSpec, stages: int, terms: Terms) -> tuple[list[int], float]:
    """Returns behind how many layers each stage ends, and what the worst costs."""
    layers, count = model.layers, len(model.layers)
    (whole,) = costs(model, (tuple(layer.name for layer in layers),), terms)
    cost = COSTS[terms.cost]
    places = [0, *(index + 1 for index, layer in enumerate(layers) if not layer.joined or index + 1 == count)]
    pieces = _pieces(model, places)

    def price(stage: int, start: int, stop: int) -> float:
        taken = _cost(pieces[start, stop], stage, terms)
        return math.inf if terms.limit_bytes is not None and taken.bytes > terms.limit_bytes else cost(taken, whole)

    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        further: dict[int, tuple[float, list[int]]] = {}
        for stop in places:
            found = [
                (max(worst, price(stage, start, stop)), [*stops, stop])
                for start, (worst, stops) in best.items()
                if start < stop
            ]
            if found:
                further[stop] = min(found, key=lambda each: each[0])
        best = further
    worst, stops = best[count]
    return stops, worst


@dataclass(frozen=True)
class _Piece:
    """Layers next to each other: what they take together, for one micro-batch."""

    layers: int
    forward_s: float
    backward_s: float
    parameter_bytes: int
    trained_bytes: int
    saved_bytes: int
    received_bytes: int
    sent_bytes: int


def _cost(piece: _Piece, stage: int, terms: Terms) -> StageCost:
    # Values go one way, their gradients the other.
    crossing = [(piece.received_bytes, terms.sent_per_s(stage)), (piece.sent_bytes, terms.sent_per_s(stage + 1))]
    moving_s = sum(2 * size for size, _ in crossing) / terms.bytes_per_s
    computing_s = piece.forward_s * (1 + terms.again) + piece.backward_s + moving_s
    # A network carries while stages compute: they wait for it where it takes longer than they do.
    carrying_s = max(2 * size / per_s for size, per_s in crossing)
    held = terms.held_by(stage)
    # What is done again is kept for one micro-batch alone, of the others what it begins with.
    kept = held * piece.received_bytes + (1 if terms.again else held) * piece.saved_bytes
    return StageCost(
        layers=piece.layers,
        seconds=max(computing_s, carrying_s),
        parameter_bytes=piece.parameter_bytes,
        bytes=piece.parameter_bytes + piece.trained_bytes + kept,
        received_bytes=piece.received_bytes,
    )


def _pieces(model: ModelSpec, places: Sequence[int]) -> dict[tuple[int, int], _Piece]:
    """Returns the layers between any two places."""
    layers = model.layers
    size = {parameter.name: parameter.bytes for parameter in model.parameters}
    # Gradients, and what the optimizer keeps.
    more = {parameter.name: (model.copies - 1) * parameter.bytes for parameter in model.trainable}
    crossing = [0, *(layer.crossing_bytes for layer in layers[:-1]), 0]
    pieces = {}
    for index, start in enumerate(places):
        forward_s = backward_s = 0.0
        own = trained = saved = 0
        seen: set[str] = set()
        for before, stop in pairwise(places[index:]):
            for layer in layers[before:stop]:
                forward_s += layer.forward_s
                backward_s += layer.backward_s
                saved += layer.saved_bytes
                # Tied ones once.
                own += sum(size[name] for name in set(layer.parameters) - seen)
                trained += sum(more.get(name, 0) for name in set(layer.parameters) - seen)
                seen.update(layer.parameters)
            pieces[start, stop] = _Piece(
                stop - start, forward_s, backward_s, own, trained, saved, crossing[start], crossing[stop]
            )
    return pieces


def _require_layers(layers: Sequence[LayerSpec], stages: int) -> None:
    most = 1 + sum(not layer.joined for layer in layers[:-1])
    if stages > most:
        inseparable = f", of which {len(layers) - most} cannot be parted from the next" if most < len(layers) else ""
        raise InfeasiblePlan(
            f"a model of {len(layers)} layers{inseparable} cannot be cut into {stages} stages; use stages={most} or "
            "fewer"
        )


def _count(entry: int | Sequence[str], names: Sequence[str]) -> int:
    if isinstance(entry, int):
        return entry
    for given in entry:
        if not any(_within(name, given) for name in names):
            raise UnknownName("layer", given, names)
    return sum(any(_within(name, given) for given in entry) for name in names)


def _missing(wish: Sequence[int | Sequence[str]], names: Sequence[str]) -> str:
    given = [name for entry in wish if not isinstance(entry, int) for name in entry]
    left = [name for name in names if not any(_within(name, each) for each in given)]
    return f"; no stage has {_named(left)}" if left and all(not isinstance(entry, int) for entry in wish) else ""


def _within(name: str, given: str) -> bool:
    return name == given or name.startswith((f"{given}.", f"{given}:"))


def _parts(names: Sequence[str], stops: Sequence[int]) -> Partition:
    return tuple(tuple(names[start:stop]) for start, stop in zip([0, *stops], stops, strict=False))


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{names[0]}, {names[1]}, ..., {names[-1]}"
