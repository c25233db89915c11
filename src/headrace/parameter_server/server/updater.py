"""What a server does with what is pushed to its shards: the base of the job's optimizer, and of vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.parameter_server.sparse.tables import ServedTables, TablesState


@dataclass(frozen=True)
class ShardOptimizerState:
    """The state besides tensors, as JSON values; `done` rounds by shard, `settings` as JSON text."""

    round: int
    done: tuple[float, ...]
    settings: str
    shows_average: bool
    tables: TablesState | None = None


class ShardUpdater(ABC):
    """Updates the parameters of one server's shards, which are numbered from 0.

    Attributes:
        tables: sparse ones, which are updated row by row; None if there are none.
        sums: whether it only sums what is pushed, so that nothing is stale.
        at_once: whether the shards of a round must be updated in one call.
    """

    tables: ServedTables | None = None
    sums: bool = False
    at_once: bool = False

    @abstractmethod
    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Makes these tensors, one for each shard, the parameters."""

    @abstractmethod
    def apply(
        self,
        gradients: Sequence[tuple[int, Tensor]],
        shards: Sequence[int],
        worker: int,
        share: float,
        staleness: int,
        steps: int = 1,
        lease: int = -1,
        weight: float = 0.0,
    ) -> None:
        """Applies one step to `shards`, also those without a gradient; `gradients` may be overwritten.

        The step is `worker`'s, or for -1 the mean of a round. It is the sum of as many gradients as `steps` says, each
        of which stands for `share` of a round, and is `staleness` updates behind. A step of one worker alone has the
        `lease` and the `weight` of its push.
        """

    @abstractmethod
    def settle(self, done: int) -> None:
        """Sets the number of rounds done, with those whose gradients were refused."""

    @abstractmethod
    def sent(self, worker: int, shards: Sequence[int] | None) -> None:
        """Records that a worker has received these shards' present parameters; None for one that has gone for good."""

    @abstractmethod
    def state(self, shard: int | None = None) -> bytes:
        """Returns a shard's state as safetensors, or the rest as JSON; raises ValueError if there is no such shard."""

    @abstractmethod
    def load(self, state: bytes, shard: int | None = None) -> None:
        """Loads a shard's state, with its parameters if it has them.

        Without a shard, drops all state, and loads the rest if given. Raises ValueError if this is no state.
        """

    @abstractmethod
    def all_state(self) -> tuple[ShardOptimizerState, dict[str, Tensor]]:
        """Returns the whole state except the parameters."""

    @abstractmethod
    def load_all(self, state: ShardOptimizerState, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the whole state; raises ValueError if it is of other shards, or not consistent."""

    @abstractmethod
    def swap_weights(self, averaged: bool) -> None:
        """Exchanges the parameters and their moving averages."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters, and of the optimizer's state."""
