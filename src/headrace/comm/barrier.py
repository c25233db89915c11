"""All ranks of a host meet: one counter a rank in shared memory, futex for those who come early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from headrace.comm import futex
from headrace.comm.control import ControlPage
from headrace.comm.spin import Spin
from headrace.errors import UsageError

__all__ = ["Barrier", "check_left", "reached"]

_SPIN_S = 50e-6
_SLICE_S = 0.05


class Barrier:
    """Every rank adds 1 to its own counter, then waits until all others' have caught up.

    A short wait spins.

    Args:
        page: holds the counters.
        rank: this process's.
        check: called about every 50 ms of waiting; raises to end the wait.
    """

    def __init__(self, page: ControlPage, rank: int, check: Callable[[], None]) -> None:
        self._rank = rank
        self._ends = page.ends
        self._counters = page.counters
        self._own = self._counters[rank]
        self._addresses = [page.counter_address(peer) for peer in range(page.ranks)]
        self._own_address = self._addresses[rank]
        self._peers = [peer for peer in range(page.ranks) if peer != rank]
        self._check = check
        self._spin = Spin(_SPIN_S)

    def meet(self) -> None:
        """Returns when every rank has come."""
        futex.fence()
        target = (self._own[0] + 1) & 0x7FFFFFFF
        self._own[0] = target
        futex.wake(self._own_address)
        for peer in self._peers:
            counter = self._counters[peer]
            if not reached(counter[0], target):
                self._await(peer, target)
        futex.fence()

    def _await(self, peer: int, target: int) -> None:
        counter, address = self._counters[peer], self._addresses[peer]
        began = perf_counter()
        give_up = began + self._spin.seconds
        while True:
            seen = counter[0]
            if reached(seen, target):
                self._spin.met()
                return
            if perf_counter() > give_up:
                break
        while not reached(seen, target):
            futex.wait(address, seen, _SLICE_S)
            seen = counter[0]
            if not reached(seen, target) and perf_counter() - began > _SLICE_S:
                self._check()
                self._check_left(peer, target)
        self._spin.slept(perf_counter() - began)

    def _check_left(self, peer: int, target: int) -> None:
        check_left(self._ends, peer, self._rank, lambda: reached(self._counters[peer][0], target))


def reached(seen: int, target: int) -> bool:
    """Whether a counter has come as far as another number."""
    # Counters go round at 2**31; a peer is at most a few meetings ahead or behind.
    return ((seen - target) & 0x7FFFFFFF) < 0x40000000


def check_left(ends: Sequence[memoryview], peer: int, rank: int, came: Callable[[], bool]) -> None:
    """Looks whether a peer's loop has ended, while this rank's still waits for it.

    Args:
        ends: of the control page.
        peer: who is waited for.
        rank: this process's.
        came: whether the peer has come after all.

    Raises:
        UsageError: so it is.
    """
    rounds = ends[peer][0]
    # Its end was written after its last coming, so the counter tells which of the two it was.
    if rounds and not ends[rank][0] and not came():
        raise UsageError(
            f"the loop on rank {peer} ended after {rounds - 1} rounds and rank {rank} still waits for it; "
            "a training loop must do the same rounds on every worker"
        )
