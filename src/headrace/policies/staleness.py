"""How far apart workers may be, and what of their gradients makes an update: the two halves of staleness.

*Admission* says who may begin its next round; *combination* says which pushes make a step. A clock is a worker's count
of finished rounds. The three classical regimes are points of this plane:

    asynchronous           every push a step            nobody waits
    bounded by s           every push a step            clock <= slowest clock + s
    synchronous, N of      the first N of a round       whoever has pushed waits for
    N + b (b backup)       are one step, the others     the round's end
                           are dropped
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Admission(ABC):
    """Says who may begin its next round."""

    @abstractmethod
    def admits(self, clock: int, slowest: int) -> bool:
        """Tells whether a worker that has finished `clock` rounds may begin another.

        Args:
            clock: its own.
            slowest: the least clock of all workers.
        """


@dataclass(frozen=True)
class Unbounded(Admission):
    """Nobody waits (asynchronous SGD)."""

    def admits(self, clock: int, slowest: int) -> bool:
        return True


@dataclass(frozen=True)
class Bounded(Admission):
    """Nobody begins a round more than `bound` rounds ahead of the one that the slowest is in.

    While a worker computes its round `clock`, counted from 0, `clock <= min(clocks) + bound`. So its parameters hold
    all gradients of everybody's rounds 0 to `clock - bound - 1`, its own, and perhaps newer ones; with the bound 0,
    all of the rounds before. That bounds rounds, not updates: while one worker makes a round, N - 1 others may make
    `2 * bound + 1` each.

    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", 2013, section 3.

    Attributes:
        bound: rounds, at least 0; 0 is lock-step.
    """

    bound: int

    def admits(self, clock: int, slowest: int) -> bool:
        return clock <= slowest + self.bound


class Combination(ABC):
    """Says which pushes make a step."""

    @abstractmethod
    def needed(self, workers: int) -> int:
        """Returns how many pushes make a step where so many workers are members; 0 if each is one."""


@dataclass(frozen=True)
class EveryPush(Combination):
    """Every push is a step."""

    def needed(self, workers: int) -> int:
        return 0


@dataclass(frozen=True)
class AllMembers(Combination):
    """The pushes of all members, however many there are by then, are one step."""

    def needed(self, workers: int) -> int:
        return workers


@dataclass(frozen=True)
class DecidedElsewhere(Combination):
    """Another server says whose pushes are one step, so that a step is of the same workers on all."""

    def needed(self, workers: int) -> int:
        return workers + 1


@dataclass(frozen=True)
class FirstPushes(Combination):
    """The first pushes of a round are one step, later ones are dropped.

    Chen et al., "Revisiting distributed synchronous SGD", 2016, section 3: N workers and b backup workers.

    Attributes:
        count: how many; as many as there are members, where those are fewer.
    """

    count: int

    def needed(self, workers: int) -> int:
        return min(self.count, workers)
