"""Copies of a device's tensors in host memory, made beside training: a checkpoint takes no memory of the device.

    device   computing   │ update, round 7 │ forward and backward of round 8 │ waits for the event │ update
             copying                       └─► chunk ─► chunk ─► ... ─► chunk ─► event
    host     saver                           waits for the event ──────────────┴─► writes

The copies lie in pinned blocks, which the next checkpoint uses again. Neither of the two threads waits for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from headrace import internals
from headrace.checkpoint.tensors import chunks
from headrace.devices import kind_of, runtime_of
from headrace.errors import UnfitMachine
from headrace.machine.resources import spare_memory_bytes
from headrace.shared_memory.layout import on_lines

CHUNK = 32 << 20
"""Bytes that are copied at a time, so that other copies to the host come between them."""

_FIRST, _USUAL = 16 << 20, 1 << 30
"""Bytes of the first block and of a later one: powers of 2, to which torch rounds pinned memory."""


class Copied:
    """The copies of one state, which may still be on their way.

    Attributes:
        arrived: the event after the last of them; None where they are there.
        torn: whether something was written to before it was copied; None while that is not known.
    """

    def __init__(self, arrived: Any, sources: Sequence[Tensor], torn: bool | None) -> None:
        self.arrived = arrived
        self.torn = torn
        self._versions = [(source, internals.version(source)) for source in sources]

    def written(self) -> bool:
        """Tells whether anything has been written to what was copied."""
        return any(internals.version(source) != version for source, version in self._versions)

    def wait(self) -> bool:
        """Blocks until the copies are there; returns whether they are those of one moment. For the saver's thread."""
        if self.arrived is not None:
            self.arrived.synchronize()
        # In this order: an update writes after `hold` has told what was written before it.
        return not self.written() or self.torn is False


class HostCopies:
    """Copies one state after the other to the same host memory.

    Args:
        device: where the tensors are. Where it has no streams, by the device table, the thread waits for each copy.
        late: whether nothing but `hold`'s caller writes to what lasts. Then this is copied on a stream of its own until
            `hold`, from the second state on: with the first one it is seen whether forward writes to parameters.
    """

    def __init__(self, device: torch.device, late: bool) -> None:
        self._device = device
        self._runtime = runtime_of(device.type) if kind_of(device.type).streams else None
        self._side = self._runtime.Stream(device) if self._runtime else None
        self._may_be_late, self._late = late and self._runtime is not None, False
        self._blocks: list[Tensor] = []
        self._block = self._at = 0
        self._sources: list[Tensor] = []
        self._last: Copied | None = None

    def begin(self) -> None:
        """Begins with another state, over the memory of the last one, which no thread reads any more."""
        self.hold()
        self._block = self._at = 0
        if self._side:
            self._side.wait_stream(self._computing())

    def copy(self, tensor: Tensor, lasting: bool, flat: bool = False) -> Tensor:
        """Returns the copy, which is there when `end`'s result has been waited for; `flat` or in the tensor's shape.

        `lasting` says that the tensor stays where it is, and that nothing writes to it before `hold`.
        """
        tensor = tensor.detach()
        plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        if self._runtime is None or not plain or not tensor.numel():
            return tensor.cpu().flatten() if flat else tensor.cpu()
        if lasting:
            self._sources.append(tensor)
        # Those of a dense tensor are its own.
        strides = torch.empty_like(tensor, device="meta").stride()
        dense = tensor.is_contiguous() if flat else strides == tensor.stride()
        target = self._place(tensor.nbytes).view(tensor.dtype)
        with self._runtime.stream(self._side) if lasting and self._late else nullcontext():
            start = 0
            for piece in _pieces(tensor, dense):
                target[start : start + len(piece)].copy_(piece, non_blocking=True)
                start += len(piece)
        if flat:
            return target
        return target.as_strided(tensor.shape, strides) if dense else target.view(tensor.shape)

    def end(self) -> Copied:
        """Returns when the copies of this state are there."""
        arrived = None
        if self._side:
            # What does not last was copied where the device computes.
            self._side.wait_stream(self._computing())
            arrived = self._side.record_event()
        self._last = Copied(arrived, self._sources, None if self._late else False)
        self._sources = []
        return self._last

    def hold(self) -> None:
        """Lets what the device does next wait for the copies. Called before each update; the thread does not wait."""
        last, self._last = self._last, None
        if last is None:
            return
        if self._late:
            self._computing().wait_event(last.arrived)
        written = last.written()
        last.torn = self._late and written
        self._may_be_late = self._may_be_late and not written
        self._late = self._may_be_late

    def _computing(self) -> Any:
        assert self._runtime is not None
        return self._runtime.current_stream(self._device)

    def _place(self, count: int) -> Tensor:
        """Returns pinned memory of so many bytes."""
        while self._block < len(self._blocks) and self._at + count > len(self._blocks[self._block]):
            self._block, self._at = self._block + 1, 0
        if self._block == len(self._blocks):
            held = sum(map(len, self._blocks))
            self._blocks.append(_pinned(max(1 << (count - 1).bit_length(), min(max(held, _FIRST), _USUAL)), held))
        start, self._at = self._at, on_lines(self._at + count)
        return self._blocks[self._block][start : start + count]


def _pinned(count: int, held: int) -> Tensor:
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise UnfitMachine(
            f"a checkpoint is copied to pinned host memory, and after {held:,} bytes of it there are no {count:,} more "
            f"(this host has {spare_memory_bytes():,} left; ulimit -l limits what is pinned): {error!s:.200}; use "
            "fully_sharded, whose workers each save a part, fewer workers on a host, or checkpoints=False"
        ) from error


def _pieces(tensor: Tensor, dense: bool) -> Iterator[Tensor]:
    """Yields flat pieces: of a dense tensor in the order of its memory, of another one row by row."""
    if not dense:
        yield from chunks(tensor)
        return
    yield from tensor.as_strided((tensor.numel(),), (1,)).split(CHUNK // tensor.element_size())
