"""Pinned host memory through which a device's tensors pass, by copies beside what is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headrace.devices import runtime_of


class PinnedBlocks:
    """The pinned memory of one device that has streams, block by block.

    Attributes:
        runtime: what torch has of the kind of device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.runtime = runtime_of(device.type)
        self._side = self.runtime.Stream(device)
        self._free: list[tuple[Tensor, Any]] = []

    def take(self, nbytes: int) -> Tensor:
        """Returns a block of at least so many bytes, uint8, of which no copy is under way."""
        for index, (block, copied) in enumerate(self._free):
            if len(block) >= nbytes and (copied is None or copied.query()):
                del self._free[index]
                return block
        # A power of 2, to which torch rounds it.
        return torch.empty(1 << max(12, (nbytes - 1).bit_length()), dtype=torch.uint8, pin_memory=True)

    def give(self, block: Tensor, copied: Any = None) -> None:
        """Takes a block back; `copied` is the event after which nothing is copied from it."""
        self._free.append((block, copied))

    def fetch(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copies each second tensor to the first, in pinned memory; returns the event after the last.

        It begins when the device has done what it was asked before, copies from pinned memory too.
        """
        self._side.wait_stream(self.computing())
        with self.runtime.stream(self._side):
            for place, tensor in copies:
                place.copy_(tensor, non_blocking=True)
        return self._side.record_event()

    def computing(self) -> Any:
        """Returns the stream on which this thread computes."""
        return self.runtime.current_stream(self._device)
