"""Where every parameter lies in one flat piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
