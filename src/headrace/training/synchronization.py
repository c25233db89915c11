"""How workers that do not go in lockstep synchronize: data leases with sync points, or periodic averages.

Averaged are parameters, and the part of an optimizer's state that has a mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.spec.model import ParameterSpec
from headrace.training.optimizer import Factory, StatePiece, build
from headrace.trees import cloned


@dataclass(frozen=True)
class SyncResult:
    """The result of a synchronization.

    Attributes:
        drift: the largest distance of a worker's parameters from their mean, over the norm of the mean.
        left_out: ranks whose parameters were not finite: the mean is that of the others, and they go on from it.
        number: of the synchronization, where each worker reports it alone: the drift is its own.
        took_s: how long it took, where each worker reports it alone.
    """

    rounds: int
    period: int
    why: str
    drift: float
    left_out: tuple[int, ...]
    number: int = 0
    took_s: float = 0.0


class SwappableWeights(ABC):
    """Weights that averaged ones can replace: moving averages, or the mean of workers that step on their own."""

    @abstractmethod
    def swap_weights(self, averaged: bool) -> None:
        """Puts the averaged weights in the parameters' place, or the parameters back.

        Every rank calls it. A call that asks for what is already there changes nothing. Training goes on from the
        parameters as if they had never been replaced.
        """

    @contextmanager
    def swapped_weights(self) -> Iterator[None]:
        """Runs its body with the averaged weights in the parameters' place; every rank enters and leaves it.

        If the body raises, the averaged weights stay, because other ranks may be gone, and the next entry takes over.
        """
        self.swap_weights(averaged=True)
        yield
        self.swap_weights(averaged=False)

    def adopt_averaged_weights(self) -> None:
        """Leaves the averaged weights in the parameters' place, at the end of a run; every rank calls it."""
        self.swap_weights(averaged=True)


class PeriodicSync(SwappableWeights):
    """Synchronizes workers that take local steps; every worker calls the same methods after the same rounds.

    Attributes:
        state_keys: keys of the pieces of its own that it saves, which are not given to the optimizer.
        own_optimizers: whether `own` of each replica but the first has the state of its optimizer. It resumes with that
            alone: with none for a parameter that it has not used yet.
    """

    state_keys: tuple[str, ...] = ()
    own_optimizers: bool = False

    @abstractmethod
    def coming(self, done: int) -> int:
        """Returns the number of done rounds at the next synchronization, which is not before `done` of them."""

    @abstractmethod
    def weigh(self, weight: float) -> None:
        """Notes the weight of this worker's part of a round: its examples, or what else its loss counts by."""

    @abstractmethod
    def synchronize(self, done: int) -> SyncResult:
        """Synchronizes the workers after so many rounds. Raises a `RunFailed` if no worker has finite parameters."""

    @abstractmethod
    def end(self, done: int) -> SyncResult | None:
        """Synchronizes a last time, if this worker does not have the trained model yet."""

    @abstractmethod
    def own(self) -> tuple[StatePiece, ...]:
        """Returns the state that is this worker's alone; when it resumes, it replaces the others' state."""


@dataclass(frozen=True)
class Lease:
    """A part of an epoch that this worker trains on now.

    Attributes:
        rounds: how many rounds the lease lasts, with the same part of each.
    """

    round: int
    part: int
    parts: int
    rounds: int
    lease: int


@dataclass(frozen=True)
class SyncPoint:
    """A round before which all workers wait for each other: everything before it is done.

    Attributes:
        number: how many sync points there were in the run, this one counted.
    """

    round: int
    number: int
    members: tuple[tuple[int, int], ...]


