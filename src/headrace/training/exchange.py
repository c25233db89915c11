"""The other two verbs: synchronize and update. The exchange owns the optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.training.clipping import StepDecision
from headrace.training.compute import Compute
from headrace.training.optimizer_state import StatePiece
from headrace.training.synchronization import DataLeases, PeriodicSync, SwappableWeights


class Exchange(SwappableWeights):
    """Brings the workers' gradients together and moves the parameters."""

    @abstractmethod
    def begin(self, round_: int) -> None:
        """Before compute: parameters are fetched and membership changes here, where a strategy has that."""

    @abstractmethod
    def synchronize(self, finite: bool = True) -> StepDecision:
        """After compute: every worker's contribution is brought to whoever updates, and looked at.

        Args:
            finite: whether this worker's loss is.

        Returns:
            Whether to update: the same on all workers.
        """

    @abstractmethod
    def update(self, round_: int) -> None:
        """Applies the optimizer. When it returns, the next round's compute may begin."""

    @abstractmethod
    def skip(self, round_: int) -> None:
        """Ends a round without an update."""

    @abstractmethod
    def state(self) -> tuple[StatePiece, ...]:
        """Returns the optimizer state that this rank holds."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns the rest of the state, the same on every rank, as JSON values: groups, schedule, loss scale."""

    @abstractmethod
    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        """Takes up what of `pieces` (all ranks' together) belongs to this rank, and the settings if given.

        Every rank calls it.
        """

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters and of optimizer state that this rank adds to the host."""


@dataclass(frozen=True)
class Replica:
    """A model copy with its three verbs.

    Attributes:
        compute, exchange: the verbs.
        portions: where the worker gets its data, under strategies whose workers do not go in step; None where round
            follows round on all of them.
        meetings: where the workers come together, under strategies whose workers go on by themselves between them.
    """

    compute: Compute
    exchange: Exchange
    portions: DataLeases | None = None
    meetings: PeriodicSync | None = None
