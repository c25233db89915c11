"""Buffers that forward moves: power iterations of a spectral norm, running averages, counters.

A forward that is run again must start from the buffers as they were at its first time, or it would compute something
else, and leave them as they are now.

    first time     u0 ─► forward ─► u1 ─► forward of the next ─► u2        u0 is kept, because it was moved
    once more      u0 ─► forward ─► u1 thrown away; the module has u2 again
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SavedBuffer:
    """A buffer as it was.

    Attributes:
        owner, name: where it belongs.
        value: a copy.
    """

    owner: nn.Module
    name: str
    value: Tensor


class SavedBuffers:
    """Args:
    module: whose.
    names: of those that may move, each by its first name.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        wanted = {id(buffer) for name, buffer in module.named_buffers() if name in names}
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if id(buffer) in wanted
        ]

    @contextmanager
    def watched(self) -> Iterator[list[SavedBuffer]]:
        """Yields what holds afterwards those that were moved meanwhile, as they were before."""
        before = [(owner, name, _buffer(owner, name)) for owner, name in self._places]
        # A buffer that several modules have stays one.
        copies = {id(buffer): buffer.clone() for _, _, buffer in before}
        kept: list[SavedBuffer] = []
        yield kept
        for owner, name, buffer in before:
            # By value, because batch_norm moves its averages without a new version.
            if owner._buffers[name] is not buffer or not torch.equal(buffer, copies[id(buffer)]):
                kept.append(SavedBuffer(owner, name, copies[id(buffer)]))

    @contextmanager
    def as_before(self, kept: Sequence[SavedBuffer]) -> Iterator[None]:
        """Puts others in the places of buffers for a while; they are moved and lost."""
        # Not their values: a backward pass may need what was computed with, and the buffers themselves are not touched.
        now = [(each, _buffer(each.owner, each.name)) for each in kept]
        for each in kept:
            each.owner._buffers[each.name] = each.value
        try:
            yield
        finally:
            for each, buffer in now:
                each.owner._buffers[each.name] = buffer


def _buffer(owner: nn.Module, name: str) -> Tensor:
    buffer = owner._buffers[name]
    assert buffer is not None
    return buffer
