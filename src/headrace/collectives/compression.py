"""Sums in fewer bits on the way between hosts, with error feedback."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.transport.codec import Codec, codec_for


class Compression:
    """The codec of gradients that lie in `region`, and the residuals of what this rank has sent; see `transport.codec`.

    Attributes:
        residuals: `(nbytes,)` uint8, each at the place of its gradient in the region.
        parts: of the residuals that this rank uses, `(start, stop)` in bytes.
    """

    def __init__(self, name: str, region: Tensor) -> None:
        self.name = name
        self.parts: set[tuple[int, int]] = set()
        self._start = region.data_ptr()
        # By numpy, because the system gives it only the pages that are written.
        self.residuals = torch.from_numpy(np.zeros(region.nbytes, np.uint8))

    def of(self, copy: Tensor, tensor: Tensor) -> Compression:
        """Returns this one for the copy of a tensor of the region, which lies elsewhere."""
        if self.name == "plain":
            return self
        moved = Compression.__new__(Compression)
        moved.name, moved.parts, moved.residuals = self.name, self.parts, self.residuals
        moved._start = self._start + copy.data_ptr() - tensor.data_ptr()
        return moved

    def forget(self) -> None:
        """Begins without residuals, where this rank will send other parts than before."""
        if self.parts:
            self.residuals.zero_()
            self.parts.clear()

    def encoder(self, place: int, like: Tensor) -> Encoder:
        """Returns what encodes a flat tensor, of gradients at the address `place`."""
        codec = codec_for(self.name, like.dtype)
        if not codec.feedback:
            return Encoder(codec, None)
        part = (place - self._start, place - self._start + like.nbytes)
        self.parts.add(part)
        return Encoder(codec, self.residuals[slice(*part)].view(like.dtype))


PLAIN = Compression("plain", torch.empty(0))


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
