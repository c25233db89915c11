"""Sums in fewer bits on the way between hosts, with error feedback."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from headrace.transport.codec import Codec, codec_for


class Compression:
    """The codec of a group's gradients, and the residuals of what has been sent; see `transport.codec`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._residuals: dict[Hashable, Tensor] = {}

    def encoder(self, place: Hashable, like: Tensor) -> Encoder:
        """Returns what encodes a flat tensor; `place` is the same whenever the same gradients are sent."""
        codec = codec_for(self.name, like.dtype)
        if codec.feedback and place not in self._residuals:
            self._residuals[place] = torch.zeros_like(like)
        return Encoder(codec, self._residuals.get(place))


PLAIN = Compression("plain")


class Encoder:
    """Encodes pieces of one flat tensor, each with the part of the residual that belongs to it.

    A codec with scales cannot hold what is not finite: such a piece is sent as nothing, and read as NaN.
    """

    def __init__(self, codec: Codec, residual: Tensor | None) -> None:
        self._codec = codec
        self._residual = residual

    @property
    def exact(self) -> bool:
        """Whether pieces are sent as they are."""
        return self._codec is codec_for("plain", torch.uint8)

    def encode(self, flat: Tensor, where: slice) -> Tensor:
        """Returns the bytes of a piece, `(nbytes,)` uint8."""
        piece = flat[where]
        if self.exact:
            return piece.view(torch.uint8)
        if self._codec.feedback and not piece.isfinite().all():
            return torch.empty(0, dtype=torch.uint8)
        encoded = torch.empty(self._codec.nbytes(piece.numel(), piece.dtype), dtype=torch.uint8)
        self._codec.encode(piece, encoded, None if self._residual is None else self._residual[where])
        return encoded

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Reads a piece; raises ValueError if these are not the bytes of such a one."""
        if len(encoded) == 0 and self._codec.feedback:
            into.fill_(torch.nan)
        else:
            self._codec.decode(encoded, into)
