"""The seam between a worker and its training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from headrace.spec.share import Share
from headrace.training.exchange import StatePiece


class Loop(ABC):
    """Where one worker gets its data, and where it synchronizes with the others.

    Attributes:
        lease: number of the data lease of the current step; -1 where data is not leased.
        late: whether the current step's gradient came too late to count; its data comes again.
        reporter: the rank that reports a round which was not finite.
    """

    lease: int = -1
    late: bool = False
    reporter: int = 0

    @abstractmethod
    def shares(self) -> Iterator[Share]:
        """Yields this worker's data, step by step; saves and ends between two steps where that is due."""

    @abstractmethod
    def part(self, batch: Any) -> Share:
        """Returns a batch as the share that its loss is the mean over."""

    @property
    def at_sync_point(self) -> bool:
        """Whether all workers have done the same rounds, and every one of them is here."""
        return True

    def require_sync_point(self, what: str) -> None:  # noqa: B027  (workers in lockstep always are at one)
        """Refuses what all workers must do together where they are not together.

        Args:
            what: "calls worker.evaluate()".

        Raises:
            UsageError: this worker is at no sync point.
        """

    def begin(self) -> None:  # noqa: B027  (only leases have to begin)
        """Prepares the first step, when the replica is complete."""

    def weigh(self, weight: float) -> None:  # noqa: B027  (lockstep weights are known from the share)
        """Is told the weight of the current step's loss, before the exchange synchronizes."""

    def synchronize(self) -> float:
        """Synchronizes after the update where that is due; returns the seconds that it took."""
        return 0.0

    def advance(self) -> None:  # noqa: B027  (only leases are asked for)
        """Ends a step: asks for the next data, and blocks until it or a sync point is there."""

    def agree(self) -> None:  # noqa: B027  (workers in lockstep have seen the same)
        """Brings what workers know of earlier evaluations to those that joined later."""

    def trained_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the weights that the run would leave now."""
        return nullcontext()

    def own_state(self) -> tuple[StatePiece, ...]:
        """Returns the state that belongs to this worker alone."""
        return ()

    def leave(self) -> bool:
        """Ends the loop; returns whether this worker meets the others now, and did not leave them earlier.

        Raises:
            UsageError: the loop ended where other workers wait for it.
        """
        return True

    def finish(self) -> None:  # noqa: B027  (gradients that were all-reduced leave nothing to do)
        """Gives this worker the trained model, when all loops have ended."""

    def adopt_trained_weights(self) -> None:  # noqa: B027
        """Leaves the trained weights in the model, after the last checkpoint."""

    def end(self) -> None:  # noqa: B027
        """Releases the processes that served the loop; every worker calls it."""

    def close(self) -> None:  # noqa: B027
        """Releases what the loop holds of the machine, however the worker ends."""

    @property
    def moved_bytes(self) -> int:
        """Payload that went to and from other processes, beside that of collectives."""
        return 0
