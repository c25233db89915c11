"""Who computes which portion of the data: a state machine without clocks and sockets.

A round is cut into as many portions as make up a global batch; a lease is one of them, given to one worker. One lease
is one push. It is committed when every shard has that push, and only then is the portion done; what was refused or
lost is given out again.

    portions   | 0,0  0,1 | 1,0  1,1 | 2,0  2,1 ║        ║ the fence: nobody gets a portion behind it
    worker 0     ═══        ═══        ═══      ║        before all that lie in front are committed
    worker 1          ═════════════       ══════║

At a fence the workers meet: to evaluate, to save, to end.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

__all__ = ["Advance", "Answer", "Ask", "Commit", "Event", "Fence", "Grant", "Halt", "Leases", "Lost", "Return"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker wants a portion; it has none."""

    worker: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard has the push of a lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class Return:
    """The push of a lease was refused; its portion is free again."""

    lease: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone; what it held and no shard has is free again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Halt:
    """The next fence shall come as soon as the rounds that have been begun are done."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The workers have met; on, to the next fence.

    Attributes:
        until: rounds that lie in front of it.
    """

    until: int


Event = Ask | Commit | Return | Lost | Halt | Advance


@dataclass(frozen=True, slots=True)
class Grant:
    """A worker computes a portion.

    Attributes:
        worker: who.
        lease: its number in the run, `round * portions + part`.
        round: which global batch.
        part: which portion of it.
    """

    worker: int
    lease: int
    round: int
    part: int


@dataclass(frozen=True, slots=True)
class Fence:
    """A worker meets the others; `round` rounds are done."""

    worker: int
    round: int


Answer = Grant | Fence


class Leases:
    """The portions of a run.

    Args:
        portions: of a round.
        until: rounds in front of the first fence.
        first: the round to begin with.
        fixed: whether worker `w` gets portion `w` of every round, so that all do the same number of rounds; else
            whoever asks gets the next.

    Attributes:
        until: rounds in front of the next fence.
    """

    def __init__(self, portions: int, until: int, first: int = 0, fixed: bool = False) -> None:
        self.until = until
        self._portions = portions
        self._fixed = fixed
        self._free: list[int] = []
        self._next = [first * portions + part for part in range(portions)] if fixed else [first * portions]
        self._held: dict[int, int] = {}
        self._asking: list[int] = []
        self._met: set[int] = set()

    def handle(self, event: Event) -> list[Answer]:
        """Returns what the workers are told."""
        if isinstance(event, Ask):
            if event.worker not in self._asking:
                self._asking.append(event.worker)
        elif isinstance(event, Commit):
            self._held.pop(event.lease, None)
        elif isinstance(event, Return):
            self._release([event.lease])
        elif isinstance(event, Lost):
            self._release([lease for lease, worker in self._held.items() if worker == event.worker])
            self._asking = [worker for worker in self._asking if worker != event.worker]
        elif isinstance(event, Halt):
            self.until = min(self.until, -(-self._begun() // self._portions))
        else:
            self.until = event.until
            self._met.clear()
        return self._answer()

    def _begun(self) -> int:
        """Returns one more than the last portion that was given out."""
        step = self._portions if self._fixed else 1
        return max(lease - step + 1 for lease in self._next)

    def _release(self, leases: list[int]) -> None:
        for lease in leases:
            if self._held.pop(lease, None) is not None:
                heapq.heappush(self._free, lease)

    def _answer(self) -> list[Answer]:
        answers: list[Answer] = []
        for worker in self._asking[:]:
            if worker in self._met:
                continue
            lease = self._take(worker)
            if lease is not None:
                self._held[lease] = worker
                answers.append(Grant(worker, lease, *divmod(lease, self._portions)))
            elif not self._held and not self._left():
                self._met.add(worker)
                answers.append(Fence(worker, self.until))
            else:
                continue
            self._asking.remove(worker)
        return answers

    def _take(self, worker: int) -> int | None:
        if self._free:
            return heapq.heappop(self._free)
        index = worker if self._fixed else 0
        lease = self._next[index]
        if lease >= self.until * self._portions:
            return None
        self._next[index] += self._portions if self._fixed else 1
        return lease

    def _left(self) -> bool:
        return bool(self._free) or any(lease < self.until * self._portions for lease in self._next)
