"""A barrier of the ranks of a host: one counter a rank in shared memory; and which ranks' loops have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from headrace.errors import UsageError
from headrace.shared_memory import futex
from headrace.shared_memory.control_page import ControlPage, Heartbeat
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


class FinishedRanks:
    """The ranks of a group whose training loops have ended, which others may still wait for.

    `names` say by rank what it is called in the run; None for "rank 0" and so on.
    """

    def __init__(self, heartbeats: Sequence[Heartbeat], names: Sequence[str] | None = None) -> None:
        self._heartbeats = heartbeats
        self.names = names or [f"rank {rank}" for rank in range(len(heartbeats))]

    def among(self, members: Sequence[int]) -> FinishedRanks:
        """Returns the same for some of the ranks, in order."""
        heartbeats = [self._heartbeats[member] for member in members]
        return FinishedRanks(heartbeats, [self.names[member] for member in members])

    @property
    def ended(self) -> list[int]:
        """The ranks whose loops have ended."""
        return [rank for rank, heartbeat in enumerate(self._heartbeats) if heartbeat.finished]

    def rounds(self, peer: int) -> int:
        """Returns after how many rounds a peer's loop has ended; -1 if it has not."""
        return self._heartbeats[peer].finished - 1

    def check(self, peer: int, rank: int, came: Callable[[], bool]) -> None:
        """Raises a UsageError if a peer's loop has ended, this rank's has not, and the peer has not come (`came`)."""
        # A peer writes its end after its last barrier, so `came` is asked after it.
        ended, waits = self._heartbeats[peer].finished, not self._heartbeats[rank].finished
        if ended and waits and not came():
            raise self.error(peer, self.names[rank])

    def error(self, peer: int, waiting: str) -> UsageError:
        """Returns the error of a rank that waits for a peer whose loop has ended."""
        return UsageError(
            f"the loop on {self.names[peer]} ended after {self.rounds(peer)} rounds and {waiting} "
            "still waits for it; a training loop must do the same rounds on every worker"
        )


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
