"""Collectives of threads of one process: for tests, for debuggers, and for a group of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup, add_in_order
from headrace.errors import PeerLost
from headrace.shared_memory.ends import FinishedRanks


class Turns:
    """Lets one of `world` threads run at a time, each until it waits for the others, always in the same order.

    `swap` is called with the rank that stops and the rank that goes on.
    """

    def __init__(self, world: int, swap: Callable[[int, int], None]) -> None:
        self._gates = [threading.Semaphore(rank == 0) for rank in range(world)]
        self._left = list(range(world))
        self._rank = 0
        self._swap = swap

    def begin(self, rank: int) -> None:
        """Waits for a thread's first turn."""
        self._gates[rank].acquire()

    def wait(self, until: Callable[[], bool]) -> None:
        """Lets the others run until something holds."""
        while not until():
            self.pause()

    def pause(self) -> None:
        """Lets each of the others run once."""
        rank = self._rank
        following = self._after(rank)
        if following != rank:
            self._go_on(following)
            self._gates[rank].acquire()

    def end(self) -> None:
        """Ends the running thread's turns."""
        rank = self._rank
        following = self._after(rank)
        self._left.remove(rank)
        if following != rank:
            self._go_on(following)

    def _go_on(self, rank: int) -> None:
        self._swap(self._rank, rank)
        self._rank = rank
        self._gates[rank].release()

    def _after(self, rank: int) -> int:
        place = self._left.index(rank) + 1
        return self._left[place % len(self._left)]


class _TurnBarrier:
    """A `threading.Barrier` of threads that run in turns."""

    def __init__(self, parties: int, turns: Turns) -> None:
        self.n_waiting = 0
        self.broken = False
        self._parties, self._turns, self._passed = parties, turns, 0

    def wait(self) -> None:
        number = self._passed
        self.n_waiting += 1
        if self.n_waiting == self._parties:
            self.n_waiting = 0
            self._passed += 1
        self._turns.wait(lambda: self.broken or self._passed > number)
        if self.broken:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        self.broken = True


@dataclass
class _Endless:
    """The loop of a thread that ends together with the others."""

    finished: int = 0


class ThreadGroup:
    """What the `world` threads of a group share; `ends` tells which loops have ended, None if they end together.

    With `turns`, one thread runs at a time.
    """

    def __init__(self, world: int, ends: FinishedRanks | None = None, turns: Turns | None = None) -> None:
        self.world = world
        self.ends = ends or FinishedRanks([_Endless()] * world)
        self.offers: list[object] = [None] * world
        self.turns = turns
        self.barrier = _TurnBarrier(world, turns) if turns else threading.Barrier(world)
        self.lost = -1
        self.inner: list[ThreadGroup] = []

    def abort(self, rank: int) -> None:
        """Ends all waits, because `rank` has failed."""
        if self.lost < 0:
            self.lost = rank
        self.barrier.abort()
        for group in self.inner:
            group.abort(rank)

    def check_parted(self) -> None:
        """Raises a UsageError if threads wait for others whose loops have ended."""
        ended, waiting = self.ends.ended, self.barrier.n_waiting
        if ended and waiting and len(ended) + waiting == self.world:
            raise self.ends.error(ended[0], "another rank")
        for group in self.inner:
            group.check_parted()


class ThreadCollective(ProcessGroup):
    """One thread's collectives; `shared` is the same object for all threads."""

    def __init__(self, shared: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world = shared.world
        self.ends = shared.ends
        self._shared = shared
        self.groups: list[ThreadCollective] = []

    def subgroup(self, members: Sequence[int]) -> ThreadCollective:
        first = self.rank == members[0]
        own = ThreadGroup(len(members), self.ends.among(members), self._shared.turns) if first else None
        group: ThreadGroup = self._exchange(own)[members[0]]
        if first:
            self._shared.inner.append(group)
        # A thread that fails from here on aborts it, too.
        self.barrier()
        self.groups.append(ThreadCollective(group, list(members).index(self.rank)))
        return self.groups[-1]

    def barrier(self) -> None:
        if self.world == 1:
            return
        try:
            self._shared.barrier.wait()
        except threading.BrokenBarrierError:
            raise self._lost() from None

    def check(self, peer: int | None = None, broken: str = "") -> None:
        if self._shared.turns:
            self._shared.turns.pause()
        if self._shared.barrier.broken:
            raise self._lost()

    def all_reduce(self, tensor: Tensor) -> None:
        if self.world == 1:
            return
        every: list[Tensor] = self._exchange(tensor)
        total = every[0].clone()
        for other in every[1:]:
            total += other
        self.barrier()
        tensor.copy_(total)
        self.moved_bytes += 2 * tensor.nbytes

    def broadcast(self, tensor: Tensor) -> None:
        first: Tensor = self._exchange(tensor)[0]
        if self.rank != 0:
            tensor.copy_(first)
        self.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        if self.world == 1:
            return list(values)
        every: list[Sequence[float]] = self._exchange(values)
        totals = [add_in_order(row) for row in zip(*every, strict=True)]
        self.barrier()
        return totals

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        regions: list[Tensor] = self._exchange(torch.zeros(nbytes, dtype=torch.uint8))
        self.barrier()
        return tuple(regions)

    def close(self) -> None:
        """Releases nothing."""

    def _lost(self) -> PeerLost:
        return PeerLost(self._shared.lost, "this process", "its thread has failed")

    def _exchange(self, value: object) -> list:  # type: ignore[type-arg]
        self._shared.offers[self.rank] = value
        self.barrier()
        return list(self._shared.offers)
