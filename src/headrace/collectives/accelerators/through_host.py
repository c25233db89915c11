"""Collectives of an accelerator's tensors in host memory, where no backend carries those of all workers.

device    backward: bucket 0 │ bucket 1 │ ...            │ bucket 0 comes back │ update
          copying   └─► pinned ─► event
thread                          └─► sum over hosts, encrypted ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from headrace.collectives.accelerators.pinned import PinnedBlocks
from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.compression import PLAIN, Compression
from headrace.devices import HOST, kind_of


class ThroughHost(Collective):
    """Copies each tensor to host memory, has a group of processes exchange it there, and copies it back.

    Args:
        group: the processes. Those on CPUs call it itself, so that sums are `in_host`, unless there are none.
    """

    def __init__(self, group: ProcessGroup, in_host: bool = True) -> None:
        self.rank, self.world = group.rank, group.world
        self.near = None if group.one_memory else group
        self.in_host = in_host
        self.bucket_bytes = group.bucket_bytes
        self._group = group
        self._pinned: PinnedBlocks | None = None

    def barrier(self) -> None:
        self._group.barrier()

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        copy, arrived, bring = self._copied(tensor)
        compression, start = compression.of(copy, tensor), self._group.start_when
        if start is None:
            arrived()
        wait = start(arrived, copy, compression) if start else self._group.start_all_reduce(copy, compression)

        def finish() -> None:
            wait()
            bring()

        return finish

    def broadcast(self, tensor: Tensor) -> None:
        copy, arrived, bring = self._copied(tensor)
        arrived()
        self._group.broadcast(copy)
        bring()

    def gather(self, tensor: Tensor) -> Tensor:
        return self._group.gather(tensor.cpu()).to(tensor.device)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        return self._group.all_to_all(pieces.cpu()).to(pieces.device)

    def all_to_all_uneven(self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        given = self._group.all_to_all_uneven([piece.cpu() for piece in pieces], sizes)
        return [part.to(pieces[0].device) for part in given]

    def among(self, group: ProcessGroup, members: Sequence[int]) -> Collective | None:
        return ThroughHost(group, self.in_host)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values)

    def close(self) -> None:
        """The group is closed by who has made it."""

    def _copied(self, tensor: Tensor) -> tuple[Tensor, Callable[[], object], Callable[[], object]]:
        """Begins to copy a tensor; returns the copy, what waits for it, and what copies it back at last."""
        if tensor.device.type == HOST or not kind_of(tensor.device.type).streams:
            copy = tensor.cpu()
            return copy, _nothing, lambda: None if copy is tensor else tensor.copy_(copy)
        blocks = self._pinned = self._pinned or PinnedBlocks(tensor.device)
        block = blocks.take(tensor.nbytes)
        copy = block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copied = blocks.fetch([(copy, tensor)])

        def bring() -> None:
            tensor.copy_(copy, non_blocking=True)
            # The next copy to it begins after this one.
            blocks.give(block)

        return copy, copied.synchronize, bring


def _nothing() -> None: ...
