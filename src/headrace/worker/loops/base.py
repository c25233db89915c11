"""The seam between a worker and its training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from headrace.spec.job import Share
from headrace.training.compute import Computed

Update = Callable[[Callable[[], object]], None]


def nothing() -> None:
    """Decides nothing, where each worker's own exchange counts."""


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step that was synchronized.

    Attributes:
        lease: number of its data lease; -1 where data is not leased.
        late: whether its gradient came too late to count; its data comes again.
        records: whether its loss and its examples count; a line search visits the same data several times.
        took_s: seconds of what the loop has synchronized after the update.
    """

    lease: int = -1
    late: bool = False
    records: bool = True
    took_s: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether its data was trained on now, and for the first time."""
        return self.records and not self.late


class Loop(ABC):
    """Where one worker gets its data, and where it synchronizes with the others; a context while the worker trains.

    Attributes:
        spoilt: whether a member was lost during the current round, so that it was not done, and comes again.
        reporter: the rank that reports a round which was not finite.
        moved_bytes: payload that went to and from other processes, beside that of collectives.
    """

    def __init__(self, reporter: int = 0) -> None:
        self.spoilt = False
        self.reporter = reporter
        self.moved_bytes = 0

    def __enter__(self) -> None:  # noqa: B027  (only leases have to begin)
        """Prepares the first step, when the replica is complete."""

    def __exit__(  # noqa: B027
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases what the loop holds of the machine, however the worker ends."""

    @abstractmethod
    def shares(self) -> Generator[Share, None, None]:
        """Yields this worker's data, step by step; saves and ends between two steps where that is due."""

    @abstractmethod
    def part(self, batch: Any) -> Share:
        """Returns a batch as the share that its loss is the mean over."""

    @property
    def at_sync_point(self) -> bool:
        """Whether all workers have done the same rounds, and every one is at this point."""
        return True

    def require_sync_point(self, what: str) -> None:  # noqa: B027  (workers in lockstep always are at one)
        """Raises UsageError where this worker is at no sync point; `what` needs one, "calls worker.evaluate()"."""

    def attempt(self, act: Callable[[], None]) -> bool:
        """Runs a part of a step; returns False if the round is spoilt."""
        act()
        return True

    @abstractmethod
    def complete(self, computed: Computed, update: Update) -> StepOutcome | None:
        """Ends a computed step; returns None if the round is spoilt.

        Args:
            update: synchronizes and updates; between the two it calls what it is given, which makes the sum count for
                all workers or for none.
        """

    def advance(self, outcome: StepOutcome) -> None:  # noqa: B027  (only leases are asked for)
        """Asks for the next data after a step, and blocks until it or a sync point is there."""

    def leave(self) -> bool:
        """Ends the loop; returns whether this worker stays to the end, and has not left the others earlier.

        Raises:
            UsageError: the loop ended where other workers wait for it.
        """
        return True

    def finish(self) -> None:  # noqa: B027  (all-reduced gradients leave nothing to do)
        """Gives this worker the trained model, when all loops have ended."""

    def end(self) -> None:  # noqa: B027
        """Releases the processes that served the loop; every worker calls it."""
