"""A barrier of the ranks of a host: one counter a rank in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headrace.shared_memory import futex
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks
from headrace.shared_memory.futex import Spin

_SPIN_S = 50e-6
_SLICE_S = 0.05


class MemberLost(Exception):
    """A rank of a group whose ranks may be lost was lost before it reached a barrier."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} was lost before a barrier")
        self.rank = rank


def never(peer: int) -> bool:
    """Tells that no rank is lost without ending the run."""
    return False


class Barrier:
    """Every rank adds 1 to its own counter, then waits until all others' have caught up; a short wait spins.

    `check` is called about every 50 ms of waiting, and raises to end the wait; `ends` tells which loops have ended,
    and `is_gone` which ranks are lost, and write nothing any more. A lost rank that has come counts, so that either all
    others pass, or a MemberLost is raised on each of them.
    """

    def __init__(
        self,
        page: ControlPage,
        rank: int,
        check: Callable[[], None],
        ends: FinishedRanks,
        is_gone: Callable[[int], bool] = never,
    ) -> None:
        self._rank = rank
        self._ends = ends
        self._records = page.ranks
        self._own = page.ranks[rank]
        self._addresses = [record.address_of("barrier_counter") for record in page.ranks]
        self._own_address = self._addresses[rank]
        self._peers = [peer for peer in range(len(page.ranks)) if peer != rank]
        self._check = check
        self._is_gone = is_gone
        self._spin = Spin(_SPIN_S)

    def meet(self) -> None:
        """Returns when every rank has come."""
        futex.fence()
        target = (self._own.barrier_counter + 1) & 0x7FFFFFFF
        self._own.barrier_counter = target
        futex.wake(self._own_address)
        for peer in self._peers:
            if not reached(self._records[peer].barrier_counter, target):
                self._await(peer, target)
        futex.fence()

    def notice(self) -> None:
        """Raises the MemberLost of the next barrier, if it is sure: a rank is lost, and has not come to it."""
        self._check_lost((self._own.barrier_counter + 1) & 0x7FFFFFFF)

    def _await(self, peer: int, target: int) -> None:
        record, address = self._records[peer], self._addresses[peer]
        began = perf_counter()
        give_up = began + self._spin.seconds
        while True:
            seen = record.barrier_counter
            if reached(seen, target):
                self._spin.met()
                return
            if perf_counter() > give_up:
                break
        while not reached(seen, target):
            futex.wait(address, seen, _SLICE_S)
            seen = record.barrier_counter
            if not reached(seen, target) and perf_counter() - began > _SLICE_S:
                self._check()
                self._check_lost(target)
                self._ends.check(peer, self._rank, lambda: reached(record.barrier_counter, target))
        self._spin.slept(perf_counter() - began)

    def _check_lost(self, target: int) -> None:
        for peer in self._peers:
            # Asked first: a lost rank may have come before it was lost.
            if self._is_gone(peer) and not reached(self._records[peer].barrier_counter, target):
                raise MemberLost(peer)


def reached(seen: int, target: int) -> bool:
    """Tells whether a counter, which wraps at 2**31, has reached a number that is at most a few barriers away."""
    return ((seen - target) & 0x7FFFFFFF) < 0x40000000
