"""Where a worker's data comes from under strategies whose workers do not go in step: portions, leased on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from headrace.training.periodic_sync import SyncResult


@dataclass(frozen=True)
class Lease:
    """A piece of an epoch that is this worker's now.

    Attributes:
        round: which global batch it is of, counted over the whole run.
        part: which part of that batch.
        parts: of which the batch has so many.
        rounds: how many rounds it goes on for, with the same part of each.
        lease: its number.
    """

    round: int
    part: int
    parts: int
    rounds: int
    lease: int


@dataclass(frozen=True)
class SyncPoint:
    """Everything in front of a round is done, by all workers; here they meet.

    Attributes:
        round: rounds that are done.
        meeting: how many meetings there were in the run, this one counted.
        members: rank and incarnation of all who meet; the first leads.
    """

    round: int
    meeting: int
    members: tuple[tuple[int, int], ...]


class DataLeases(ABC):
    """Leases of data, one at a time.

    Attributes:
        moved_bytes: payload that went to and from whoever holds the parameters.
        late: whether the gradient of the last portion came too late to count; the portion comes again.
        meeting: what came of the meeting at the end of the last portion, if there was one; whoever reads it clears it.
    """

    moved_bytes: int
    late: bool
    meeting: SyncResult | None = None

    @abstractmethod
    def begin(self) -> None:
        """Waits until there are parameters to begin with, and fetches them; rank 0 has brought them by now."""

    @abstractmethod
    def ask(self, leaves: bool = False) -> None:
        """Asks for the next portion; the one before is done, or given back where its gradient came too late.

        Args:
            leaves: ask for nothing, because this worker leaves while others go on.
        """

    @abstractmethod
    def next(self) -> Lease | SyncPoint:
        """Waits for what was asked for."""

    @abstractmethod
    def weigh(self, weight: float, share: float) -> None:
        """Says what the gradient of the portion is worth, before it is pushed.

        Args:
            weight: in the mean of its round: its examples, or what else its loss counts by; 0 if it has none.
            share: of the round's examples.
        """

    @abstractmethod
    def halt(self) -> None:
        """Asks for a fence as soon as the rounds that have been begun are done."""

    @abstractmethod
    def advance(self, done: int, until: int) -> None:
        """Goes on behind a fence, when all have met; all say so, because nobody knows who lives long enough.

        Args:
            done: rounds that are done.
            until: the next fence.
        """

    @abstractmethod
    def renew(self) -> None:
        """Brings this worker's parameters up to date, where all meet."""

    @abstractmethod
    def end(self) -> None:
        """Ends whoever leases, when the run is over; all who meet at its end do, and the first has done it."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of them."""
