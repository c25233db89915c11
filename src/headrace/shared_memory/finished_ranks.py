"""Ranks whose training loop has ended, which others may still wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import UsageError
from headrace.shared_memory.control_page import Heartbeat


class FinishedRanks:
    """Of the ranks of a group.

    Args:
        names: by rank, what it is called in the run; None for "rank 0" and so on.
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

    def check(self, peer: int, rank: int, came: Callable[[], bool]) -> None:
        """Refuses to wait for a peer whose loop has ended, unless it has come (`came`) before its end.

        Raises:
            UsageError: the peer's loop has ended, and this rank's has not.
        """
        # A peer writes its end after its last barrier, so `came` is asked after it.
        ended, waits = self._heartbeats[peer].finished, not self._heartbeats[rank].finished
        if ended and waits and not came():
            raise self.error(peer, self.names[rank])

    def error(self, peer: int, waiting: str) -> UsageError:
        """Returns the error of a rank that waits for a peer whose loop has ended."""
        return UsageError(
            f"the loop on {self.names[peer]} ended after {self._heartbeats[peer].finished - 1} rounds and {waiting} "
            "still waits for it; a training loop must do the same rounds on every worker"
        )
