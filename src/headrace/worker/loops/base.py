"""The seam between a worker and its training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from headrace.spec.job import Share
from headrace.training.compute import Computed


def run(act: Callable[[], None]) -> bool:
    """Runs a part of a step, where no member is lost without ending the run."""
    act()
    return True


class Loop(ABC):
    """Where one worker gets its data, and where it synchronizes with the others; a context while the worker trains.

    Attributes:
        attempt: runs a part of a step; returns False if the round is spoilt.
        spoilt: whether a member was lost during the current round, so that it was not done, and comes again.
        lease: number of the data lease of the current step; -1 where data is not leased.
        late: whether the current step's gradient came too late to count; its data comes again.
        records: whether the current step's loss and examples count.
        reporter: the rank that reports a round which was not finite.
        commits: whether the exchange combines something in every round, for all workers or for none.
        moved_bytes: payload that went to and from other processes, beside that of collectives.
    """

    commits = False

    def __init__(self, reporter: int = 0) -> None:
        self.attempt: Callable[[Callable[[], None]], bool] = run
        self.spoilt = False
        self.lease = -1
        self.late = False
        self.records = True
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

    def weigh(self, computed: Computed) -> None:  # noqa: B027  (lockstep weights are known from the share)
        """Takes the current step's loss and its weight, before the exchange synchronizes."""

    def synchronize(self) -> float:
        """Synchronizes after the update where that is due; returns the seconds that it took."""
        return 0.0

    def advance(self) -> None:  # noqa: B027  (only leases are asked for)
        """Ends a step: asks for the next data, and blocks until it or a sync point is there."""

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
