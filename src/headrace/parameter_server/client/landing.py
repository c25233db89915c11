"""Where the parameters that a worker pulls land."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.devices import HOST, kind_of, runtime_of
from headrace.trees import as_bytes

_ALIGNED = 16
"""Of a shard in host memory, in bytes: a multiple of the size of any element."""


class Landing:
    """A worker's copy of one server's parameters, as the bytes of each shard, `(bytes,)` uint8.

    Where it is on a device with streams, shards are written to pinned host memory, and copied from there in the order
    of the device's work: the thread waits for none of the copies.
    """

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = [as_bytes(place) for place in places]
        self._host, self._copied, self._written = self._places, None, list[int]()
        devices = {place.device for place in places}
        device = devices.pop() if len(devices) == 1 else torch.device(HOST)
        if kind_of(device.type).streams:
            self._runtime: Any = runtime_of(device.type)
            rooms = [-(-len(place) // _ALIGNED) * _ALIGNED for place in self._places]
            block = torch.empty(max(1, sum(rooms)), dtype=torch.uint8, pin_memory=True)
            starts = accumulate(rooms, initial=0)
            self._host = [block[start : start + len(place)] for start, place in zip(starts, self._places, strict=False)]

    def __len__(self) -> int:
        return len(self._places)

    def place(self, shard: int) -> Tensor:
        """Returns where the shard's bytes are to be written; `land` brings them to the worker's copy."""
        if self._host is not self._places:
            # As a rule the device has long done it: the gradients of a step have come from it since.
            if self._copied is not None and not self._copied.query():
                self._copied.synchronize()
            self._copied = None
            self._written.append(shard)
        return self._host[shard]

    def land(self) -> None:
        """Begins the copies of what was written."""
        if self._written:
            for shard in dict.fromkeys(self._written):
                self._places[shard].copy_(self._host[shard], non_blocking=True)
            self._copied = self._runtime.current_stream(self._places[0].device).record_event()
            self._written.clear()
