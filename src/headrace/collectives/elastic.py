"""A group whose members may be lost at any instant: the others notice it at a barrier, and repeat what they did.

    member 0   ──── ■ ──────── ■ ··········· ■ ─────────
    member 1   ──────■ ──── ■ ✗             │
    member 2   ─── ■ ─────── ■ ············ ■ ─────────
                   all meet    member 1 is lost: no member passes, both raise here

A member that has reached a barrier has written its data before it, and a lost member reaches no further one. So either
all live members pass a barrier, or none does, and no other agreement is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.shared_memory import futex
from headrace.shared_memory.barrier import FinishedRanks, reached
from headrace.shared_memory.control_page import NUMBERS, ControlPage

_SLICE_S = 0.05
_MEETINGS = 1 << 16
"""Barriers that a group may have before its members change."""

_Result = TypeVar("_Result")


class MemberLost(Exception):
    """A member of the group, of this rank in the run, was lost before it reached a barrier."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} was lost before a barrier")
        self.rank = rank


class ElasticGroup(ProcessGroup):
    """The workers of a host that are members now; `rank` and `world` are among them, and the first one leads."""

    def __init__(
        self, page: ControlPage, place: int, members: Sequence[tuple[int, int]], check: Callable[[], None]
    ) -> None:
        self._page = page
        self._place = place
        self._check = check
        self.ends = FinishedRanks([record.heartbeat for record in page.ranks])
        self._numbers = [
            [torch.frombuffer(half, dtype=torch.float64) for half in record.numbers] for record in page.ranks
        ]
        self.regroup(members, 0)

    def regroup(self, members: Sequence[tuple[int, int]], meeting: int) -> None:
        self._incarnations = dict(members)
        self._members = list(self._incarnations)
        if meeting:
            # All count from the same number on. Not earlier: others may still read the counter of the process that had
            # this place before.
            self._page.ranks[self._place].elastic_counter = (meeting * _MEETINGS) & 0x7FFFFFFF
        self._turn = 0
        self._renumber()

    def together(self, act: Callable[[], _Result]) -> _Result:
        while True:
            try:
                return act()
            except MemberLost as lost:
                self._members.remove(lost.rank)
                self._renumber()

    @property
    def members(self) -> list[int]:
        return self._members[:]

    def is_gone(self, member: int) -> bool:
        # A process whose loss the launcher tells writes nothing any more.
        return self._page.ranks[member].restarts > self._incarnations[member]

    def barrier(self) -> None:
        """Returns when all other members have come; a MemberLost if one of them was lost."""
        if self.world == 1:
            return
        futex.fence()
        own = self._page.ranks[self._place]
        target = (own.elastic_counter + 1) & 0x7FFFFFFF
        own.elastic_counter = target
        futex.wake(own.address_of("elastic_counter"))
        lost = [member for member in self._members if member != self._place and not self._comes(member, target)]
        futex.fence()
        if lost:
            raise MemberLost(lost[0])

    def check(self, peer: int | None = None, broken: str = "") -> None:
        self._check()

    def sum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(tensor)
        return tensor.tolist()

    def all_reduce(self, tensor: Tensor) -> None:
        # In double precision, and not through a ring: what is summed here is small.
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), NUMBERS):
            piece = flat[start : start + NUMBERS]
            self._turn ^= 1
            count = piece.numel()
            self._numbers[self._place][self._turn][:count].copy_(piece)
            self.barrier()
            total = self._numbers[self._members[0]][self._turn][:count].clone()
            for member in self._members[1:]:
                total += self._numbers[member][self._turn][:count]
            piece.copy_(total)
            self.moved_bytes += 16 * count

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        # Memory of a lost member would be lost with it.
        raise NotImplementedError("workers that may be lost share no memory; their servers do")

    def close(self) -> None:
        """Releases nothing: the page is the run's."""

    def _renumber(self) -> None:
        self.rank, self.world = self._members.index(self._place), len(self._members)

    def _comes(self, member: int, target: int) -> bool:
        """Waits until a member has reached a barrier, or is lost; returns whether it has reached it."""
        record = self._page.ranks[member]
        while not reached(seen := record.elastic_counter, target):
            if self.is_gone(member) and not reached(record.elastic_counter, target):
                return False
            futex.wait(record.address_of("elastic_counter"), seen, _SLICE_S)
            self._check()
            self.ends.check(member, self._place, lambda: reached(record.elastic_counter, target))
        return True
