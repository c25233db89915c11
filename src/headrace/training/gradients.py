"""From autograd's gradients to the flat memory that workers exchange, without a loop over parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol, cast

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.spec.model import ITEM_BYTES, ParameterSpec

_ALIGN = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class ByteRange:
    """The bytes `[start, stop)` that hold elements of one type."""

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, region: Tensor) -> Tensor:
        """Returns this range of a `(nbytes,)` uint8 region, flat, in its own type."""
        return region[self.start : self.stop].view(self.dtype)

    def part(self, rank: int, world: int) -> ByteRange:
        """Returns the rank-th of `world` nearly equal parts, cut where cache lines begin."""
        lines = -(-(self.stop - self.start) // _ALIGN)
        low = self.start + lines * rank // world * _ALIGN
        high = self.start + lines * (rank + 1) // world * _ALIGN
        return ByteRange(self.dtype, min(low, self.stop), min(high, self.stop))


class FlatLayout:
    """The place of every parameter in one flat region, aligned to cache lines, those of one type side by side.

    `nbytes` is the length of the region; `spans` has one range for each type.
    """

    def __init__(self, parameters: Sequence[ParameterSpec]) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._offsets: dict[str, int] = {}
        self.spans: tuple[ByteRange, ...] = ()
        position = 0
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            start = position
            for parameter in parameters:
                if parameter.dtype == dtype:
                    self._offsets[parameter.name] = position
                    position += _padded(parameter)
            self.spans += (ByteRange(getattr(torch, dtype), start, position),)
        self.nbytes = position

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in order."""
        return tuple(self._parameters)

    def views(self, region: Tensor) -> tuple[Tensor, ...]:
        """Returns every parameter's place in a `(nbytes,)` uint8 region, in its shape and type, in order."""
        return tuple(self.flat(region, name).view(each.shape) for name, each in self._parameters.items())

    def runs(self, region: Tensor, start: int, stop: int) -> list[Tensor]:
        """Returns the places of the parameters `[start, stop)` as few flat pieces: one a type."""
        chosen = list(self._parameters.values())[start:stop]
        pieces = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in chosen):
            same = [parameter for parameter in chosen if parameter.dtype == dtype]
            end = self._offsets[same[-1].name] + _padded(same[-1])
            pieces.append(region[self._offsets[same[0].name] : end].view(getattr(torch, dtype)))
        return pieces

    def flat(self, region: Tensor, name: str) -> Tensor:
        """Returns one parameter's place, flat."""
        parameter, start = self._parameters[name], self._offsets[name]
        stop = start + parameter.elements * ITEM_BYTES[parameter.dtype]
        return region[start:stop].view(getattr(torch, parameter.dtype))


def _padded(parameter: ParameterSpec) -> int:
    return -(-parameter.bytes // _ALIGN) * _ALIGN


class GradientSink(Protocol):
    """Takes the gradients of a backward pass."""

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes one gradient a trainable parameter; None where the loss does not depend on it."""

    def store_nothing(self) -> None:
        """Notes that this worker contributes nothing to this round."""


class UsedParameters:
    """Finds the trainable parameters that no worker has a gradient for in this round.

    One device skips a parameter that the loss does not depend on (no decay, no momentum). N workers do the same only
    if no worker's part of the batch depends on it, so they must tell each other.
    """

    def __init__(self, group: ProcessGroup, count: int) -> None:
        self._group = group
        shares = group.one_memory
        regions = group.share(count + 1) if shares else (torch.zeros(count + 1, dtype=torch.uint8),)
        # By rank: whether a gradient is missing, and which.
        self._regions = [region.numpy() for region in regions]
        self._own = self._regions[group.rank if shares else 0]

    def publish(self, gradients: Sequence[Tensor | None]) -> bool:
        """Tells the others which of this worker's gradients are missing; returns whether none is."""
        complete = not any(map(operator.is_, gradients, repeat(None)))
        if not complete:
            self._own[1:] = [gradient is None for gradient in gradients]
        self._own[0] = not complete
        return complete

    def publish_nothing(self) -> None:
        """Tells the others that this worker has no gradients."""
        self._own[:] = 1

    def settle(self) -> tuple[int, ...]:
        """Waits until all workers have published; returns the indices of the parameters without any gradient."""
        if not self._group.one_memory:
            return self._settle_by_collective()
        self._group.barrier()
        if not all(region[0] for region in self._regions):
            return ()
        missing = self._regions[0][1:].copy()
        for region in self._regions[1:]:
            missing &= region[1:]
        return tuple(int(index) for index in missing.nonzero()[0])

    def _settle_by_collective(self) -> tuple[int, ...]:
        (incomplete,) = self._group.sum([float(self._own[0])])
        if incomplete < self._group.world:
            return ()
        missing = torch.from_numpy(self._own[1:].astype("int32"))
        self._group.all_reduce(missing)
        return tuple((missing == self._group.world).nonzero().flatten().tolist())


class FlatGradients:
    """Stores one worker's gradients side by side in a `(layout.nbytes,)` uint8 region, and publishes which exist."""

    def __init__(self, layout: FlatLayout, region: Tensor, used: UsedParameters) -> None:
        self._views = layout.views(region)
        self._region = region
        self._used = used

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        # A stage of a pipeline may have no parameter to train, and torch takes no empty lists.
        if self._used.publish(gradients) and self._views:
            torch._foreach_copy_(self._views, cast(tuple[Tensor, ...], gradients))
            return
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)

    def store_nothing(self) -> None:
        self._used.publish_nothing()
        self._region.zero_()


class SharedGradients:
    """The gradients of all workers of a host, by rank, each a `(layout.nbytes,)` uint8 region that all see."""

    def __init__(self, trainable: Sequence[ParameterSpec], group: ProcessGroup) -> None:
        self.layout = FlatLayout(trainable)
        self.regions = group.share(self.layout.nbytes)
        self.used = UsedParameters(group, len(trainable))
        self.sink = FlatGradients(self.layout, self.regions[group.rank], self.used)

    def views(self) -> list[tuple[Tensor, ...]]:
        """Returns every worker's gradients, by rank, in the parameters' shapes and order."""
        return [self.layout.views(region) for region in self.regions]


def assign(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], missing: Sequence[int] = ()) -> None:
    """Puts each parameter's gradient into `.grad`, except those of the missing parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for index in missing:
        parameters[index].grad = None


def divide(gradients: Sequence[Tensor | None], weight: float) -> None:
    """Divides gradients that micro-batches have added up by the weight of all; without any weight they are 0."""
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        torch._foreach_div_(present, weight) if weight else torch._foreach_zero_(present)
