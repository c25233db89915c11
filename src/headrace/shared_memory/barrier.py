"""A barrier of the ranks of a host: one counter a rank in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32
from functools import partial
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
    others pass, or a MemberLost is raised on each of them. `counter` is the field of the records that counts, and
    `peers` are the other ranks that take part.
    """

    def __init__(
        self,
        page: ControlPage,
        rank: int,
        check: Callable[[], None],
        ends: FinishedRanks,
        is_gone: Callable[[int], bool] = never,
        counter: str = "barrier_counter",
    ) -> None:
        self._rank = rank
        self._ends = ends
        # The counters lie in the page, and do not keep it.
        self._page = page
        self._addresses = [record.address_of(counter) for record in page.ranks]
        self._counters = [c_int32.from_address(address) for address in self._addresses]
        self._own, self._own_address = self._counters[rank], self._addresses[rank]
        self.peers = [peer for peer in range(len(page.ranks)) if peer != rank]
        self._check = check
        self._is_gone = is_gone
        self._spin = Spin(_SPIN_S)

    def meet(self) -> None:
        """Returns when every rank has come."""
        self._await_all(self._come())

    def start(self) -> Callable[[], None]:
        """Comes, and returns a function that returns when every rank has come."""
        return partial(self._await_all, self._come())

    def _come(self) -> int:
        futex.fence()
        target = (self._own.value + 1) & 0x7FFFFFFF
        self._own.value = target
        futex.wake(self._own_address)
        return target

    def _await_all(self, target: int) -> None:
        for peer in self.peers:
            if not reached(self._counters[peer].value, target):
                self._await(peer, target)
        futex.fence()

    def await_others(self) -> None:
        """Returns when every other rank has come to this rank's last barrier, too, or is lost."""
        target = self._own.value
        for peer in self.peers:
            counter = self._counters[peer]
            while not reached(seen := counter.value, target) and not self._is_gone(peer):
                futex.wait(self._addresses[peer], seen, _SLICE_S)
                self._check()
                self._ends.check(peer, self._rank, partial(self._has_come, peer, target))
        futex.fence()

    def notice(self) -> None:
        """Raises the MemberLost of the next barrier, if it is sure: a rank is lost, and has not come to it."""
        self._check_lost((self._own.value + 1) & 0x7FFFFFFF)

    def restart(self, count: int) -> None:
        """Lets this rank count from another barrier on."""
        self._own.value = count & 0x7FFFFFFF

    def _await(self, peer: int, target: int) -> None:
        counter, address = self._counters[peer], self._addresses[peer]
        began = perf_counter()
        give_up = began + self._spin.seconds
        while True:
            seen = counter.value
            if reached(seen, target):
                self._spin.met()
                return
            if perf_counter() > give_up:
                break
        if self._is_gone is not never:
            # Whose loss is known already is not waited for.
            self._check_lost(target)
        while not reached(seen, target):
            futex.wait(address, seen, _SLICE_S)
            seen = counter.value
            if not reached(seen, target) and perf_counter() - began > _SLICE_S:
                self._check()
                self._check_lost(target)
                self._ends.check(peer, self._rank, partial(self._has_come, peer, target))
        self._spin.slept(perf_counter() - began)

    def _has_come(self, peer: int, target: int) -> bool:
        return reached(self._counters[peer].value, target)

    def _check_lost(self, target: int) -> None:
        for peer in self.peers:
            # Asked first: a lost rank may have come before it was lost.
            if self._is_gone(peer) and not self._has_come(peer, target):
                raise MemberLost(peer)


def reached(seen: int, target: int) -> bool:
    """Tells whether a counter, which wraps at 2**31, has reached a number that is at most a few barriers away."""
    return ((seen - target) & 0x7FFFFFFF) < 0x40000000
