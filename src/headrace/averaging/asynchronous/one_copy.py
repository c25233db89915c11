"""Workers that train one copy of the parameters without waiting for each other, or locking: Hogwild.

    worker 0   │ gradient at what is there now ... step of x │ gradient ... step of x │
    worker 1   │ gradient ... step of x │ gradient at what is there now ... step of x │

All meet after `period` rounds, when a run may be saved, evaluated and ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from headrace.averaging.local_steps import LocalStepsSync
from headrace.collectives.base import ProcessGroup
from headrace.errors import RunFailed
from headrace.training.clipping import all_finite
from headrace.training.gradients import FlatLayout
from headrace.training.optimizer import StatePiece
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.synchronization import SyncResult, describe_tensor
from headrace.training.update import Updater


class OneCopy(LocalStepsSync):
    """Puts the workers' parameters and running statistics in one place; they meet every `period` rounds.

    `updater` makes this worker's own steps, with an optimizer's state of its own.
    """

    own_optimizers = True

    def __init__(self, period: int, module: nn.Module, updater: Updater, group: ProcessGroup) -> None:
        self._period, self._updater, self._group = period, updater, group
        chosen = set(map(id, averaged_buffers(module)))
        named: dict[str, Tensor] = {name: each for name, each in module.named_parameters() if each.requires_grad}
        named |= {name: each for name, each in module.named_buffers() if id(each) in chosen}
        layout = FlatLayout([describe_tensor(name, each) for name, each in named.items()])
        region = group.share_one(layout.nbytes)
        for name, each in named.items():
            place = layout.view(region, name)
            if group.rank == 0:
                place.copy_(each.detach())
            each.data = place
        self._tensors = [each.detach() for each in named.values()]
        group.barrier()

    def coming(self, done: int) -> int:
        return -(-done // self._period) * self._period

    def weigh(self, weight: float) -> None:
        self.worth = weight

    def synchronize(self, done: int) -> SyncResult:
        self._group.barrier()
        finite = all_finite(self._tensors)
        # All have looked before one goes on.
        self._group.barrier()
        if not finite:
            raise RunFailed(
                f"after {done} rounds the one copy of the parameters is not finite; lower the learning rate, or use "
                "Options(clip_norm=1.0)"
            )
        return SyncResult(self._period, self._period, "fixed", 0.0, ())

    def end(self, done: int) -> SyncResult | None:
        return None

    def swap_weights(self, averaged: bool) -> None:
        # There is one copy: it is at rest when all are here.
        self._group.barrier()

    def own(self) -> tuple[StatePiece, ...]:
        return self._updater.state() if self._group.rank else ()

    def load(self, pieces: Sequence[StatePiece], settings: Mapping[str, Any] | None) -> None:
        self._group.barrier()
