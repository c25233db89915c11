"""Buffers and extra state that forward changes: power iterations of a spectral norm, running averages, counters.

A forward that is run again must start from the buffers as they were at its first time, or it would compute something
else, and leave them as they are now.

    first time     u0 ─► forward ─► u1 ─► forward of the next ─► u2        u0 is kept, because it was moved
    once more      u0 ─► forward ─► u1 thrown away; the module has u2 again
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.internals import BatchNorm
from headrace.modules import restore, same_values, stateful_modules
from headrace.training.shared_buffers.batch_norm import move_running_averages


@dataclass(frozen=True)
class HeldState:
    """What a module has as a buffer of this name, or, where that is "", as extra state (`get_extra_state`)."""

    owner: nn.Module
    name: str
    value: Any

    @staticmethod
    def of(owner: nn.Module, name: str) -> HeldState:
        """Returns the buffer that the module has now, or a copy of its state."""
        value = internals.buffers(owner)[name] if name else copy.deepcopy(owner.get_extra_state())
        return HeldState(owner, name, value)

    def put(self) -> None:
        """Gives it to the module."""
        if self.name:
            internals.buffers(self.owner)[self.name] = self.value
        else:
            self.owner.set_extra_state(self.value)


class SavedBuffers:
    """Saves those of the named buffers of a module that a forward changes, and its extra state.

    Frozen parameters among the names are left to backward passes, too.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._stateful = [part for _, part in stateful_modules(module)]
        wanted = {id(buffer) for name, buffer in module.named_buffers() if name in names}
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in internals.buffers(owner).items()
            if id(buffer) in wanted
        ]
        frozen = {id(each) for name, each in module.named_parameters() if name in names and not each.requires_grad}
        # No backward pass needs the averages of BatchNorm that moves them.
        self._writable: list[tuple[dict[str, Any], str]] = [
            (tensors, name)
            for owner in module.modules()
            if not isinstance(owner, BatchNorm)
            for tensors, known in ((internals.buffers(owner), wanted), (internals.parameters(owner), frozen))
            for name, tensor in tensors.items()
            if id(tensor) in known
        ]
        self._replaced: dict[tuple[int, str], tuple[dict[str, Any], Tensor]] = {}

    @contextmanager
    def watched(self) -> Iterator[list[HeldState]]:
        """Yields a list that afterwards holds what was changed meanwhile, as it was before."""
        before = [HeldState.of(owner, name) for owner, name in self._places]
        # A buffer that several modules have stays one.
        copies = {id(part.value): part.value.clone() for part in before}
        states = [HeldState.of(owner, "") for owner in self._stateful]
        kept: list[HeldState] = []
        yield kept
        for part in before:
            # By value, because batch_norm moves its averages without a new version.
            same = internals.buffers(part.owner)[part.name] is part.value
            if not same or not same_values(part.value, copies[id(part.value)]):
                kept.append(replace(part, value=copies[id(part.value)]))
        kept += states

    @contextmanager
    def left_to_backward(self) -> Iterator[None]:
        """Leaves what a forward within writes to as it is, because its backward pass may need it.

        What comes after gets a copy in its place, until `settle`.
        """
        before = [(tensors, name, tensors[name]) for tensors, name in self._writable if tensors[name] is not None]
        versions = [internals.version(tensor) for _, _, tensor in before]
        yield
        copies: dict[int, Tensor] = {}
        for (tensors, name, tensor), version in zip(before, versions, strict=True):
            if tensors[name] is tensor and internals.version(tensor) != version:
                tensors[name] = copies.setdefault(id(tensor), tensor.detach().clone())
                self._replaced.setdefault((id(tensors), name), (tensors, tensor))

    @torch.no_grad()
    def settle(self) -> None:
        """Gives the tensors of the module, after the backward passes, the values of their copies."""
        for (_, name), (tensors, tensor) in self._replaced.items():
            restore(tensor, tensors[name])
            tensors[name] = tensor
        self._replaced.clear()

    @contextmanager
    def as_before(self, kept: Sequence[HeldState]) -> Iterator[None]:
        """Puts the saved buffers in their places for a while; what forward does to them is lost."""
        # Not their values: a backward pass may need what was computed with, and the buffers themselves are not touched.
        now = [HeldState.of(part.owner, part.name) for part in kept]
        for part in kept:
            part.put()
        try:
            yield
        finally:
            for part in now:
                part.put()


@dataclass
class _Sums:
    """Of one layer and batch, over all micro-batches: elements a channel, their sum, and that of their squares."""

    count: int
    total: Tensor
    squares: Tensor


class RunningStatistics:
    """Updates the running statistics of BatchNorm layers that see a batch micro-batch after micro-batch.

    Each micro-batch is normalised by its own mean and variance. For evaluation a layer keeps running averages:

        deferred     are updated once a batch, by the mean and variance of all its micro-batches together, as one device
                     would that had normalised the pieces (GPipe, section 2.3; torchgpipe's DeferredBatchNorm)
        at once      by each micro-batch, as torch does: m small steps a batch instead of one
    """

    def __init__(self, module: nn.Module, deferred: bool) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
        self._layers = [each for each in layers if each.running_mean is not None and not each.running_mean.is_meta]
        self._deferred = deferred
        self._sums: dict[BatchNorm, _Sums] = {}
        self._counting = False
        for layer in self._layers if deferred else ():
            layer.register_forward_pre_hook(self._see)

    @contextmanager
    def following(self, again: bool = False) -> Iterator[None]:
        """Lets the layers run on a micro-batch; one that runs `again` is not counted."""
        if not (self._deferred and self._layers):
            yield
            return
        held = [layer.track_running_stats for layer in self._layers]
        self._counting = not again
        for layer in self._layers:
            layer.track_running_stats = False
        try:
            yield
        finally:
            self._counting = False
            for layer, tracks in zip(self._layers, held, strict=True):
                layer.track_running_stats = tracks

    @torch.no_grad()
    def commit(self) -> None:
        """Updates the averages, when all micro-batches of a batch have been seen."""
        for layer, sums in self._sums.items():
            mean = sums.total / sums.count
            move_running_averages(layer, mean, (sums.squares - sums.total * mean) / max(1, sums.count - 1))
        self._sums.clear()

    @torch.no_grad()
    def _see(self, layer: nn.Module, inputs: Any) -> None:
        assert isinstance(layer, BatchNorm)
        if not (self._counting and layer.training):
            return
        x = inputs[0].detach()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        # Sums of squares lose digits where the mean is large, and what they lose is not in the running variance then.
        wide = x.double()
        count = x.numel() // max(1, x.shape[1])
        seen = _Sums(count, wide.sum(dims), wide.square().sum(dims))
        sums = self._sums.get(layer)
        if sums is not None:
            seen = _Sums(sums.count + count, sums.total + seen.total, sums.squares + seen.squares)
        self._sums[layer] = seen