class DataLeases(ABC):
    """Leases of data, one at a time.

    Attributes:
        moved_bytes: payload sent to and received from the servers.
        late: whether the gradient of the last lease came too late to count; its data is leased again.
        records: whether loss and examples of the current lease count; a line search may visit the same ones again.
        sync_result: result of the average at the end of the last lease, if there was one; its reader clears it.
        prepare: called with the number and the batch of the lease after the current one, before that is computed; None
            where nothing is prepared. Leases are then of one round.
        following: the lease after the current one, where something is prepared and it is known.
    """

    moved_bytes: int
    late: bool
    records: bool = True
    sync_result: SyncResult | None = None
    prepare: Callable[[int, Any], None] | None = None
    following: Lease | None = None

    @abstractmethod
    def begin(self) -> None:
        """Waits until the servers have the initial parameters, which rank 0 has loaded before, and fetches them."""

    @abstractmethod
    def ask(self, leaves: bool = False) -> None:
        """Requests the next lease; the last one is done, or returned if its gradient came too late.

        A worker that `leaves`, while others go on, requests nothing.
        """

    @abstractmethod
    def next(self) -> Lease | SyncPoint:
        """Waits for the answer to `ask`; at a sync point, also until all that this worker pushed has been applied."""

    @abstractmethod
    def weigh(self, weight: float, share: float, loss: Tensor | None = None) -> None:
        """Notes, before a push, the gradient's weight in the mean of its round, and its share of the round's examples.

        The weight is the number of examples, or what else the loss counts by; 0 if there is no gradient. The loss is
        the mean over the data, None if there is none.
        """

    @abstractmethod
    def halt(self) -> None:
        """Requests a sync point as soon as the rounds that have begun are done."""

    @abstractmethod
    def advance(self, done: int, until: int) -> None:
        """Goes on from a sync point after `done` rounds; the next is before round `until`.

        Every worker calls it, because any of them may be lost.
        """

    @abstractmethod
    def renew(self) -> None:
        """Fetches the parameters at a sync point."""

    @abstractmethod
    def end(self) -> None:
        """Ends the leasing when the run is over; every worker calls it, the first one first."""

    @abstractmethod
    def close(self) -> None:
        """Releases the connections."""


@dataclass(frozen=True)
class _Like:
    """A tensor in an optimizer's state that has a mean: its parameter, its key, and a value of its shape and type."""

    name: str
    key: str
    value: Tensor


class MeanState:
    """The part of an optimizer's state that has a mean, copied to other places and back."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], begins: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._optimizer = optimizer
        self._named = named
        self._begins = begins
        self.likes = [
            _Like(name, key, value)
            for name, values in begins.items()
            for key, value in values.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        self.specs = [describe_tensor(f"{like.name}/{like.key}", like.value) for like in self.likes]

    def gather(self, views: Sequence[Tensor]) -> None:
        """Copies it into tensors like `likes`; state that the optimizer has not made yet is 0."""
        for like, view in zip(self.likes, views, strict=True):
            value = self._optimizer.state.get(self._named[like.name], {}).get(like.key)
            view.zero_() if value is None else view.copy_(value)

    def spread(self, views: Sequence[Tensor]) -> None:
        """Copies it back."""
        for like, view in zip(self.likes, views, strict=True):
            parameter = self._named[like.name]
            state = self._optimizer.state.get(parameter)
            if not state:
                # This worker has had no example yet, and others may have.
                if not view.any():
                    continue
                state = self._optimizer.state[parameter] = {
                    key: cloned(value) if isinstance(value, Tensor) else value
                    for key, value in self._begins[like.name].items()
                }
            state[like.key].copy_(view)


def mean_state(named: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, factory: Factory) -> MeanState:
    """Returns an optimizer's state, which must have a mean, as found by a first step with gradients of 0."""
    every = {name: nn.Parameter(torch.zeros_like(each), each.requires_grad) for name, each in named.items()}
    likes = {name: each for name, each in every.items() if each.requires_grad}
    for like in likes.values():
        like.grad = torch.zeros_like(like)
    probe = build(factory, every.items())
    probe.step()
    begins = {name: dict(probe.state[like]) for name, like in likes.items() if probe.state.get(like)}
    for name, values in begins.items():
        for key, value in values.items():
            _require_mean(probe, name, key, value)
    return MeanState(optimizer, named, begins)


def _require_mean(optimizer: torch.optim.Optimizer, name: str, key: str, value: Any) -> None:
    if value is None or isinstance(value, int | float):
        return
    if isinstance(value, Tensor) and (value.is_floating_point() or value.numel() == 1):
        return
    form = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"average_optimizer_state: {type(optimizer).__name__} keeps {form} as {key!r} of {name!r}, which has no mean; "
        "use average_optimizer_state=False, and each worker keeps its own state"
    )


def describe_tensor(name: str, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


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
