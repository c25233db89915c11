"""How far apart workers may be, and which of their gradients make an update: the two halves of staleness.

*Admission* says which workers may begin their next round; *combination* says which pushes make a step. A clock is a
worker's count of finished rounds. The three classical regimes:

    asynchronous           every push a step            no worker waits
    bounded by s           every push a step            clock <= slowest clock + s
    synchronous, N of      the first N of a round       a worker that has pushed waits
    N + b (b backup)       are one step, the others     for the round's end
                           are dropped
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


class Admission(ABC):
    """Says which workers may begin their next round.

    Attributes:
        waits: whether any worker ever waits; else the slowest need not be looked for, among 10,000 perhaps.
    """

    waits: ClassVar[bool] = True

    @abstractmethod
    def admits(self, clock: int, slowest: int) -> bool:
        """Returns whether a worker that has finished `clock` rounds may begin another, given the least clock of all."""


@dataclass(frozen=True)
class Unbounded(Admission):
    """No worker waits (asynchronous SGD)."""

    waits = False

    def admits(self, clock: int, slowest: int) -> bool:
        return True


@dataclass(frozen=True)
class Bounded(Admission):
    """No worker begins a round more than `bound` rounds ahead of the slowest worker's; 0 is lock-step.

    While a worker computes its round `clock`, counted from 0, `clock <= min(clocks) + bound`. So its parameters have
    all gradients of all workers' rounds 0 to `clock - bound - 1`, its own, and perhaps newer ones; with the bound 0,
    all of the rounds before. That bounds rounds, not updates: while one worker makes a round, N - 1 others may make `2
    * bound + 1` each.

    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013, section 3.
    """

    bound: int

    def admits(self, clock: int, slowest: int) -> bool:
        return clock <= slowest + self.bound


class Combination(ABC):
    """Says which pushes make a step."""

    @abstractmethod
    def needed(self, workers: int) -> int:
        """Returns how many pushes make a step of so many members; 0 if each push is one."""


@dataclass(frozen=True)
class EveryPush(Combination):
    """Every push is a step."""

    def needed(self, workers: int) -> int:
        return 0


@dataclass(frozen=True)
class AllMembers(Combination):
    """The pushes of all present members are one step."""

    def needed(self, workers: int) -> int:
        return workers


@dataclass(frozen=True)
class DecidedElsewhere(Combination):
    """Another server decides whose pushes are one step, so that a step has the same workers on all servers."""

    def needed(self, workers: int) -> int:
        return workers + 1


@dataclass(frozen=True)
class FirstPushes(Combination):
    """The first pushes of a round are one step; later ones are dropped.

    `count` are needed, or all members' if they are fewer.

    Chen et al., "Revisiting distributed synchronous SGD", 2016, section 3: N workers and b backup workers.
    """

    count: int

    def needed(self, workers: int) -> int:
        return min(self.count, workers)
