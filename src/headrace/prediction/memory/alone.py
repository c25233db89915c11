"""A group of whose ranks one alone is there: the others are taken to say and do what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.collectives.shared_memory import slot_bytes
from headrace.shared_memory.ends import FinishedRanks

_SMALL = 1 << 16
"""Up to so many bytes, what ranks share has values: what they tell each other."""


@dataclass
class _Endless:
    finished: int = 0


class OneOfGroup(ProcessGroup):
    """Rank `rank` of `world`; `shared` returns memory that all of them see, of so many bytes.

    `stage` returns the channels of a rank of a pipeline: of this group, or of one within it.
    """

    alike = True

    def __init__(
        self, rank: int, world: int, shared: Callable[[int], Tensor], stage: Callable[..., Any] | None = None
    ) -> None:
        self.rank = rank
        self.world = world
        self.ends = FinishedRanks([_Endless()] * world)
        self._shared = shared
        self._stage = stage
        if stage is not None:
            self.channels = partial(stage, rank)
        self._slots: tuple[Tensor, ...] = ()

    def subgroup(self, members: Sequence[int]) -> OneOfGroup:
        return OneOfGroup(list(members).index(self.rank), len(members), self._shared, self._stage)

    def barrier(self) -> None:
        """Returns at once: no other rank is there."""

    def check(self, peer: int | None = None, broken: str = "") -> None:
        """Finds no lost rank: no other is there."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Leaves what it would replace, and takes the memory through which it would go."""
        if self.world > 1:
            self._slots = self._slots or self.share(2 * slot_bytes(self.world))

    broadcast = all_reduce

    def gather(self, tensor: Tensor) -> Tensor:
        self.all_reduce(tensor)
        return tensor.expand(self.world, len(tensor)).clone()

    def all_to_all_uneven(self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        self.all_reduce(pieces[self.rank])
        own = pieces[self.rank]
        return [own if rank == self.rank else own.new_empty(row[self.rank]) for rank, row in enumerate(sizes)]

    def sum(self, values: Sequence[float]) -> list[float]:
        return [value * self.world for value in values]

    def gather_numbers(self, own: Sequence[float]) -> list[list[float]]:
        return [list(own)] * self.world

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        if nbytes <= _SMALL:
            # All say the same, in one place.
            return (torch.zeros(nbytes, dtype=torch.uint8),) * self.world
        return tuple(self._shared(nbytes) for _ in range(self.world))

    def share_one(self, nbytes: int) -> Tensor:
        return self._shared(nbytes)

    close = barrier
