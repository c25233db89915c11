"""Workers with parameters of their own: each makes the steps of its own optimizer, and a synchronization joins them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headrace.averaging.proximal import ProximalTerm
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Exchange, UpdatingExchange
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import PeriodicSync


class LocalStepsSync(PeriodicSync):
    """Synchronizes workers with parameters of their own.

    Attributes:
        worth: the weight of this worker's part of the last round; 0 where it had no example.
        kept_bytes: what it adds to the host beside parameters and the state of the worker's own optimizer.
    """

    worth: float = 0.0
    kept_bytes: int = 0

    def adjust(self, round_: int, updated: bool) -> None:
        """Changes the parameters before the update of a round, and again when it is `updated`, or left out.

        Every worker calls it twice in every round.
        """

    def kept(self) -> tuple[StatePiece, ...]:
        """Returns the state that all workers have in common, except the parameters."""
        return ()

    def settings(self) -> dict[str, Any]:
        """Returns the rest of that state as JSON values, under a key of its own."""
        return {}

    @abstractmethod
    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        """Loads what `own`, `kept` and `settings` returned; a run under another strategy has saved none of it.

        The parameters and the optimizer's state are loaded already. Every worker calls it.
        """


class LocalStepsExchange(Exchange):
    """The step of a worker's own optimizer, with the state of what synchronizes it with the others."""

    def __init__(self, local: UpdatingExchange, sync: LocalStepsSync, proximal: ProximalTerm | None = None) -> None:
        self._local = local
        self._sync = sync
        self._proximal = proximal
        self.defers = local.defers
        self.state_keys = (*local.state_keys, *sync.state_keys)
        self.updater = local.updater
        self.learning_rates, self.scale_rates = local.learning_rates, local.scale_rates

    def begin(self, round_: int) -> None:
        self._local.begin(round_)

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        # A worker that had no example has no loss to add to.
        if self._proximal and self._sync.worth:
            self._proximal.add()
        return self._local.synchronize(finite)

    def update(self, round_: int) -> None:
        self._sync.adjust(round_, updated=False)
        # A worker that had no example has no gradient, and makes no step.
        if self._sync.worth:
            self._local.update(round_)
        else:
            self._local.skip(round_)
        self._sync.adjust(round_, updated=True)

    def skip(self, round_: int) -> None:
        # The others may synchronize in this round, and wait for this worker.
        self._sync.adjust(round_, updated=False)
        self._local.skip(round_)
        self._sync.adjust(round_, updated=True)

    def swap_weights(self, averaged: bool) -> None:
        self._local.swap_weights(averaged)

    def state(self) -> tuple[StatePiece, ...]:
        return (*self._local.state(), *self._sync.kept())

    def own(self) -> tuple[StatePiece, ...]:
        return self._local.own()

    def settings(self) -> dict[str, Any]:
        ours = self._sync.settings()
        return {**self._local.settings(), **ours} if isinstance(ours, Mapping) else ours

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = tuple(pieces)
        self._local.load((piece for piece in every if piece.key not in self._sync.state_keys), settings)
        self._sync.load(every, settings)

    def memory(self) -> tuple[int, int]:
        parameters, state = self._local.memory()
        return parameters, state + self._sync.kept_bytes + (self._proximal.nbytes if self._proximal else 0)
