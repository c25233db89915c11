"""The members of a run's present view as a group of processes, however they agree on the views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import TypeVar

from torch import Tensor

from headrace.collectives.base import ProcessGroup, moved_bytes_of
from headrace.collectives.compression import PLAIN, Compression
from headrace.errors import UnfitMachine
from headrace.policies.views import Member, MemberView
from headrace.shared_memory.barrier import MemberLost
from headrace.shared_memory.ends import FinishedRanks

_LOOK_EVERY_S = 0.01
_NOTICED_S = 5.0
"""How long it may take until all know that a process whose memory cannot be opened is lost."""

_Result = TypeVar("_Result")


class Views(ABC):
    """One member's way from view to view.

    Attributes:
        now: the present view's group; the first of its members that has the state leads.
        view: the present one; its `fresh` members do not have the state yet.
        me: this process's rank in the run, and which of its processes it is.
        ends: which ranks' loops have ended.
        has_left: whether this process has left the others, as it was asked to.
        votes: whether a `commit` may ask for approval.
    """

    now: ProcessGroup
    view: MemberView
    me: Member
    ends: FinishedRanks
    has_left = False
    votes = False

    @abstractmethod
    def join(self) -> None:
        """Waits until the members take this process in; it is fresh then."""

    @abstractmethod
    def announce(self, done: int) -> None:
        """Lets the members change after so many rounds where that is wanted; the first one calls it before a round."""

    @abstractmethod
    def is_due(self, done: int) -> bool:
        """Tells whether members change after so many rounds."""

    @abstractmethod
    def renew(self, admits: bool = False) -> None:
        """Makes the next view, without the members that are lost; every member calls it.

        If it `admits`, those that wait join, and those leave that are to leave.
        """

    def commit(self, approves: bool | None = None) -> bool:
        """See `ProcessGroup.commit`. Of members that share memory all pass the last barrier, or none does."""
        return True

    @abstractmethod
    def settle(self) -> None:
        """Notes that all members have the state; every member calls it."""

    @abstractmethod
    def is_gone(self, member: int) -> bool:
        """Whether a rank is no member any more, or was lost."""

    @abstractmethod
    def check(self) -> None:
        """Raises where the run has ended, or goes on without this process."""

    @abstractmethod
    def _check_members(self) -> None:
        """Raises what `check` does, and a MemberLost where a member is lost."""

    def explain(self, problem: UnfitMachine) -> Exception:
        """Returns what to raise where a member's memory cannot be opened: a MemberLost if a member is lost."""
        give_up = monotonic() + _NOTICED_S
        while monotonic() < give_up:
            try:
                self._check_members()
            except MemberLost as lost:
                return lost
            sleep(_LOOK_EVERY_S)
        return problem

    @abstractmethod
    def close(self) -> None:
        """Releases memory and connections."""


class ForwardingGroup(ProcessGroup):
    """A group whose collectives are those of another one, `now`."""

    now: ProcessGroup

    def barrier(self) -> None:
        self.now.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        return self.now.sum(values)

    def all_reduce(self, tensor: Tensor) -> None:
        self.now.all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        return self.now.start_all_reduce(tensor, compression)

    def broadcast(self, tensor: Tensor) -> None:
        self.now.broadcast(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        return self.now.gather(tensor)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        return self.now.all_to_all(pieces)

    def all_to_all_uneven(self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        return self.now.all_to_all_uneven(pieces, sizes)


class ViewGroup(ForwardingGroup):
    """The members of the present view; who changes the views lets the group `adopt` the new one."""

    fixed = False

    def __init__(self, views: Views) -> None:
        self.views = views
        self.ends = views.ends
        self.votes = views.votes
        self.adopt()

    def adopt(self) -> None:
        """Goes on with the members of the present view."""
        self.moved_bytes += sum(map(moved_bytes_of, self.groups))
        self.now = self.views.now
        self.groups = (self.now,)
        self.rank, self.world = self.now.rank, self.now.world
        self.one_memory, self.home = self.now.one_memory, self.now.home
        self.bucket_bytes = self.now.bucket_bytes

    @property
    def members(self) -> list[int]:
        return [rank for rank, _ in self.views.view.members]

    def together(self, act: Callable[[], _Result]) -> _Result:
        while True:
            try:
                result = act()
                self.views.commit()
                return result
            except MemberLost:
                self.views.renew()
                self.adopt()

    def commit(self, approves: bool | None = None) -> bool:
        return self.views.commit(approves)

    def is_gone(self, member: int) -> bool:
        return self.views.is_gone(member)

    def check(self, peer: int | None = None, broken: str = "") -> None:
        self.views.check()

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        try:
            return self.now.share(nbytes)
        except UnfitMachine as problem:
            # Each member has been told that one of them could not open the memory of another.
            raise self.views.explain(problem) from None

    def close(self) -> None:
        """Releases memory."""
        self.views.close()
