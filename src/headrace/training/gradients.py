"""From autograd's gradients to the flat memory that workers exchange, without a loop over parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.spec.model import ITEM_BYTES, ParameterSpec

_ALIGN = 64


@dataclass(frozen=True)
class ByteRange:
    """The bytes `[start, stop)` that hold elements of one type."""

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, region: Tensor) -> Tensor:
        """Returns the span of a `(nbytes,)` uint8 region, flat, in its own type."""
        return region[self.start : self.stop].view(self.dtype)

    def part(self, rank: int, world: int) -> ByteRange:
        """Returns the rank-th of `world` nearly equal parts, cut where cache lines begin."""
        lines = -(-(self.stop - self.start) // _ALIGN)
        low = self.start + lines * rank // world * _ALIGN
        high = self.start + lines * (rank + 1) // world * _ALIGN
        return ByteRange(self.dtype, min(low, self.stop), min(high, self.stop))


class FlatLayout:
    """Gives every parameter a place, aligned to cache lines, those of one type side by side.

    Args:
        parameters: in the model's order.

    Attributes:
        nbytes: length of the whole.
        spans: one a type.
    """

    def __init__(self, parameters: Sequence[ParameterSpec]) -> None:
        self._parameters = tuple(parameters)
        self._offsets: dict[str, int] = {}
        self.spans: tuple[ByteRange, ...] = ()
        position = 0
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            start = position
            for parameter in parameters:
                if parameter.dtype == dtype:
                    self._offsets[parameter.name] = position
                    position += -(-parameter.bytes // _ALIGN) * _ALIGN
            self.spans += (ByteRange(getattr(torch, dtype), start, position),)
        self.nbytes = position

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters', in order."""
        return tuple(parameter.name for parameter in self._parameters)

    def views(self, region: Tensor) -> tuple[Tensor, ...]:
        """Returns every parameter's place in a `(nbytes,)` uint8 region, in its shape and type, in order."""
        return tuple(self.flat(region, parameter.name).view(parameter.shape) for parameter in self._parameters)

    def runs(self, region: Tensor, start: int, stop: int) -> list[Tensor]:
        """Returns the places of the parameters `[start, stop)` as few flat pieces: one a type."""
        chosen = self._parameters[start:stop]
        pieces = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in chosen):
            offsets = [self._offsets[p.name] for p in chosen if p.dtype == dtype]
            last = next(p for p in reversed(chosen) if p.dtype == dtype)
            end = self._offsets[last.name] + -(-last.bytes // _ALIGN) * _ALIGN
            pieces.append(region[offsets[0] : end].view(getattr(torch, dtype)))
        return pieces

    def flat(self, region: Tensor, name: str) -> Tensor:
        """Returns one parameter's place, flat."""
        parameter = next(parameter for parameter in self._parameters if parameter.name == name)
        start = self._offsets[name]
        stop = start + parameter.elements * ITEM_BYTES[parameter.dtype]
        return region[start:stop].view(getattr(torch, parameter.dtype))


class GradientSink(Protocol):
    """Takes what a backward pass brought."""

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes one gradient a trainable parameter; None where the loss does not depend on it."""

    def store_nothing(self) -> None:
        """Says that this worker contributes nothing to this round."""


class UsedParameters:
    """Which parameters have got a gradient from anybody in this round.

    One device skips a parameter that the loss does not depend on (no decay, no momentum). N workers do the
    same only if nobody's part of the batch depends on it, so everybody must know.

    Args:
        collective: of the workers.
        count: number of trainable parameters.
    """

    def __init__(self, collective: ProcessGroup, count: int) -> None:
        self._collective = collective
        shares = collective.one_memory
        regions = collective.share(count + 1) if shares else (torch.zeros(count + 1, dtype=torch.uint8),)
        self._regions = [region.numpy() for region in regions]
        self._own = self._regions[collective.rank if shares else 0]

    def publish(self, gradients: Sequence[Tensor | None]) -> bool:
        """Says which of this worker's gradients exist; returns whether all do."""
        whole = not any(map(operator.is_, gradients, repeat(None)))
        if not whole:
            self._own[1:] = [gradient is None for gradient in gradients]
        self._own[0] = not whole
        return whole

    def publish_nothing(self) -> None:
        """Says that this worker has none."""
        self._own[:] = 1

    def settle(self) -> tuple[int, ...]:
        """Meets the others, when all have said; returns indices of the parameters that nobody has a gradient for."""
        if not self._collective.one_memory:
            return self._ask()
        self._collective.barrier()
        if not all(region[0] for region in self._regions):
            return ()
        absent = self._regions[0][1:].copy()
        for region in self._regions[1:]:
            absent &= region[1:]
        return tuple(int(index) for index in absent.nonzero()[0])

    def _ask(self) -> tuple[int, ...]:
        (lacking,) = self._collective.sum([float(self._own[0])])
        if lacking < self._collective.world:
            return ()
        absent = torch.from_numpy(self._own[1:].astype("int32"))
        self._collective.all_reduce(absent)
        return tuple((absent == self._collective.world).nonzero().flatten().tolist())


class FlatGradients:
    """One worker's gradients, side by side in one region.

    Args:
        layout: places of the trainable parameters.
        region: `(layout.nbytes,)` uint8.
        presence: told what exists.
    """

    def __init__(self, layout: FlatLayout, region: Tensor, presence: UsedParameters) -> None:
        self._views = layout.views(region)
        self._region = region
        self._presence = presence

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        if self._presence.publish(gradients):
            torch._foreach_copy_(self._views, cast(tuple[Tensor, ...], gradients))
            return
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)

    def store_nothing(self) -> None:
        self._presence.publish_nothing()
        self._region.zero_()


def assign(parameters: Sequence[nn.Parameter], views: Sequence[Tensor], missing: Sequence[int]) -> None:
    """Lets the optimizer see the views as gradients, except those of the missing parameters."""
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    for index in missing:
        parameters[index].grad = None
