"""The center variable of elastic averaging, and optimizer state that is averaged with the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from headrace.internals import foreach_copy_
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.data_leases import BackgroundWork
from headrace.parameter_server.wire import ShardLayout
from headrace.training.synchronization import MeanState


class OptimizerMirror:
    """A worker's optimizer state as flat tensors, `named` like their shards, which servers treat like parameters."""

    def __init__(self, state: MeanState | None) -> None:
        self._state = state
        every = zip(state.specs, state.likes, strict=True) if state else ()
        self.named = {spec.name: torch.zeros_like(like.value) for spec, like in every}

    def gather(self) -> None:
        """Copies the optimizer's state here."""
        if self._state:
            self._state.gather(list(self.named.values()))

    def spread(self) -> None:
        """Copies this state to the optimizer."""
        if self._state:
            self._state.spread(list(self.named.values()))


class CenterVariable(BackgroundWork):
    """This worker's parameters and a copy of the servers' center variable, both by server and shard.

    `client` pulls into `copy`. With `keeps` the worker continues with its own parameters after a sync point.
    """

    def __init__(
        self,
        client: Client,
        layouts: Sequence[ShardLayout],
        local: Sequence[Sequence[Tensor]],
        copy: Sequence[Sequence[Tensor]],
        mirror: OptimizerMirror,
        keeps: bool,
    ) -> None:
        self.client, self.local = client, local
        self._pieces = [layout.pieces for layout in layouts]
        self._local, self._copy = ([*chain(*places)] for places in (local, copy))
        # Optimizer state differs from the center's only during a lease.
        apart = [not piece.exact for piece in chain(*self._pieces)]
        self._apart = [index for index, is_apart in enumerate(apart) if is_apart]
        self._rest = [index for index, is_apart in enumerate(apart) if not is_apart]
        self._mirror = mirror
        self._keeps = keeps
        self._saved: list[Tensor] | None = None
        self._begun = False

    def take(self, all_of_it: bool = True) -> None:
        """Sets this worker's values to the center's, or only those of optimizer state."""
        taken = [*self._apart, *self._rest] if all_of_it else self._rest
        if taken:
            foreach_copy_([self._local[index] for index in taken], [self._copy[index] for index in taken])
        self._mirror.spread()

    def renew(self) -> None:
        # A new worker has no parameters of its own yet.
        if self._keeps and self._begun and self._saved is None:
            self._saved = [self._local[index].clone() for index in self._apart]
        self.client.pull()
        self.take()

    def resume(self) -> None:
        self._begun = True
        if self._saved is not None:
            foreach_copy_([self._local[index] for index in self._apart], self._saved)
            self._saved = None

    def distances(self) -> list[list[Tensor]]:
        """Returns center minus own value, by server and shard."""
        self._mirror.gather()
        ways = (copy - value.to(copy.device) for value, copy in zip(self._local, self._copy, strict=True))
        return [[next(ways).view(piece.shape) for piece in pieces] for pieces in self._pieces]

    def gather(self) -> None:
        """Copies the optimizer's state for the next push."""
        self._mirror.gather()

    def approach(self, alpha: float) -> None:
        """Moves the parameters by a fraction towards the center."""
        for index in self._apart:
            self._local[index].lerp_(self._copy[index].to(self._local[index].device), alpha)

    @property
    def norm(self) -> float:
        """Of the center's parameters, as pulled last."""
        return float(torch.linalg.vector_norm(torch.stack([self._copy[index].norm() for index in self._apart])))
