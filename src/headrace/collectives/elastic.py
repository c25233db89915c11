"""A group whose members may be lost at any instant: the others notice where they meet, and do again what they were at.

    member 0   ──── ■ ──────── ■ ··········· ■ ─────────
    member 1   ──────■ ──── ■ ✗             │
    member 2   ─── ■ ─────── ■ ············ ■ ─────────
                   all meet    member 1 is gone: nobody gets past, both raise, here and nowhere else

Whoever has come to a meeting has left there what it had to say, and whoever is lost does not come any further: so all
who live get past a meeting, or none of them does. That is all the agreement it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.shared_memory import futex
from headrace.shared_memory.barrier import reached
from headrace.shared_memory.control_page import NUMBERS, ControlPage
from headrace.shared_memory.finished_ranks import FinishedRanks

_SLICE_S = 0.05
_MEETINGS = 1 << 16
"""So many times a group may meet before its members change."""

_Result = TypeVar("_Result")


class MemberLost(Exception):
    """A member of the group has not come to a meeting and never will.

    Args:
        rank: its place in the run.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} was lost before a meeting")
        self.rank = rank


class ElasticGroup(ProcessGroup):
    """Those of a host's workers who meet now.

    Args:
        page: the run's.
        place: of this process in the page.
        members: place and incarnation of all.
        check: called while waiting; raises where the run is over.

    Attributes:
        rank, world: among those who meet now; the first one leads.
    """

    def __init__(
        self, page: ControlPage, place: int, members: Sequence[tuple[int, int]], check: Callable[[], None]
    ) -> None:
        self.moved_bytes = 0
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
            # Everybody counts from the same number on. Not earlier: somebody may still have to see how far whoever had
            # this place before has come.
            self._page.ranks[self._place].elastic_counter = (meeting * _MEETINGS) & 0x7FFFFFFF
        self._turn = 0
        self._seat()

    def together(self, act: Callable[[], _Result]) -> _Result:
        while True:
            try:
                return act()
            except MemberLost as lost:
                self._members.remove(lost.rank)
                self._seat()

    @property
    def members(self) -> list[int]:
        return self._members[:]

    def is_gone(self, member: int) -> bool:
        # Whose loss the launcher tells has written its last.
        return self._page.ranks[member].restarts > self._incarnations[member]

    def barrier(self) -> None:
        """Raises:
        MemberLost: the first of those who never come; when all others have.
        """
        if self.world == 1:
            return
        futex.fence()
        own = self._page.ranks[self._place]
        target = (own.elastic_counter + 1) & 0x7FFFFFFF
        own.elastic_counter = target
        futex.wake(own.elastic_address)
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
        # In double precision, and not through a ring: what is summed where members meet is small.
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
        """Raises:
        NotImplementedError: what a lost member has shared cannot be had again.
        """
        raise NotImplementedError("workers that may be lost share no memory; their servers do")

    def close(self) -> None:
        """The page is the run's."""

    def _seat(self) -> None:
        self.rank, self.world = self._members.index(self._place), len(self._members)

    def _comes(self, member: int, target: int) -> bool:
        """Waits until a member has come as far, or never will; returns whether it has."""
        record = self._page.ranks[member]
        address = record.elastic_address
        while not reached(seen := record.elastic_counter, target):
            if self.is_gone(member) and not reached(record.elastic_counter, target):
                return False
            futex.wait(address, seen, _SLICE_S)
            self._check()
            self.ends.check(member, self._place, lambda: reached(record.elastic_counter, target))
        return True
