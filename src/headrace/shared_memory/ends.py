"""Which ranks' training loops have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from headrace.errors import UsageError

_ON_THE_WAY_S = 5.0


class LoopEnd(Protocol):
    """Where a rank writes that its loop has ended: 1 + the rounds done; 0 before."""

    finished: int


class FinishedRanks:
    """The ranks of a group whose training loops have ended, which others may still wait for.

    `names` say by rank what it is called in the run; None for "rank 0" and so on.
    """

    def __init__(self, heartbeats: Sequence[LoopEnd], names: Sequence[str] | None = None) -> None:
        self._heartbeats = heartbeats
        self.names = names or [f"rank {rank}" for rank in range(len(heartbeats))]
        self._seen_ended_s: dict[int, float] = {}

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

    def check_far(self, peer: int, rank: int) -> None:
        """Does the same for a peer on another host: what it sent before its loop ended may still be on the way."""
        self.check(peer, rank, lambda: monotonic() - self._seen_ended_s.setdefault(peer, monotonic()) < _ON_THE_WAY_S)

    def error(self, peer: int, waiting: str) -> UsageError:
        """Returns the error of a rank that waits for a peer whose loop has ended."""
        return UsageError(
            f"the loop on {self.names[peer]} ended after {self.rounds(peer)} rounds and {waiting} "
            "still waits for it; a training loop must do the same rounds on every worker"
        )
