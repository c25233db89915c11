"""Workers that keep parameters of their own, and mix them with those of some others.

    every round          gradients at the worker's own parameters x
    every period rounds  show x to those who read it, `mix`: replace x by what a strategy makes of the workers' x
    every round          the worker's own optimizer makes its step, from x as it now is

With `mixes_after` the last two change places. The trained model is the mean of all workers' parameters. A strategy
writes `mix`. On one host the workers share memory; over several each sends its x to those who read it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headrace.averaging.local_steps import LocalStepsSync
from headrace.averaging.shown import Reads, ShownBytes
from headrace.averaging.worker_average import squared
from headrace.collectives.base import ProcessGroup
from headrace.devices import HOST
from headrace.errors import RunFailed
from headrace.training.clipping import all_finite
from headrace.training.gradients import FlatLayout
from headrace.training.optimizer import StatePiece
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.synchronization import SyncResult, describe_tensor
from headrace.training.update import PARAMETER, Updater

_STATISTIC = "headrace.statistic"
"""Key of the pieces that hold a worker's own running statistics."""


class ParameterMixing(LocalStepsSync):
    """Mixes the workers' trainable parameters and their running statistics, every `period` rounds.

    `updater` makes this worker's own steps; `reads` and `closing` are those of `ShownBytes`.

    Attributes:
        tensors: what this worker mixes: its parameters and statistics, which `mix` changes in place.
        group: the workers.
        mixes_after: whether workers mix after the update of a round, and not before it.
    """

    mixes_after: bool = False
    own_optimizers = True

    def __init__(
        self,
        period: int,
        module: nn.Module,
        updater: Updater,
        group: ProcessGroup,
        reads: Reads | None = None,
        closing: ExitStack | None = None,
    ) -> None:
        self.group = group
        self._period = period
        self._updater = updater
        trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
        chosen = set(map(id, averaged_buffers(module)))
        self._statistics = {name: buffer for name, buffer in module.named_buffers() if id(buffer) in chosen}
        self._named = {**trained, **self._statistics}
        self.tensors = list(self._named.values())
        self._layout = FlatLayout([describe_tensor(name, tensor) for name, tensor in self._named.items()])
        self._bytes = ShownBytes(self._layout.nbytes, group, reads, closing)
        self._shown = self._views(group.rank)
        self.kept_bytes = self._layout.nbytes
        self._saved: list[Tensor] | None = None
        self._finite, self._drift = True, 0.0

    @abstractmethod
    def mix(self, round_: int) -> None:
        """Replaces this worker's `tensors`; `theirs(rank)` are those of any worker. Every worker calls it."""

    def theirs(self, rank: int) -> list[Tensor]:
        """Returns the tensors of a worker that this one reads, from before this round's mixing: not to be changed."""
        self.group.moved_bytes += self._layout.nbytes
        return [view.to(tensor.device) for view, tensor in zip(self._views(rank), self.tensors, strict=True)]

    def coming(self, done: int) -> int:
        return -(-done // self._period) * self._period

    def weigh(self, weight: float) -> None:
        self.worth = weight

    @torch.no_grad()
    def adjust(self, round_: int, updated: bool) -> None:
        if updated is not self.mixes_after or (round_ + 1) % self._period:
            return
        self._show()
        self._finite = all_finite(self.tensors)
        self._bytes.show(round_)
        self.mix(round_)
        moved = sum(squared(tensor.cpu() - shown) for tensor, shown in zip(self.tensors, self._shown, strict=True))
        norm = sum(squared(tensor) for tensor in self.tensors)
        self._drift = math.sqrt(moved / norm) if norm else 0.0

    def synchronize(self, done: int) -> SyncResult:
        # All have read what the others have shown when every rank has told.
        every = self.group.gather_numbers([float(not self._finite), self._drift])
        bad = [rank for rank, (broken, _) in enumerate(every) if broken]
        if bad and self.group.rank != bad[0]:
            # One rank raises; the others end because of it.
            self.group.barrier()
        if bad:
            raise RunFailed(
                f"rank {bad[0]} has parameters that are not finite after {done} rounds, and mixing gives them to the "
                "others; lower the learning rate, or use Options(clip_norm=1.0)"
            )
        return SyncResult(self._period, self._period, "fixed", max(drift for _, drift in every), ())

    def end(self, done: int) -> SyncResult | None:
        return None

    def swap_weights(self, averaged: bool) -> None:
        if averaged == (self._saved is not None):
            return
        if not averaged:
            assert self._saved is not None
            for tensor, saved in zip(self.tensors, self._saved, strict=True):
                tensor.copy_(saved)
            self._saved = None
            return
        # A device has no room for them.
        self._saved = [tensor.to(HOST, copy=True) for tensor in self.tensors]
        self._show()
        region = self._bytes.regions[self.group.rank]
        for span in self._layout.spans:
            part = span.of(region)
            part.div_(self.group.world)
            self.group.all_reduce(part)
        for tensor, mean in zip(self.tensors, self._shown, strict=True):
            tensor.copy_(mean)

    def own(self) -> tuple[StatePiece, ...]:
        pieces = [
            StatePiece.of(name, _STATISTIC if name in self._statistics else PARAMETER, 0, tensor)
            for name, tensor in self._named.items()
        ]
        return (*pieces, *(self._updater.state() if self.group.rank else ()))

    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        # The updater has loaded the parameters, as the optimizer's state.
        for piece in pieces:
            if piece.key == _STATISTIC and piece.parameter in self._statistics:
                piece.copy_to(self._statistics[piece.parameter], 0)

    def _views(self, rank: int) -> tuple[Tensor, ...]:
        return self._layout.views(self._bytes.regions[rank])

    @torch.no_grad()
    def _show(self) -> None:
        self.group.moved_bytes += self._layout.nbytes
        for shown, tensor in zip(self._shown, self.tensors, strict=True):
            shown.copy_(tensor)
