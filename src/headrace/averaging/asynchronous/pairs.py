"""Workers that average their parameters with one other worker each, which goes on meanwhile: AD-PSGD.

    worker i   │ gradient at a copy of x_i │ lock i, j: x_i, x_j = (x_i + x_j) / 2 │ step of x_i, unlock i │ ...
    worker j   │ gradient at the copy of x_j that it has .................................│ lock j, k: ...

Each worker's x lies in shared memory, and its model has a copy of it, as it was after the worker's last step. All meet
after `period` rounds, when a run may be saved, evaluated and ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from headrace.averaging.asynchronous.locks import HostLocks
from headrace.averaging.mixing import ParameterMixing
from headrace.averaging.worker_average import squared
from headrace.collectives.base import ProcessGroup
from headrace.devices import HOST
from headrace.training.clipping import all_finite
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import SyncResult
from headrace.training.update import Updater

Partner = Callable[[int, int], int]
"""`partner(rank, round)` returns with whom a worker averages after its gradient of a round; itself for none."""


class PairMixing(ParameterMixing):
    """Averages this worker's parameters and running statistics with one other's, under the locks of both."""

    def __init__(
        self,
        period: int,
        module: nn.Module,
        updater: Updater,
        group: ProcessGroup,
        closing: ExitStack,
        partner: Partner,
    ) -> None:
        super().__init__(period, module, updater, group)
        self._partner = partner
        self._locks = HostLocks(group, closing)
        self._begin()

    @torch.no_grad()
    def adjust(self, round_: int, updated: bool) -> None:
        rank = self.group.rank
        if updated:
            # The next gradient is at what x is now; others may change x meanwhile.
            self._show()
            self._note()
            self._locks.release(rank)
            return
        other = self._partner(rank, round_)
        for number in sorted({rank, other}):
            self._locks.take(number)
        # What the forward pass has added to running statistics, it has added to those that were read.
        shown = self._shown[len(self._named) - len(self._statistics) :]
        for kept, now, before in zip(shown, self._statistics.values(), self._read, strict=True):
            kept.add_(now.to(kept.device) - before)
        if other != rank:
            self.mix_with(other)
            self._locks.release(other)
        self._take()

    def mix(self, round_: int) -> None:
        """All do not mix at once."""

    def mix_with(self, other: int) -> None:
        """Replaces this worker's x and another's by their mean; both are locked."""
        for own, theirs in zip(self._shown, self._views(other), strict=True):
            own.add_(theirs).div_(2)
            theirs.copy_(own)
        # Read, and written.
        self.group.moved_bytes += 2 * self._layout.nbytes

    @torch.no_grad()
    def synchronize(self, done: int) -> SyncResult:
        self._rest()
        every = [self._views(rank) for rank in range(self.group.world)]
        apart = norm = 0.0
        for own, *copies in zip(self._shown, *every, strict=True):
            mean = torch.stack(copies).mean(0)
            apart, norm = apart + squared(own - mean), norm + squared(mean)
        self._finite, self._drift = all_finite(self.tensors), math.sqrt(apart / norm) if norm else 0.0
        # Its own meeting: all have read all before one goes on.
        return super().synchronize(done)

    def swap_weights(self, averaged: bool) -> None:
        if averaged == (self._saved is not None):
            return
        if averaged:
            self._rest()
        super().swap_weights(averaged)
        if not averaged:
            self._begin()

    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        super().load(pieces, settings)
        self._begin()

    def _begin(self) -> None:
        """Makes this worker's tensors its x; every worker calls it."""
        self._show()
        self._take()
        self.group.barrier()

    def _rest(self) -> None:
        """Reads x when no worker changes one; every worker calls it, and meets the others before it goes on."""
        self.group.barrier()
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        """Copies x to where the model computes with it."""
        for tensor, shown in zip(self.tensors, self._shown, strict=True):
            tensor.copy_(shown)
        self._note()

    def _note(self) -> None:
        """Notes running statistics as they are before a forward pass."""
        self._read = [each.to(HOST, copy=True) for each in self._statistics.values()]
