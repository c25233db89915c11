"""Codecs of gradients and parameters that are sent: as they are, or in fewer bits.

    plain    as they are
    bf16     2 bytes an element: 8 significant bits, rounded to the nearest
    int8     blocks of 256 elements: a scale of 4 bytes each, then 1 byte an element, -127 to 127 times the scale

               scale 0   scale 1       elements of block 0       of block 1, which may be shorter
             ┌─────────┬─────────┬───────────────────────────┬───────────────────┐
             │ float32 │ float32 │        256 x int8         │     n x int8      │
             └─────────┴─────────┴───────────────────────────┴───────────────────┘

*Error feedback*: the error of one encoding is a residual that the caller keeps and the next encoding adds, so that the
sum of all decoded tensors is the sum of all encoded ones, except for the last residual (Seide et al., "1-bit
stochastic gradient descent", 2014, section 3; Karimireddy et al., "Error feedback fixes SignSGD", 2019, algorithm 2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from headrace.errors import UnknownName
from headrace.registry import Registry

BLOCK = 256
"""Elements that have one scale in int8."""

_FLOATS = (torch.float32, torch.float64)
_SCALE_BYTES = 4
_LARGEST_CODE = 127
_SPARE_BITS = 0xFF
"""Of a scale's 24 significant bits: without them a scale times a code of 7 bits is exact in float32."""


