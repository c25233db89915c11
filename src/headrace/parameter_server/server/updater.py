"""What a server does with what is pushed to its shards: the base of the job's optimizer, and of vectors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headrace.checkpoint.forms import pack, unpack
from headrace.parameter_server.sparse.tables import ServedTables, TablesState
from headrace.parameter_server.wire import ShardLayout
from headrace.training.optimizer import StatePiece

MeanOf = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
"""Takes each worker's value of some elements and the weights, and returns their mean."""


class StepFailed(Exception):
    """The job's optimizer has raised `error`, which is no worker's fault: it ends the server, and no connection."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class PushedStep:
    """What a server's step is made of: one worker's push, or the mean of a round for worker -1.

    It is the sum of as many gradients as `steps` says, each of which stands for `share` of a round, and is `staleness`
    updates behind. A step of one worker alone has the `lease` and the `weight` of its push.
    """

    worker: int
    share: float
    staleness: int = 0
    steps: int = 1
    lease: int = -1
    weight: float = 0.0


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
        mean: what the mean of a round's gradients is; None for that weighted by what they weigh.
    """

    tables: ServedTables | None = None
    sums: bool = False
    at_once: bool = False
    mean: MeanOf | None = None

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout

    @abstractmethod
    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Makes these tensors, one for each shard, the parameters."""

    @abstractmethod
    def apply(self, gradients: Sequence[tuple[int, Tensor]], shards: Sequence[int], step: PushedStep) -> None:
        """Applies one step to `shards`, also those without a gradient; `gradients` may be overwritten."""

    def settle(self, done: int) -> None:  # noqa: B027  (some do not count rounds)
        """Sets the number of rounds done, with those whose gradients were refused."""

    def sent(self, worker: int, shards: Sequence[int] | None) -> None:  # noqa: B027  (most keep no copies)
        """Records that a worker has received these shards' present parameters; None for one that has gone for good."""

    def state(self, shard: int | None = None) -> bytes:
        """Returns a shard's state as safetensors, or the rest as JSON; raises ValueError if there is no such shard."""
        if shard is None:
            return json.dumps(self._settings()).encode()
        self._require(shard)
        return pack({piece.name: piece.value for piece in self._pieces(shard)})

    def load(self, state: bytes, shard: int | None = None) -> None:
        """Loads a shard's state, with its parameters if it has them.

        Without a shard, drops all state, and loads the rest if given. Raises ValueError if this is no state.
        """
        try:
            if shard is None:
                self._load_settings(json.loads(state) if state else None)
                return
            self._require(shard)
            self._load_pieces([StatePiece.parse(name, value) for name, value in unpack(state).items()], shard)
        except Exception as error:
            raise ValueError(f"no state of a shard: {error}") from error

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Returns the state that is of no shard, as JSON values."""

    @abstractmethod
    def _load_settings(self, settings: dict[str, Any] | None) -> None:
        """Drops all state, and loads what `_settings` returned if it is given."""

    @abstractmethod
    def _pieces(self, shard: int) -> Iterable[StatePiece]:
        """Returns a shard's state, which is not copied."""

    @abstractmethod
    def _load_pieces(self, pieces: Sequence[StatePiece], shard: int) -> None:
        """Loads a shard's state, with its parameters if they are among the pieces."""

    @abstractmethod
    def all_state(self) -> tuple[ShardOptimizerState, dict[str, Tensor]]:
        """Returns the whole state except the parameters."""

    @abstractmethod
    def load_all(self, state: ShardOptimizerState, tensors: Mapping[str, Tensor]) -> None:
        """Takes over the whole state; raises ValueError if it is of other shards, or not consistent."""

    def swap_weights(self, averaged: bool) -> None:  # noqa: B027  (some have no averages)
        """Exchanges the parameters and their moving averages."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters, and of the optimizer's state."""

    def _require(self, shard: int) -> None:
        if not 0 <= shard < len(self._layout):
            raise ValueError(f"there is no shard {shard}, only {len(self._layout)}")
