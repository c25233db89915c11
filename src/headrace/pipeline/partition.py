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
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec
from headrace.spec.plan import StageCost

Partition = tuple[tuple[str, ...], ...]
"""Names of the layers of each stage."""

_Figures = NDArray[Any]

_LITTLE = 1e-9
"""By this part the time of its layers makes a stage cost more, so that it decides between splits of one cost."""


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


COSTS: Mapping[str, Callable[[_Figures, _Figures, StageCost], _Figures]] = {
    "time": lambda seconds, taken, model: seconds,
    "memory": lambda seconds, taken, model: taken,
    "both": lambda seconds, taken, model: np.maximum(seconds / (model.seconds or 1.0), taken / (model.bytes or 1)),
}
"""Costs by name: from the seconds and bytes of stages, and all layers as one stage, to what is made small."""


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
    pieces = _Pieces.of(model, places)
    found = []
    for stage in range(len(partition)):
        own = pieces.at(stage, stage + 1)
        seconds, taken = own.taken(terms, *_surroundings(terms, stage))
        figures = seconds, own.parameter_bytes, taken, own.received_bytes
        found.append(StageCost(len(partition[stage]), float(figures[0]), *(int(each) for each in figures[1:])))
    return tuple(found)


def _best(model: ModelSpec, stages: int, terms: Terms) -> tuple[list[int], float]:
    """Returns behind how many layers each stage ends, and what the worst costs."""
    layers, count = model.layers, len(model.layers)
    (whole,) = costs(model, (tuple(layer.name for layer in layers),), terms)
    places = [0, *(index + 1 for index, layer in enumerate(layers) if not layer.joined or index + 1 == count)]
    pieces = _Pieces.of(model, places)

    @cache
    def prices(held: int, before_per_s: float, behind_per_s: float) -> _Figures:
        """Returns what the layers between any two places cost as a stage; infinite where they cannot be one."""
        seconds, taken = pieces.taken(terms, held, before_per_s, behind_per_s)
        price = np.asarray(COSTS[terms.cost](seconds, taken, whole), dtype=float)
        # Where all wait for a link, or for one large stage, the others are balanced.
        price *= 1 + _LITTLE * (pieces.forward_s + pieces.backward_s) / (whole.seconds or 1.0)
        if terms.limit_bytes is not None:
            price = np.where(taken > terms.limit_bytes, math.inf, price)
        return np.where(np.triu(np.ones(price.shape, dtype=bool), 1), price, math.inf)

    worst = np.where(np.arange(len(places)) == 0, 0.0, math.inf)
    starts = []
    for stage in range(stages):
        further = np.maximum(worst[:, None], prices(*_surroundings(terms, stage)))
        starts.append(further.argmin(axis=0))
        worst = further.min(axis=0)
    stops = [len(places) - 1]
    for start in reversed(starts):
        stops.append(int(start[stops[-1]]))
    return [places[stop] for stop in stops[-2::-1]], float(worst[-1])


def _surroundings(terms: Terms, stage: int) -> tuple[int, float, float]:
    """Returns the micro-batches that a stage keeps, and the bytes/s of the links before and behind it."""
    return terms.held_by(stage), terms.sent_per_s(stage), terms.sent_per_s(stage + 1)


@dataclass(frozen=True)
class _Pieces:
    """What the layers between any two places take together, for one micro-batch, by (start, stop)."""

    forward_s: _Figures
    backward_s: _Figures
    parameter_bytes: _Figures
    trained_bytes: _Figures
    saved_bytes: _Figures
    received_bytes: _Figures
    sent_bytes: _Figures

    @staticmethod
    def of(model: ModelSpec, places: Sequence[int]) -> _Pieces:
        """Adds up the layers between the places."""
        layers = model.layers
        size = {parameter.name: parameter.bytes for parameter in model.parameters}
        # Gradients, and what the optimizer keeps.
        more = {parameter.name: (model.copies - 1) * parameter.bytes for parameter in model.trainable}
        crossing = np.array([0, *(layer.crossing_bytes for layer in layers[:-1]), 0])[list(places)]

        def between(added: NDArray[Any]) -> _Figures:
            """Adds up what each layer adds behind each start, (places, layers)."""
            behind = np.arange(len(layers)) >= np.array(places)[:, None]
            sums = np.cumsum(np.where(behind, added, 0), axis=1)
            return np.concatenate([np.zeros_like(sums[:, :1]), sums], axis=1)[:, list(places)]

        return _Pieces(
            between(np.array([layer.forward_s for layer in layers])),
            between(np.array([layer.backward_s for layer in layers])),
            between(_once(layers, size, places)),
            between(_once(layers, more, places)),
            between(np.array([layer.saved_bytes for layer in layers])),
            np.broadcast_to(crossing[:, None], (len(places), len(places))),
            np.broadcast_to(crossing, (len(places), len(places))),
        )

    def at(self, start: int, stop: int) -> _Pieces:
        """Returns the figures of the layers between two places alone."""
        return _Pieces(*(getattr(self, each.name)[start, stop] for each in fields(self)))

    def taken(self, terms: Terms, held: int, before_per_s: float, behind_per_s: float) -> tuple[_Figures, _Figures]:
        """Returns the seconds of a micro-batch, and the bytes, of a stage that keeps `held` micro-batches."""
        # Values go one way, their gradients the other.
        moving_s = 2 * (self.received_bytes + self.sent_bytes) / terms.bytes_per_s
        computing_s = self.forward_s * (1 + terms.again) + self.backward_s + moving_s
        # A network carries while stages compute: they wait for it where it takes longer than they do.
        carrying_s = np.maximum(2 * self.received_bytes / before_per_s, 2 * self.sent_bytes / behind_per_s)
        # What is done again is kept for one micro-batch alone, of the others what it begins with.
        kept = held * self.received_bytes + (1 if terms.again else held) * self.saved_bytes
        return np.maximum(computing_s, carrying_s), self.parameter_bytes + self.trained_bytes + kept


def _once(layers: Sequence[LayerSpec], size: Mapping[str, int], places: Sequence[int]) -> NDArray[np.int64]:
    """Returns the bytes of parameters that each layer adds to those from each place on: tied ones once."""
    last: dict[str, int] = {}
    tied = []
    for index, layer in enumerate(layers):
        for name in set(layer.parameters):
            if name in last:
                tied.append((last[name], index, size.get(name, 0)))
            last[name] = index
    every = [sum(size.get(name, 0) for name in set(layer.parameters)) for layer in layers]
    added = np.tile(np.array(every, dtype=np.int64), (len(places), 1))
    for before, index, nbytes in tied:
        added[np.array(places) <= before, index] -= nbytes
    return added


def _require_layers(layers: Sequence[LayerSpec], stages: int) -> None:
    most = 1 + sum(not layer.joined for layer in layers[:-1])
    if stages > most:
        many = "s" * (len(layers) != 1)
        inseparable = f", of which {len(layers) - most} cannot be parted from the next" if most < len(layers) else ""
        raise InfeasiblePlan(
            f"a model of {len(layers)} layer{many}{inseparable} cannot be cut into {stages} stages; use "
            f"stages={most} or fewer"
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
