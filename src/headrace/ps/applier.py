"""What a server does with gradients: the seam between who holds parameters and who knows how to move them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

__all__ = ["Applier"]


class Applier(ABC):
    """Moves the parameters that a server holds. Shards are numbered as on that server, from 0."""

    @abstractmethod
    def seat(self, tensors: Sequence[Tensor]) -> None:
        """Takes the places of all parameters: from now on they live there.

        Args:
            tensors: one a shard, in its shape and type.
        """

    @abstractmethod
    def apply(self, gradients: Sequence[tuple[int, Tensor]], worker: int, share: float, staleness: int) -> None:
        """Makes one step with some shards' gradients.

        Args:
            gradients: a shard and its gradient, in its shape and type. It may be scaled, and is not needed after.
            worker: who made it; -1 where it is a round's.
            share: of a round that it stands for.
            staleness: updates that it is behind.
        """

    @abstractmethod
    def sent(self, worker: int, shards: Sequence[int]) -> None:
        """Is told that a worker now goes on from these shards' parameters as they are."""

    @abstractmethod
    def state(self, shard: int) -> bytes:
        """Returns a shard's parameters' state as safetensors."""

    @abstractmethod
    def load(self, shard: int, state: bytes) -> None:
        """Takes up what `state` returned, or another parameters' worth of it.

        Raises:
            ValueError: it is no such thing.
        """

    @abstractmethod
    def settings(self) -> str:
        """Returns the state that belongs to no shard, as JSON."""

    @abstractmethod
    def configure(self, settings: str) -> None:
        """Takes up what `settings` returned."""

    @abstractmethod
    def swap_average(self) -> None:
        """Lets parameters and their moving averages change places."""
