"""The other two verbs: synchronize and update. The exchange owns the optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from headrace.replica.compute import Compute

__all__ = ["Exchange", "Replica", "StatePiece"]


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state, in a form that any other split of the parameters can take up.

    Attributes:
        parameter: name of the parameter that it belongs to.
        key: the optimizer's own, "momentum_buffer".
        start: first element of the flattened parameter that `value` covers; -1 if `value` belongs to the whole
            parameter (a step count, the statistics of its rows).
        value: flat; in its own shape where it belongs to the whole parameter.
    """

    parameter: str
    key: str
    start: int
    value: Tensor


class Exchange(ABC):
    """Brings the workers' gradients together and moves the parameters."""

    @abstractmethod
    def begin(self, round_: int) -> None:
        """Before compute: parameters are fetched and membership changes here, where a strategy has that."""

    @abstractmethod
    def synchronize(self) -> None:
        """After compute: every worker's contribution is brought to whoever updates."""

    @abstractmethod
    def update(self, round_: int) -> None:
        """Applies the optimizer. When it returns, the next round's compute may begin."""

    @abstractmethod
    def state(self) -> tuple[StatePiece, ...]:
        """Returns the optimizer state that this rank holds."""

    @abstractmethod
    def load(self, pieces: Iterable[StatePiece]) -> None:
        """Takes up what of `pieces` (all ranks' together) belongs to this rank."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters and of optimizer state that this rank adds to the host."""


@dataclass(frozen=True)
class Replica:
    """A model copy with its three verbs."""

    compute: Compute
    exchange: Exchange
