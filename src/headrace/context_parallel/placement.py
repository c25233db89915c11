"""Which tokens of a sequence each rank has.

A causal token attends to all before it, so the last tokens cost the most. Each of W ranks has two chunks of 2 W, one
from the front and one from the back, so that all compute as much (zigzag):

    chunk   0   1   2   3   4   5   6   7
    rank    0   1   2   3   3   2   1   0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Zigzag:
    """The tokens of a sequence of `length` on `world` ranks; `rank` is this one.

    A length that 2 `world` does not divide is continued by its last token, which is neither attended to nor weighed.
    """

    length: int
    rank: int
    world: int

    @property
    def chunk(self) -> int:
        """How many tokens a chunk has; a rank has two."""
        return -(-self.length // (2 * self.world))

    @property
    def local(self) -> int:
        """How many tokens a rank has."""
        return 2 * self.chunk

    def chunks(self, rank: int) -> tuple[int, int]:
        """Returns the numbers of a rank's chunks."""
        return rank, 2 * self.world - 1 - rank

    def real(self, chunk: int) -> int:
        """Returns how many tokens of a chunk are the sequence's own."""
        return min(max(self.length - chunk * self.chunk, 0), self.chunk)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the places of this rank's tokens in the sequence, `(local,)`; those of added ones go on."""
        starts = [chunk * self.chunk for chunk in self.chunks(self.rank)]
        return torch.cat([torch.arange(start, start + self.chunk, device=device) for start in starts])

    def sources(self, device: torch.device | str | None = None) -> Tensor:
        """Returns them with the last token's in the place of those of added ones."""
        return self.positions(device).clamp_(max=self.length - 1)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Returns this rank's tokens of a whole tensor, contiguous."""
        return whole.index_select(dim, self.sources(whole.device))

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Returns the whole tensor of all ranks' tokens, by rank."""
        placed: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            placed |= zip(self.chunks(rank), part.split(self.chunk, dim), strict=True)
        return torch.cat([placed[number] for number in sorted(placed)], dim).narrow(dim, 0, self.length)
