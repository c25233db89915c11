"""A group whose members may be lost at any instant: the others notice it at a barrier, and repeat what they did.

    member 0   ──── ■ ──────── ■ ··········· ■ ─────────
    member 1   ──────■ ──── ■ ✗             │
    member 2   ─── ■ ─────── ■ ············ ■ ─────────
                   all meet    member 1 is lost: no member passes, both raise here

A member that has reached a barrier has written its data before it, and a lost member reaches no further one. So either
all live members pass a barrier, or none does, and no other agreement is needed. On one host the members write into the
control page; on several, into a store, which decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.policies.views import Member
from headrace.shared_memory.barrier import Barrier, MemberLost
from headrace.shared_memory.control_page import NUMBERS, ControlPage
from headrace.shared_memory.ends import FinishedRanks

_MEETINGS = 1 << 16
"""Barriers that a group may have before its members change."""

_Result = TypeVar("_Result")


class ElasticBarrier(ABC):
    """Where the members of an elastic group tell that they have come, and a few numbers each.

    `one_memory` tells whether the members share memory.
    """

    one_memory: bool = True

    @abstractmethod
    def restart(self, meeting: int) -> None:
        """Lets the members count from the same barrier on; see `ProcessGroup.regroup`."""

    @abstractmethod
    def meet(self, members: Sequence[tuple[int, int]], numbers: Tensor) -> list[Tensor]:
        """Returns every member's float64 numbers, of which there are at most `NUMBERS`, when all have come.

        `members` has each one's rank in the run and its incarnation. Raises MemberLost, on all of them, if one of them
        was lost before it came.
        """

    @abstractmethod
    def is_gone(self, member: int, incarnation: int) -> bool:
        """Whether a member was lost."""

    def close(self) -> None:  # noqa: B027  (the page is the run's)
        """Releases connections."""


class PageBarrier(ElasticBarrier):
    """Of the members of one host: a counter and numbers of each rank in the control page."""

    def __init__(self, page: ControlPage, place: int, check: Callable[[], None], ends: FinishedRanks) -> None:
        self._page = page
        self._place = place
        self._incarnations: dict[int, int] = {}
        self._barrier = Barrier(
            page, place, check, ends, lambda member: self.is_gone(member, self._incarnations[member]), "elastic_counter"
        )
        self._turn = 0
        self._numbers = [
            [torch.frombuffer(half, dtype=torch.float64) for half in record.numbers] for record in page.ranks
        ]

    def restart(self, meeting: int) -> None:
        # Not earlier: others may still read the counter of the process that had this place before.
        self._barrier.restart(meeting * _MEETINGS)
        self._turn = 0

    def meet(self, members: Sequence[tuple[int, int]], numbers: Tensor) -> list[Tensor]:
        count = len(numbers)
        if count:
            self._turn ^= 1
            self._numbers[self._place][self._turn][:count].copy_(numbers)
        self._incarnations = dict(members)
        self._barrier.peers = [rank for rank, _ in members if rank != self._place]
        try:
            self._barrier.meet()
        except MemberLost:
            # The next numbers take the place of those that others may still read before they come here.
            self._barrier.await_others()
            raise
        return [self._numbers[rank][self._turn][:count] for rank, _ in members]

    def is_gone(self, member: int, incarnation: int) -> bool:
        # A process whose loss the launcher tells writes nothing any more.
        return self._page.ranks[member].restarts > incarnation


class ElasticGroup(ProcessGroup):
    """The workers that are members now; `rank` and `world` are among them, and the first one leads."""

    def __init__(
        self,
        barrier: ElasticBarrier,
        place: int,
        members: Sequence[tuple[int, int]],
        check: Callable[[], None],
        ends: FinishedRanks,
    ) -> None:
        self.one_memory = barrier.one_memory
        self.ends = ends
        self._barrier = barrier
        self._place = place
        self._check = check
        self.regroup(members, 0)

    def regroup(self, members: Sequence[tuple[int, int]], meeting: int) -> None:
        self._incarnations = dict(members)
        self._members = list(self._incarnations)
        if meeting:
            self._barrier.restart(meeting)
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
        return self._barrier.is_gone(member, self._incarnations[member])

    def barrier(self) -> None:
        """Returns when all other members have come; a MemberLost if one of them was lost."""
        self._meet(torch.empty(0, dtype=torch.float64))

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
            first, *others = self._meet(piece.to(torch.float64))
            total = first.clone()
            for other in others:
                total += other
            piece.copy_(total)
            self.moved_bytes += 16 * piece.numel()

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        # Memory of a lost member would be lost with it.
        raise NotImplementedError("workers that may be lost share no memory; their servers do")

    def close(self) -> None:
        """Releases connections; the page is the run's."""
        self._barrier.close()

    def _meet(self, numbers: Tensor) -> list[Tensor]:
        if self.world == 1:
            return [numbers]
        return self._barrier.meet([(member, self._incarnations[member]) for member in self._members], numbers)

    def _renumber(self) -> None:
        self.rank, self.world = self._members.index(self._place), len(self._members)


def first_members(me: Member, workers: int) -> list[Member]:
    """Returns the members of the group with which a process begins: one that comes back is alone at first."""
    return [me] if me[1] else [(worker, 0) for worker in range(workers)]


def elastic_on_page(
    page: ControlPage, place: int, members: Sequence[tuple[int, int]], check: Callable[[], None]
) -> ElasticGroup:
    """Returns the group of workers of one host."""
    ends = FinishedRanks([record.heartbeat for record in page.ranks])
    return ElasticGroup(PageBarrier(page, place, check, ends), place, members, check, ends)
