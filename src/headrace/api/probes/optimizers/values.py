"""Random values and gradients for the parameters that a probe of an optimizer tries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LONGEST, _MOST_ELEMENTS = 130, 20_000
"""Of a tried parameter: longer than 128, from which on some optimizers factor a matrix."""


def clipped(shape: Sequence[int]) -> list[int]:
    lengths = [min(length, _LONGEST) for length in shape]
    while math.prod(lengths) > _MOST_ELEMENTS:
        longest = lengths.index(max(lengths))
        lengths[longest] = -(-lengths[longest] // 2)
    return lengths


def across(value: Tensor, gradient: Tensor) -> Tensor:
    """Returns the part of a gradient that is at right angles to each row of a matrix, or to a vector."""
    rows = value.to(gradient.dtype).reshape(value.shape[0] if value.dim() > 1 else 1, -1)
    own = gradient.reshape(rows.shape)
    along = (own * rows.conj()).sum(1, keepdim=True) / rows.abs().square().sum(1, keepdim=True).clamp(min=1e-30)
    return (own - along * rows).view(value.shape)


def like(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator, dtype=wide(value.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
