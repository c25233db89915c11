"""The one copy of the parameters that all workers of a host share, and the exchange that updates it slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.devices import register_host_memory
from headrace.internals import foreach_add_
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Segment
from headrace.training.clipping import GradientClipper, StepDecision
from headrace.training.gradients import FlatGradients, FlatLayout, SharedGradients, in_order
from headrace.training.optimizer import StatePiece
from headrace.training.reducing import Reduced, ReducingExchange
from headrace.training.reduction import shared_traffic
from headrace.training.update import Updater

NewUpdater = Callable[[Sequence[tuple[Segment, Tensor]]], Updater]
"""From pieces of parameters to what moves them."""


class CentralCopy:
    """The one copy, every worker's gradients, and the way between them and a device.

    `parameters` is the one copy, `(layout.nbytes,)` uint8, in host memory. The module's parameters become views: of
    the one copy on a CPU, of one flat buffer on another device, or where a loop of the user's own may
    write to them (`own_loop`): what all workers write alike is then written once.
    """

    def __init__(
        self, module: nn.Module, model: ModelSpec, group: ProcessGroup, device: torch.device, own_loop: bool = False
    ) -> None:
        self.layout, self.parameters = share_parameters(module, model, group)
        self.gradients = shared = SharedGradients(model.trainable, group)
        self._own = self._local = shared.regions[group.rank]
        self._near = self.parameters
        self.sink = shared.sink
        if own_loop and group.world > 1:
            self._near = torch.empty_like(self.parameters, device=device)
        if device.type != "cpu":
            for region in (self.parameters, self._own):
                register_host_memory(region, device)
            self._near = torch.empty_like(self.parameters, device=device)
            self._local = torch.zeros_like(self._own, device=device)
            self.sink = FlatGradients(shared.layout, self._local, shared.used)
        place_parameters(module, self.layout, self._near)
        self.fetch()

    def fetch(self) -> None:
        """Copies the parameters to the device."""
        if self._near is not self.parameters:
            self._near.copy_(self.parameters)

    def near(self, segment: Segment, specs: Mapping[str, ParameterSpec]) -> Tensor | None:
        """Returns a segment's place in this worker's own parameters; None where they are the one copy."""
        return None if self._near is self.parameters else cut_segment(self.layout, self._near, segment, specs)

    def bring(self) -> None:
        """Copies this worker's gradients to host memory."""
        if self._local is not self._own:
            self._own.copy_(self._local)


def share_parameters(module: nn.Module, model: ModelSpec, group: ProcessGroup) -> tuple[FlatLayout, Tensor]:
    """Copies rank 0's parameters into memory that all workers see; returns their places and the memory."""
    layout = FlatLayout(model.parameters)
    region = group.share(0 if group.rank else layout.nbytes)[0]
    if group.rank == 0:
        for view, parameter in zip(layout.views(region), module.parameters(), strict=True):
            view.copy_(parameter.data)
    group.barrier()
    return layout, region


def place_parameters(module: nn.Module, layout: FlatLayout, region: Tensor) -> None:
    """Makes a module's parameters views of a region."""
    for view, parameter in zip(layout.views(region), module.parameters(), strict=True):
        parameter.data = view


def cut_segment(places: FlatLayout, region: Tensor, segment: Segment, specs: Mapping[str, ParameterSpec]) -> Tensor:
    """Returns a segment's place in a region, flat; in the parameter's shape where it is all of it, or has its order."""
    spec = specs[segment.parameter]
    piece = places.flat(region, segment.parameter)[segment.start : segment.stop]
    if spec.channels_last:
        # It is cut between rows.
        rows, *row = spec.shape
        return in_order(piece, (piece.numel() * rows // max(1, spec.elements), *row), channels_last=True)
    # A whole parameter keeps its shape, for optimizers that look at it.
    return piece.view(spec.shape) if piece.numel() == spec.elements else piece


class CentralStorageExchange(ReducingExchange):
    """Sums and updates this rank's segments of the one copy."""

    def __init__(
        self,
        segments: Sequence[Segment],
        model: ModelSpec,
        group: ProcessGroup,
        copy: CentralCopy,
        new_updater: NewUpdater,
        clipper: GradientClipper,
    ) -> None:
        self._group = group
        self._copy = copy
        specs = {parameter.name: parameter for parameter in model.parameters}
        layout = copy.gradients.layout

        places = [cut_segment(copy.layout, copy.parameters, segment, specs) for segment in segments]
        updater = new_updater(list(zip(segments, places, strict=True)))
        near = [(place.detach(), copy.near(each, specs)) for place, each in zip(places, segments, strict=True)]
        self._near = [(place, here) for place, here in near if here is not None]
        by_rank = [
            [cut_segment(layout, region, segment, specs) for segment in segments] for region in copy.gradients.regions
        ]
        self._sums = by_rank.pop(group.rank)
        self._others = by_rank
        self._traffic = shared_traffic(layout.nbytes, group.world)
        indices = [layout.names.index(segment.parameter) for segment in segments]
        parameter_bytes = 0 if group.rank else copy.layout.nbytes
        super().__init__(
            updater, clipper, copy.gradients.used, updater.parameters, self._sums, parameter_bytes, indices
        )

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        # The other workers read them in host memory.
        self._copy.bring()
        return super().synchronize(finite)

    def reduce(self) -> Reduced:
        if self._sums:
            for gradients in self._others:
                foreach_add_(self._sums, gradients)
        self._group.moved_bytes += self._traffic
        return self._sums, self._sums

    def update(self, round_: int) -> None:
        self._give()
        super().update(round_)

    def publish(self) -> None:
        self._group.barrier()
        self._copy.fetch()

    def _give(self) -> None:
        """Brings what this worker has of its segments to the one copy, since user code may have written to it."""
        for piece, near in self._near:
            piece.copy_(near)

    def swap_weights(self, averaged: bool) -> None:
        # No rank may still read what is changed.
        self._group.barrier()
        self._give()
        super().swap_weights(averaged)

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        # Weights may be among the pieces, and no rank may still read them.
        self._group.barrier()
        super().load(pieces, settings)
