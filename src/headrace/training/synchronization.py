"""Where a worker's data comes from under strategies whose workers do not go in step: portions, leased on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.training.optimizer_state import StatePiece


@dataclass(frozen=True)
class SyncResult:
    """What came of a meeting.

    Attributes:
        rounds: since the one before.
        period: rounds until the next.
        why: that many, in words.
        drift: the largest distance of a worker's parameters from their mean, over the norm of the mean.
        left_out: ranks whose parameters were not finite: the mean is the others', and they go on from it.
        number: of the meeting, where each worker tells of itself alone: the drift is its own.
        took_s: how long, there.
    """

    rounds: int
    period: int
    why: str
    drift: float
    left_out: tuple[int, ...]
    number: int = 0
    took_s: float = 0.0


class SwappableWeights(ABC):
    """Weights that averaged ones can replace: moving averages, or the mean of workers that step on their own."""

    @abstractmethod
    def swap_weights(self, averaged: bool) -> None:
        """Puts the averaged weights in the parameters' place, or the parameters back.

        Every rank calls it. A call that asks for what is already there changes nothing. Training goes on from the
        parameters as if they had never been replaced.
        """

    @contextmanager
    def swapped_weights(self) -> Iterator[None]:
        """Runs its body with the averaged weights in the parameters' place; every rank enters and leaves it.

        If the body raises, the averaged weights stay, because other ranks may be gone, and the next entry takes over.
        """
        self.swap_weights(averaged=True)
        yield
        self.swap_weights(averaged=False)

    def adopt_averaged_weights(self) -> None:
        """Leaves the averaged weights in the parameters' place, at the end of a run; every rank calls it."""
        self.swap_weights(averaged=True)


class PeriodicSync(SwappableWeights):
    """One worker's part in the run's meetings; every worker calls the same verbs after the same rounds."""

    @abstractmethod
    def coming(self, done: int) -> int:
        """Returns how many rounds are done at the first meeting that is not before `done` of them."""

    @abstractmethod
    def weigh(self, weight: float) -> None:
        """Says what this worker's part of a round is worth: its examples, or what else its loss counts by."""

    @abstractmethod
    def meet(self, done: int) -> SyncResult:
        """Brings the workers together, after so many rounds.

        Raises:
            RunFailed: no worker has finite parameters.
        """

    @abstractmethod
    def end(self, done: int) -> SyncResult | None:
        """Meets a last time, where the trained model is not yet what this worker has; None where that is not needed."""

    @abstractmethod
    def own(self) -> tuple[StatePiece, ...]:
        """Returns the state that is this worker's alone, and takes the place of the others' when it goes on."""


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
