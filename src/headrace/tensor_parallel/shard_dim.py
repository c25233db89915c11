"""Which part of a parameter is whose, where a layer is split over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardDim:
    """Gives every rank an equal part along one dim.

    Attributes:
        dim: along which it is cut.
        blocks: matrices that lie one behind the other along it, each cut by itself: the three of an attention's
            `in_proj_weight`.
    """

    dim: int
    blocks: int = 1

    def take(self, whole: Tensor, rank: int, world: int) -> Tensor:
        """Returns a rank's part of a whole tensor, a view where that is possible."""
        each: Tensor = whole.unflatten(self.dim, (self.blocks, world, -1))
        return each.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor of all ranks' parts, in their order."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)

    def whole_shape(self, part: Sequence[int], world: int) -> tuple[int, ...]:
        """Returns the shape of the whole tensor from that of a part."""
        return tuple(length * world if dim == self.dim else length for dim, length in enumerate(part))
