"""A worker's copy of what servers hold, beside its own: parameters, and optimizer's state where that is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.training.optimizer_state import MeanState


class OptimizerMirror:
    """An optimizer's state where servers see it: flat, as if it were further parameters.

    Args:
        state: of this worker; None for none.

    Attributes:
        named: by the names of the pieces.
    """

    def __init__(self, state: MeanState | None) -> None:
        self._state = state
        every = zip(state.specs, state.likes, strict=True) if state else ()
        self.named = {spec.name: torch.zeros_like(like.value) for spec, like in every}

    def gather(self) -> None:
        """Brings the optimizer's state here."""
        if self._state:
            self._state.gather(list(self.named.values()))

    def spread(self) -> None:
        """Brings what is here to the optimizer."""
        if self._state:
            self._state.spread(list(self.named.values()))


class CenterVariable:
    """Args:
    client: brings the copy up to date.
    forms: the servers' shards.
    own: this worker's, by server and shard.
    copy: places of the copy, alike.
    beside: this worker's optimizer.
    keeps: whether the worker goes on from its own parameters, and has the centre's where all meet alone.

    Attributes:
        client, own: see there.
    """

    def __init__(
        self,
        client: Client,
        layouts: Sequence[ShardLayout],
        own: Sequence[Sequence[Tensor]],
        copy: Sequence[Sequence[Tensor]],
        mirror: OptimizerMirror,
        keeps: bool,
    ) -> None:
        self.client, self.own = client, own
        self._pieces = [layout.pieces for layout in layouts]
        self._own, self._copy = ([*chain(*places)] for places in (own, copy))
        # Of what is beside the parameters nobody has one of its own for longer than a lease.
        apart = [not piece.exact for piece in chain(*self._pieces)]
        self._apart = [index for index, is_apart in enumerate(apart) if is_apart]
        self._rest = [index for index, is_apart in enumerate(apart) if not is_apart]
        self._mirror = mirror
        self._keeps = keeps
        self._kept: list[Tensor] | None = None
        self._begun = False

    def take(self, all_of_it: bool = True) -> None:
        """Goes on from the centre, or takes what is beside the parameters alone."""
        taken = [*self._apart, *self._rest] if all_of_it else self._rest
        if taken:
            torch._foreach_copy_([self._own[index] for index in taken], [self._copy[index] for index in taken])
        self._mirror.spread()

    def renew(self) -> None:
        """Brings the centre up to date, and puts it where the parameters are."""
        # Whoever comes has nothing of its own yet.
        if self._keeps and self._begun and self._kept is None:
            self._kept = [self._own[index].clone() for index in self._apart]
        self.client.pull()
        self.take()

    def resume(self) -> None:
        """Goes on from what was there before the centre, where that is kept."""
        self._begun = True
        if self._kept is not None:
            torch._foreach_copy_([self._own[index] for index in self._apart], self._kept)
            self._kept = None

    def distances(self) -> list[list[Tensor]]:
        """Returns, by server and shard, the way from what is this worker's to the centre."""
        self._mirror.gather()
        ways = (copy - own.to(copy.device) for own, copy in zip(self._own, self._copy, strict=True))
        return [[next(ways).view(piece.shape) for piece in pieces] for pieces in self._pieces]

    def gather(self) -> None:
        """Notes this worker's state of its optimizer."""
        self._mirror.gather()

    def approach(self, alpha: float) -> None:
        """Goes a part of the way to the centre."""
        for index in self._apart:
            self._own[index].lerp_(self._copy[index].to(self._own[index].device), alpha)

    @property
    def norm(self) -> float:
        """Of the centre's parameters, as they were when they came last."""
        return float(torch.linalg.vector_norm(torch.stack([self._copy[index].norm() for index in self._apart])))

    @property
    def moved_bytes(self) -> int:
        """Nothing: all goes over the client's links."""
        return 0

    def close(self) -> None:
        """Leaves the links to whoever leases over them."""
