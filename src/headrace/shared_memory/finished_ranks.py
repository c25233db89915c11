"""Whose loop has ended, while others still wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import UsageError


class FinishedRanks:
    """Of the ranks of a group.

    Args:
        marks: by rank, a view of length 1: 1 + the rounds that a loop which has ended did; 0 before.
        names: by rank, what it is called in the run; None for "rank 0" and so on.

    Attributes:
        names: see there.
    """

    def __init__(self, marks: Sequence[Sequence[int] | memoryview], names: Sequence[str] | None = None) -> None:
        self._marks = marks
        self.names = names or [f"rank {rank}" for rank in range(len(marks))]

    def among(self, members: Sequence[int]) -> FinishedRanks:
        """Returns those of some ranks, in order."""
        return FinishedRanks([self._marks[member] for member in members], [self.names[member] for member in members])

    @property
    def ended(self) -> list[int]:
        """The ranks whose loops have ended."""
        return [rank for rank, mark in enumerate(self._marks) if mark[0]]

    def check(self, peer: int, rank: int, came: Callable[[], bool]) -> None:
        """Looks whether a peer's loop has ended, while this rank's still waits for it.

        Args:
            peer: who is waited for.
            rank: this process's.
            came: whether the peer has come after all.

        Raises:
            UsageError: so it is.
        """
        # Its end was written after its last coming, so that tells which of the two it was.
        if self._marks[peer][0] and not self._marks[rank][0] and not came():
            raise self.error(peer, self.names[rank])

    def error(self, peer: int, waiting: str) -> UsageError:
        """Returns what to raise where somebody waits for a peer whose loop has ended."""
        return UsageError(
            f"the loop on {self.names[peer]} ended after {self._marks[peer][0] - 1} rounds and {waiting} still waits "
            "for it; a training loop must do the same rounds on every worker"
        )
