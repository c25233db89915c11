"""Where workers that go on by themselves come together: they exchange what they have become, not every gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from headrace.training.state_piece import StatePiece


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


class PeriodicSync(ABC):
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
    def show(self, on: bool) -> None:
        """Lets the trained model stand where this worker's parameters do, or those again.

        Training goes on from there as if nobody had looked. All call it; to ask for what is so already changes nothing.
        """

    @abstractmethod
    def own(self) -> tuple[StatePiece, ...]:
        """Returns the state that is this worker's alone, and takes the place of the others' when it goes on."""
