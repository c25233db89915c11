"""What becomes of a worker's state where the members of a run change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.training.optimizer import StatePiece


class ElasticState(ABC):
    """What becomes of a worker's state where others are lost, join and leave."""

    @abstractmethod
    def regroup(self) -> None:
        """Goes on with the group's present members; every member calls it, between two rounds."""

    def keep(self) -> None:  # noqa: B027  (nothing, where each round counts by itself)
        """Copies what rounds change before they count, where that is all rounds until a synchronization."""

    def bring_back(self) -> None:  # noqa: B027
        """Restores what was kept: the rounds since then come again."""

    @abstractmethod
    def give(self) -> tuple[StatePiece, ...]:
        """Returns what one worker gives to those that join, after `regroup`, beside the model and the settings."""

    @abstractmethod
    def take(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any]) -> None:
        """Begins, on a worker that joins, with what another one's `give` and its exchange's settings returned."""
