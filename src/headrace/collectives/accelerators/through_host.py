"""Collectives of an accelerator's tensors in host memory, where no backend carries those of all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from headrace.collectives.base import Collective, ProcessGroup


class ThroughHost(Collective):
    """Copies each tensor to host memory, has a group of processes exchange it there, and copies it back.

    The others of the group may be on CPUs, and call the group itself.

    Attributes:
        near: what exchanges tensors that lie in host memory; None where that is shared.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.world = group.rank, group.world
        self.near = None if group.one_memory else group
        self._group = group

    def barrier(self) -> None:
        self._group.barrier()

    def all_reduce(self, tensor: Tensor) -> None:
        self._with_copy(tensor, self._group.all_reduce)

    def broadcast(self, tensor: Tensor) -> None:
        self._with_copy(tensor, self._group.broadcast)

    def gather(self, tensor: Tensor) -> Tensor:
        return self._group.gather(tensor.cpu()).to(tensor.device)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        return self._group.all_to_all(pieces.cpu()).to(pieces.device)

    def among(self, group: ProcessGroup, members: Sequence[int]) -> Collective | None:
        return ThroughHost(group)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._group.sum(values)

    def close(self) -> None:
        """The group is closed by who has made it."""

    def _with_copy(self, tensor: Tensor, exchange: Callable[[Tensor], None]) -> None:
        copy = tensor.cpu()
        exchange(copy)
        tensor.copy_(copy)
