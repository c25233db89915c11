"""From autograd's gradients to the flat memory that workers exchange, without a loop over parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.training.flat_layout import FlatLayout


class GradientSink(Protocol):
    """Takes what a backward pass brought."""

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Takes one gradient a trainable parameter; None where the loss does not depend on it."""

    def store_nothing(self) -> None:
        """Says that this worker contributes nothing to this round."""


class UsedParameters:
    """Which parameters have got a gradient from anybody in this round.

    One device skips a parameter that the loss does not depend on (no decay, no momentum). N workers do the
    same only if nobody's part of the batch depends on it, so everybody must know.

    Args:
        collective: of the workers.
        count: number of trainable parameters.
    """

    def __init__(self, collective: ProcessGroup, count: int) -> None:
        self._collective = collective
        shares = collective.one_memory
        regions = collective.share(count + 1) if shares else (torch.zeros(count + 1, dtype=torch.uint8),)
        self._regions = [region.numpy() for region in regions]
        self._own = self._regions[collective.rank if shares else 0]

    def publish(self, gradients: Sequence[Tensor | None]) -> bool:
        """Says which of this worker's gradients exist; returns whether all do."""
        whole = not any(map(operator.is_, gradients, repeat(None)))
        if not whole:
            self._own[1:] = [gradient is None for gradient in gradients]
        self._own[0] = not whole
        return whole

    def publish_nothing(self) -> None:
        """Says that this worker has none."""
        self._own[:] = 1

    def settle(self) -> tuple[int, ...]:
        """Meets the others, when all have said; returns indices of the parameters that nobody has a gradient for."""
        if not self._collective.one_memory:
            return self._ask()
        self._collective.barrier()
        if not all(region[0] for region in self._regions):
            return ()
        absent = self._regions[0][1:].copy()
        for region in self._regions[1:]:
            absent &= region[1:]
        return tuple(int(index) for index in absent.nonzero()[0])

    def _ask(self) -> tuple[int, ...]:
        (lacking,) = self._collective.sum([float(self._own[0])])
        if lacking < self._collective.world:
            return ()
        absent = torch.from_numpy(self._own[1:].astype("int32"))
        self._collective.all_reduce(absent)
        return tuple((absent == self._collective.world).nonzero().flatten().tolist())


class FlatGradients:
    """One worker's gradients, side by side in one region.

    Args:
        layout: places of the trainable parameters.
        region: `(layout.nbytes,)` uint8.
        presence: told what exists.
    """

    def __init__(self, layout: FlatLayout, region: Tensor, presence: UsedParameters) -> None:
        self._views = layout.views(region)
        self._region = region
        self._presence = presence

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        if self._presence.publish(gradients):
            torch._foreach_copy_(self._views, cast(tuple[Tensor, ...], gradients))
            return
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)

    def store_nothing(self) -> None:
        self._presence.publish_nothing()
        self._region.zero_()


def assign(parameters: Sequence[nn.Parameter], views: Sequence[Tensor], missing: Sequence[int]) -> None:
    """Lets the optimizer see the views as gradients, except those of the missing parameters."""
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    for index in missing:
        parameters[index].grad = None
