"""A barrier of the ranks of a host: one counter a rank in shared memory; ranks that come early wait on a futex."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from headrace.shared_memory import futex
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.finished_ranks import FinishedRanks
from headrace.shared_memory.futex import Spin

_SPIN_S = 50e-6
_SLICE_S = 0.05


class Barrier:
    """Every rank adds 1 to its own counter, then waits until all others' have caught up; a short wait spins.

    `check` is called about every 50 ms of waiting, and raises to end the wait; `ends` tells which loops have ended.
    """

    def __init__(self, page: ControlPage, rank: int, check: Callable[[], None], ends: FinishedRanks) -> None:
        self._rank = rank
        self._ends = ends
        self._records = page.ranks
        self._own = page.ranks[rank]
        self._addresses = [record.barrier_address for record in page.ranks]
        self._own_address = self._addresses[rank]
        self._peers = [peer for peer in range(len(page.ranks)) if peer != rank]
        self._check = check
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
                self._ends.check(peer, self._rank, lambda: reached(record.barrier_counter, target))
        self._spin.slept(perf_counter() - began)


def reached(seen: int, target: int) -> bool:
    """Tells whether a counter has reached a number."""
    # Counters wrap at 2**31; a peer is at most a few barriers ahead or behind.
    return ((seen - target) & 0x7FFFFFFF) < 0x40000000
