"""Random values and gradients for the parameters that a probe of an optimizer tries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

_MOST_GROUPS = 6
_LONGEST = 144
"""Of a tried matrix: longer than 128, from which on some optimizers factor one; its square is 81 blocks of 256."""


def clipped(shape: Sequence[int]) -> list[int]:
    """Halves what is longest until little is left, which keeps most multiples of a block."""
    lengths = list(shape)
    while math.prod(lengths) > _LONGEST**2:
        longest = lengths.index(max(lengths))
        least = _LONGEST if lengths[longest] > _LONGEST and len(shape) == 2 else 1
        lengths[longest] = max(least, -(-lengths[longest] // 2))
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


def tried(template: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of some parameters of some groups, those first whose options differ by more than the rate."""
    kinds: dict[str, list[list[str]]] = {}
    for group in template.param_groups:
        names = [name for name in group["param_names"] if tensors[name].requires_grad and tensors[name].numel()]
        if names:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}
            kinds.setdefault(repr(options), []).append(names)
    groups = [each for several in zip_longest(*kinds.values()) for each in several if each]
    found: list[str] = []
    for names in groups[:_MOST_GROUPS]:
        # One of each number of dims, and the last.
        first = {tensors[name].dim(): name for name in reversed(names)}
        found += sorted({*first.values(), names[-1], *names[:2]}, key=names.index)
    return found
