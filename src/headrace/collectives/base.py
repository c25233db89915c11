"""What workers say to each other together: every rank calls the same verbs in the same order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from headrace.shared_memory.finished_ranks import FinishedRanks

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HostMap:
    """Where the ranks of a group are that are on several hosts.

    Attributes:
        hosts: the name of each rank's.
        address: of this rank's host, where the others reach it.
    """

    hosts: tuple[str, ...]
    address: str


class Collective(ABC):
    """A group of `world` ranks that act together.

    Every wait has an end: a peer that is lost raises `PeerLost` in the others. Sums are taken in rank order,
    so that every rank gets the same bits, and two runs too.
    """

    rank: int
    world: int
    moved_bytes: int
    """Bytes that this rank has written for others and read from them so far."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor, of the same shape and type on all ranks, by the sum over ranks."""

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begins an `all_reduce`; the sum is there when what it returns has been called."""
        # At once, unless somebody else's cores do it: those that would add in the background are those that compute.
        self.all_reduce(tensor)
        return _nothing

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns every rank's `(nbytes,)` uint8 tensor, by rank, as `(world, nbytes)`; their lengths are equal."""
        every = tensor.new_zeros(self.world, len(tensor))
        every[self.rank] = tensor
        self.all_reduce(every)
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """Gives row i of a contiguous `(world, nbytes)` uint8 tensor to rank i; returns what all give this one."""
        return self.gather(pieces.view(-1)).view(self.world, *pieces.shape)[:, self.rank]

    @abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over ranks of a few numbers, in double precision, in rank order."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the group holds of the machine."""


class ProcessGroup(Collective):
    """The processes of a run, who meet.

    Attributes:
        one_memory: whether they can see the same memory; where not, `share` raises.
        home: where they are; None where they can see the same memory.
        groups: those that `subgroup` has returned.
        ends: whose loop has ended, of its ranks.
    """

    one_memory: bool = True
    ends: FinishedRanks
    home: HostMap | None = None
    groups: Sequence[ProcessGroup] = ()

    def subgroup(self, members: Sequence[int]) -> ProcessGroup:
        """Returns a group of some of the ranks, which acts by itself and is closed with this one.

        Every rank calls it at the same time, and belongs to one of the groups that are named.

        Args:
            members: ranks of the caller's group, in order, its own among them.
        """
        raise NotImplementedError("this group has no groups in it")

    @property
    def all_moved_bytes(self) -> int:
        """Those of the groups in this one, too."""
        return self.moved_bytes + sum(group.all_moved_bytes for group in self.groups)

    @property
    def members(self) -> list[int]:
        """Places in the run of all ranks."""
        return list(range(self.world))

    def regroup(self, members: Sequence[tuple[int, int]], meeting: int) -> None:
        """Goes on with others, where members may be lost or come; else all stay.

        Args:
            members: place and incarnation of all, every one of whom calls this.
            meeting: greater than at any time before.
        """

    def is_gone(self, member: int) -> bool:
        """Whether a member was lost without harm to the others."""
        return False

    def together(self, act: Callable[[], _Result]) -> _Result:
        """Does something with all ranks; where members may be lost, again without them."""
        return act()

    @abstractmethod
    def check(self, peer: int | None = None, broken: str = "") -> None:
        """Looks whether the others live.

        Args:
            peer: to whom a connection has broken.
            broken: how; then this raises.

        Raises:
            PeerLost: another rank is known to be lost.
        """

    def broadcast(self, tensor: Tensor) -> None:
        if self.rank != 0:
            tensor.zero_()
        # Bytes, because adding zeros to numbers would lose the sign of a zero.
        self.all_reduce(tensor.view(-1).view(torch.uint8))

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        """Returns one zeroed region of `nbytes` a rank, by rank, as `(nbytes,)` uint8: everyone's to see.

        Collective, `nbytes` may differ. What a rank writes is seen by others that pass a later `barrier`.

        Raises:
            NotImplementedError: hosts have no memory in common.
        """
        raise NotImplementedError("processes on several hosts share no memory; they exchange by collectives")


def _nothing() -> None:
    """The sum is there already."""
