"""The other two verbs of a step, synchronize and update: an exchange, which owns the optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headrace.training.clipping import StepDecision
from headrace.training.compute import Compute
from headrace.training.optimizer import StatePiece, StateSlices
from headrace.training.synchronization import DataLeases, ElasticState, PeriodicSync, SwappableWeights
from headrace.training.update import Updater

if TYPE_CHECKING:
    from headrace.spec.events import TableReads


class Exchange(SwappableWeights):
    """Combines the workers' gradients and updates the parameters.

    Attributes:
        pulled: versions of the servers' parameters that this worker took over at the begin of the round, as of
            `Stepped`; () without servers.
        keeps_writes: whether what user code writes to this worker's parameters between rounds stays.
        gradient_bytes: that this rank keeps for the sum of gradients, which may be in `.grad`.
        defers: whether decisions stay on the device, and are read later.
        updater: with the optimizer; None where that is not in this process.
        state_keys: keys of the pieces of its own that `state` and `own` return, which are not given to the optimizer.
    """

    defers: bool = False
    updater: Updater | None = None
    state_keys: tuple[str, ...] = ()
    pulled: tuple[int, ...] = ()
    keeps_writes: bool = True
    gradient_bytes: int = 0

    @abstractmethod
    def begin(self, round_: int) -> None:
        """Prepares a round before compute: some strategies fetch parameters or change the members here."""

    @abstractmethod
    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        """Combines the gradients of all workers after compute, and decides whether to update: the same on all.

        `finite` says whether this worker's loss is; where it is `()` bool on the device, an exchange that `defers`
        leaves its decision there, too, and `update` follows it.
        """

    @abstractmethod
    def update(self, round_: int) -> None:
        """Applies the optimizer. When it returns, the next round's compute may begin."""

    @abstractmethod
    def skip(self, round_: int) -> None:
        """Ends a round without an update."""

    @abstractmethod
    def state(self) -> Iterable[StatePiece]:
        """Returns the optimizer state that this rank holds; rows of tables are read block by block as it is taken."""

    def own(self) -> tuple[StatePiece, ...]:
        """Returns the state that belongs to this worker alone."""
        return ()

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns the rest of the state, the same on every rank, as JSON values: groups, schedule, loss scale."""

    @abstractmethod
    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        """Loads what of `pieces` (all ranks' together) belongs to this rank, and the settings if given.

        Every rank calls it.
        """

    def row_reads(self) -> tuple[TableReads, ...]:
        """Returns what this worker has read of tables, where it keeps rows near; () elsewhere."""
        return ()

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters and of optimizer state that this rank adds to the host."""


class UpdatingExchange(Exchange):
    """An exchange whose rank itself updates the parameters that it owns.

    Its updater holds the parameters that it owns, or pieces of them; `parameter_bytes` is what it adds to the host.
    """

    updater: Updater
    parameter_bytes: int

    def begin(self, round_: int) -> None:
        """The parameters are up to date since the last update."""

    def update(self, round_: int) -> None:
        self.updater.step(round_)

    def skip(self, round_: int) -> None:
        self.updater.skip(round_)

    def swap_weights(self, averaged: bool) -> None:
        self.updater.swap_weights(averaged)

    def state(self) -> tuple[StatePiece, ...]:
        return self.updater.state()

    def settings(self) -> dict[str, Any]:
        return self.updater.settings()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self.updater.load((piece for piece in pieces if piece.key not in self.state_keys), settings)

    def scale_rates(self, factor: float) -> None:
        self.updater.schedule.factor = factor

    def learning_rates(self) -> Mapping[str, Any]:
        return {f"learning_rate/{i}" if i else "learning_rate": x for i, x in enumerate(self.updater.schedule.used)}

    def memory(self) -> tuple[int, int]:
        return self.parameter_bytes, self.updater.state_bytes()


@dataclass(frozen=True)
class Replica:
    """A model copy with its three verbs.

    Attributes:
        compute, exchange: the verbs.
        sync: what the training loop needs beside the exchange: the data leases of workers that do not go in lockstep,
            or the periodic synchronization of workers that take local steps; None for lockstep.
        slices: where this rank holds slices of parameters, and whole ones are saved and loaded; else None.
        elastic: None where the workers stay the same.
    """

    compute: Compute
    exchange: Exchange
    sync: DataLeases | PeriodicSync | None = None
    slices: StateSlices | None = None
    elastic: ElasticState | None = None

    def trained_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the weights that the run would leave now; every worker enters it."""
        return self.sync.swapped_weights() if isinstance(self.sync, PeriodicSync) else nullcontext()

    def adopt_trained_weights(self) -> None:
        """Leaves them in the model, at the end of the run."""
        if isinstance(self.sync, PeriodicSync):
            self.sync.adopt_averaged_weights()

    def state(self) -> Iterable[StatePiece]:
        """Returns the optimizer state that this rank saves; every worker calls it, and takes all of it at once."""
        pieces = self.exchange.state()
        return self.slices.join(pieces) if self.slices else pieces

    def own_state(self) -> tuple[StatePiece, ...]:
        """Returns the state that belongs to this worker alone."""
        pieces = (*self.exchange.own(), *(self.sync.own() if isinstance(self.sync, PeriodicSync) else ()))
        return self.slices.mark(pieces) if self.slices else pieces

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        """Loads what of `pieces` (all workers' together) belongs to this rank, and the settings if given."""
        self.exchange.load(self.slices.divide(pieces) if self.slices else pieces, settings)