class Codec(ABC):
    """Encodes tensors as bytes, without state; the length depends only on shape and type.

    Bytes are `(nbytes,)` uint8 tensors that begin at a multiple of 8 in their storage. `feedback` says whether the
    error is so large that the caller should keep a residual for each tensor.
    """

    feedback: ClassVar[bool]

    @abstractmethod
    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        """Returns the length of so many encoded elements; raises ValueError if it does not encode this type."""

    @abstractmethod
    def encode(self, tensor: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Writes a tensor of any shape to `out`, `(nbytes,)` uint8.

        `residual`, 0 at first, contiguous and of the tensor's size and type, is added to the tensor, and becomes the
        error of this encoding. Raises ValueError if `out` or `residual` has another size, or the tensor cannot be
        encoded. The residual is then unchanged.
        """

    @abstractmethod
    def decode(self, data: Tensor, into: Tensor) -> None:
        """Reads a tensor from its bytes into a contiguous one; raises ValueError if they do not encode such a one."""


class Plain(Codec):
    """The elements as they are, of every type."""

    feedback = False

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, tensor: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        value = _value(self, tensor, out, residual)
        out.view(value.dtype).copy_(value)
        if residual is not None:
            residual.zero_()

    def decode(self, data: Tensor, into: Tensor) -> None:
        _require_length(self, data, into)
        into.view(-1).copy_(data.view(into.dtype))


class BFloat16(Codec):
    """The elements of float32 and float64 in bfloat16, rounded to the nearest: an error of at most 1/256 of each.

    NaN stays NaN, infinite stays infinite, and what is beyond 3.39e38 becomes infinite; none of it goes into the
    residual.
    """

    feedback = False

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        _require_float("bf16", dtype)
        return elements * torch.bfloat16.itemsize

    def encode(self, tensor: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        value = _value(self, tensor, out, residual)
        written = out.view(torch.bfloat16).copy_(value)
        if residual is not None:
            lost = torch.sub(value, written, out=residual.view(-1))
            lost.nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, data: Tensor, into: Tensor) -> None:
        _require_length(self, data, into)
        into.view(-1).copy_(data.view(torch.bfloat16))


class Int8(Codec):
    """The elements of float32 and float64 as multiples of a scale that each block of 256 has, symmetric about 0.

    The scale is 1/127 of the largest magnitude in the block, rounded up to 16 significant bits: an error is at most
    half a scale. Blocks whose scale would be below float32's normal range, 1.2e-38, are 0.
    """

    feedback = True

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        _require_float("int8", dtype)
        return _SCALE_BYTES * _blocks(elements) + elements

    def encode(self, tensor: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        value = _value(self, tensor, out, residual)
        elements = value.numel()
        count = _blocks(elements)
        blocks = value.new_zeros(count, BLOCK)
        rounded = blocks.view(-1)[:elements]
        rounded.copy_(value)
        scales = _scales(blocks)
        blocks.mul_(torch.where(scales > 0, scales.reciprocal(), 0.0)[:, None]).round_()
        out[: _SCALE_BYTES * count].view(torch.float32).copy_(scales)
        out[_SCALE_BYTES * count :].view(torch.int8).copy_(rounded)
        if residual is not None:
            # Exactly what `decode` returns.
            blocks.mul_(scales[:, None])
            torch.sub(value, rounded, out=residual.view(-1))

    def decode(self, data: Tensor, into: Tensor) -> None:
        _require_length(self, data, into)
        flat = into.view(-1)
        count, full = _blocks(flat.numel()), flat.numel() // BLOCK
        scales = data[: _SCALE_BYTES * count].view(torch.float32)
        if not scales.isfinite().all():
            raise ValueError("scales of int8 blocks are not finite; these bytes were not encoded here, or were damaged")
        flat.copy_(data[_SCALE_BYTES * count :].view(torch.int8))
        flat[: full * BLOCK].view(full, BLOCK).mul_(scales[:full, None])
        flat[full * BLOCK :].mul_(scales[full:])


BF16, INT8, PLAIN = BFloat16(), Int8(), Plain()
CODECS: Registry[Codec] = Registry(
    "headrace.codecs",
    {"bf16": f"{__name__}:BF16", "int8": f"{__name__}:INT8", "plain": f"{__name__}:PLAIN"},
    base=f"{__name__}:Codec",
    made=True,
)
"""Codecs by name; other packages add theirs by entry points of the group `headrace.codecs`."""


def codec_for(name: str, dtype: torch.dtype) -> Codec:
    """Returns a codec for tensors of one type: the one of this name for float32 and float64, `Plain` for all others."""
    if name not in CODECS:
        raise UnknownName("codec", name, CODECS)
    return CODECS[name if dtype in _FLOATS else "plain"]


def sent_share(name: str) -> float:
    """Returns the bytes of many encoded float32 elements, as a part of their own."""
    return CODECS[name].nbytes(BLOCK, torch.float32) / (BLOCK * torch.float32.itemsize)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _scales(blocks: Tensor) -> Tensor:
    """Returns the scales of `(count, 256)` elements, `(count,)` float32; raises ValueError if they have none."""
    largest = blocks.abs().amax(1)
    exact = (largest / _LARGEST_CODE).to(torch.float32)
    # A float32's bits are in the order of its magnitude, so that the next multiple of 256 is the next such scale.
    scales = ((exact.view(torch.int32) + _SPARE_BITS) & ~_SPARE_BITS).view(torch.float32)
    # The bits of some NaNs would overflow into a finite scale.
    if not (largest.isfinite() & scales.isfinite()).all():
        raise ValueError(
            "int8 cannot hold NaN, infinite or more than 4e40; look for what is not finite before encoding, or use bf16"
        )
    return torch.where(exact >= torch.finfo(torch.float32).tiny, scales, 0.0)


def _value(codec: Codec, tensor: Tensor, out: Tensor, residual: Tensor | None) -> Tensor:
    """Returns the values to encode, flat."""
    _require_length(codec, out, tensor)
    if residual is None:
        return tensor.reshape(-1)
    if residual.dtype != tensor.dtype or residual.numel() != tensor.numel():
        raise ValueError(
            f"a residual of {residual.numel()} {residual.dtype} does not belong to a tensor of {tensor.numel()} "
            f"{tensor.dtype}; keep one for each tensor"
        )
    return tensor.reshape(-1) + residual.view(-1)


def _require_length(codec: Codec, data: Tensor, tensor: Tensor) -> None:
    expected = codec.nbytes(tensor.numel(), tensor.dtype)
    if data.dtype != torch.uint8 or tuple(data.shape) != (expected,):
        raise ValueError(
            f"{tensor.numel()} elements of {tensor.dtype} are {expected} bytes in this codec, "
            f"and there are {tuple(data.shape)} of {data.dtype}"
        )


def _require_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise ValueError(f"{name} encodes float32 and float64, not {dtype}; take the codec that codec_for() returns")
