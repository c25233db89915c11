"""Parameters and optimizer state in shared memory, each slice with what it was before the update that is being made.

    parameters, state    │ slice of rank 0 │ slice of rank 1 │ ...     one copy, which the ranks update in place
    before               │ slice of rank 0 │ slice of rank 1 │ ...     each rank keeps its slice before it changes it
    updates              │ 7               │ 7               │ ...     the update that each rank has begun to make

An update counts when all ranks have passed the barrier after it. Where a rank is lost before, each slice whose rank had
begun the update is taken from `before`: then the update has left no trace, and it can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.errors import UsageError
from headrace.internals import foreach_copy_
from headrace.shared_memory import futex
from headrace.shared_memory.layout import on_lines
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Segment
from headrace.training.gradients import FlatLayout
from headrace.training.optimizer import NUMBERS, Factory, StatePiece, build_over
from headrace.training.update import AVERAGE, Updater

_PARAMETER = ""
"""The key of the parameters themselves."""


@dataclass(frozen=True)
class StateForm:
    """What an optimizer keeps of each parameter.

    Attributes:
        sized: by key, the parameters of which it keeps a tensor of their size, with its type.
        numbers: by parameter, the keys of what it keeps beside: "int", "float" or "bool", or the type of a tensor.
    """

    sized: Mapping[str, Mapping[str, str]]
    numbers: Mapping[str, Mapping[str, str]]


def state_form(factory: Factory, named: Iterable[tuple[str, Tensor]], model: ModelSpec, averages: bool) -> StateForm:
    """Finds it by a first step with gradients of 0 over the first elements of the parameters, which are `named`.

    `averages` adds the moving average of the weights.

    Raises:
        UsageError: it keeps something that is neither a tensor of the parameter's size nor a number.
    """
    owned = [
        (Segment(each.name, 0, min(2, each.elements), 0), torch.zeros(min(2, each.elements), dtype=_dtype(each.dtype)))
        for each in model.trainable
    ]
    probe, tensors = build_over(factory, named, owned)
    likes = {segment.parameter: tensor for (segment, _), tensor in zip(owned, tensors, strict=True)}
    for like in likes.values():
        like.grad = torch.zeros_like(like)
    probe.step()
    sized: dict[str, dict[str, str]] = {}
    if averages:
        sized[AVERAGE] = {each.name: each.dtype for each in model.trainable}
    numbers: dict[str, dict[str, str]] = {}
    for name, like in likes.items():
        for key, value in probe.state.get(like, {}).items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                sized.setdefault(key, {})[name] = str(value.dtype).removeprefix("torch.")
            elif isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.dim() == 0):
                kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
                numbers.setdefault(name, {})[key] = kind
            elif value is not None:
                raise UsageError(
                    f"{type(probe).__name__} keeps a {type(value).__name__} as {key!r} of {name!r}, which is no "
                    "tensor of the parameter's size and no number; leave out min_workers, or use mirrored"
                )
    return StateForm(sized, numbers)


class SharedState:
    """All parameters of a model and the state of their optimizer, of which `segments` belong to the ranks of a group.

    Attributes:
        layout: the parameters' places in `parameters`, `(layout.nbytes,)` uint8.
        swapped: whether moving averages are in the parameters' place.
        nbytes: of all of it.
    """

    def __init__(self, model: ModelSpec, form: StateForm, segments: Sequence[Segment], group: ProcessGroup) -> None:
        self.layout = FlatLayout(model.parameters)
        self.swapped = False
        self._form = form
        self._segments = segments
        self._own = [index for index, segment in enumerate(segments) if segment.owner == group.rank]
        self._rank = group.rank
        self._updates = 0
        specs = {each.name: each for each in model.trainable}
        self._layouts = {_PARAMETER: self.layout}
        for key, types in form.sized.items():
            self._layouts[key] = FlatLayout([replace(specs[name], dtype=dtype) for name, dtype in types.items()])
        width = 2 + max(map(len, form.numbers.values()), default=0)
        lengths = [each.nbytes for each in self._layouts.values()] * 2
        lengths += [8 * width * len(segments)] * 2 + [8 * group.world]
        padded = [on_lines(length) for length in lengths]
        self.nbytes = sum(padded)
        whole = group.share(0 if group.rank else self.nbytes)[0]
        regions = iter([part[:length] for part, length in zip(whole.split(padded), lengths, strict=True)])
        self._now, self._before = ({key: next(regions) for key in self._layouts} for _ in range(2))
        self.parameters = self._now[_PARAMETER]
        self._rows, self._rows_before = (next(regions).view(torch.float64).view(-1, width) for _ in range(2))
        self._begun = next(regions).view(torch.int64)
        own = [segments[index] for index in self._own]
        self._live = [self._place(self._now, *each) for each in self._kept_of(own)]
        self._kept = [self._place(self._before, *each) for each in self._kept_of(own)]

    def begin(self) -> None:
        """Keeps this rank's slices as they are, before it changes them."""
        if self._own:
            foreach_copy_(self._kept, self._live)
            self._rows_before[self._own] = self._rows[self._own]
        futex.fence()
        self._begun[self._rank] = self._updates + 1

    def place(self, updater: Updater) -> None:
        """Moves to shared memory what an update has made of this rank's slices elsewhere, and notes its numbers."""
        rows = []
        for place, (segment, tensor) in enumerate(updater.owned):
            state = updater.optimizer.state.get(tensor, {})
            for key, value in state.items():
                if key in self._form.sized and isinstance(value, Tensor):
                    state[key] = self._in_place(key, segment, value)
            if place in updater.averages:
                updater.averages[place] = self._in_place(AVERAGE, segment, updater.averages[place])
            rows.append(self._row(segment, state, place in updater.averages))
        if rows:
            self._rows[self._own] = torch.tensor(rows, dtype=torch.float64)

    def commit(self, swapped: bool) -> None:
        """Notes that all ranks have made the update; whether averages are in the parameters' place is known with it."""
        self._updates += 1
        self.swapped = swapped

    def take(self, other: SharedState) -> None:
        """Takes over what other members have left, as of their last update that counts; one rank does it for all."""
        for key, region in self._now.items():
            region.copy_(other._now[key])
        torn = [each for each in other._segments if other._is_torn(each)]
        for key, segment in other._kept_of(torn):
            self._place(self._now, key, segment).copy_(other._place(other._before, key, segment))
        for row, segment in zip(self._rows, self._segments, strict=True):
            row.copy_(other._numbers_at(segment))

    def pieces(self) -> list[StatePiece]:
        """Returns this rank's part of the optimizer's state and of the averages."""
        found = []
        for index in self._own:
            segment, (has, averaged, *numbers) = self._segments[index], self._rows[index].tolist()
            for key, types in self._form.sized.items():
                if segment.parameter in types and (averaged if key == AVERAGE else has):
                    found.append(
                        StatePiece(segment.parameter, key, segment.start, self._place(self._now, key, segment))
                    )
            kinds = self._form.numbers.get(segment.parameter, {}) if has else {}
            for (key, kind), number in zip(kinds.items(), numbers, strict=False):
                of_torch = kind.startswith("torch.")
                dtype = _dtype(kind.removeprefix("torch.")) if of_torch else NUMBERS[kind]
                value = torch.tensor(number, dtype=torch.float64).to(dtype)
                found.append(StatePiece(segment.parameter, key, -1, value, "tensor" if of_torch else kind))
        return found

    def _in_place(self, key: str, segment: Segment, value: Tensor) -> Tensor:
        place = self._place(self._now, key, segment)
        return value if value.data_ptr() == place.data_ptr() else place.view(value.shape).copy_(value)

    def _row(self, segment: Segment, state: Mapping[str, Any], averaged: bool) -> list[float]:
        """Returns what is noted of a slice: whether it has state, and an average, and the numbers in its state."""
        kinds = self._form.numbers.get(segment.parameter, {})
        for key, value in state.items():
            if value is not None and key not in kinds and segment.parameter not in self._form.sized.get(key, ()):
                raise UsageError(
                    f"the optimizer keeps {key!r} of {segment.parameter!r}, and did not after its first step; leave "
                    "out min_workers, or use mirrored"
                )
        numbers = [float(state.get(key) or 0.0) for key in kinds]
        return [bool(state), averaged, *numbers, *[0.0] * (self._rows.shape[1] - 2 - len(numbers))]

    def _numbers_at(self, segment: Segment) -> Tensor:
        """Returns the row of the slice with a segment's first element; those of one parameter have equal numbers."""
        for index, each in enumerate(self._segments):
            if each.parameter == segment.parameter and each.start <= segment.start < max(each.stop, each.start + 1):
                row: Tensor = (self._rows_before if self._is_torn(each) else self._rows)[index]
                return row
        raise AssertionError(f"no slice has element {segment.start} of {segment.parameter}")

    def _is_torn(self, segment: Segment) -> bool:
        """Tells whether its rank had begun an update that does not count."""
        return bool(self._begun[segment.owner] > self._updates)

    def _kept_of(self, segments: Sequence[Segment]) -> Iterator[tuple[str, Segment]]:
        """Yields the keys of all that is kept of slices."""
        for key, layout in self._layouts.items():
            yield from ((key, segment) for segment in segments if segment.parameter in layout.names)

    def _place(self, regions: Mapping[str, Tensor], key: str, segment: Segment) -> Tensor:
        return self._layouts[key].flat(regions[key], segment.parameter)[segment.start : segment.stop]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
