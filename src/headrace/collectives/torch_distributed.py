"""Collectives by torch.distributed, with the backend that the device table names: NCCL among GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.collectives.base import Collective
from headrace.collectives.compression import PLAIN, Compression
from headrace.devices import kind_of
from headrace.errors import UnfitMachine

if TYPE_CHECKING:
    from headrace.internals import Store


class TorchDistributed(Collective):
    """A process group of torch.distributed for tensors of `device` ("cuda:0"); ranks find each other in `store`."""

    def __init__(self, store: Store, rank: int, world: int, device: str, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        kind = kind_of(device)
        if not kind.backend:
            raise UnfitMachine(f"torch.distributed has no backend for {kind.row()}; use one worker, or device='cpu'")
        self._device = torch.device(device)
        dist.init_process_group(
            kind.backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=self._device if kind.binds else None,
        )

    def barrier(self) -> None:
        self.sum([0.0])

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        work = dist.all_reduce(tensor, async_op=True)
        self._count_ring(tensor)

        def wait() -> None:
            work.wait()

        return wait

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)
        self.moved_bytes += tensor.nbytes

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.world, len(tensor))
        dist.all_gather(list(every.unbind()), tensor.contiguous())
        # It goes to each of the others, and each sends one.
        self.moved_bytes += 2 * (self.world - 1) * len(tensor)
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        given = torch.empty_like(pieces)
        dist.all_to_all_single(given, pieces)
        self.moved_bytes += 2 * (self.world - 1) * pieces.shape[1]
        return given

    def sum(self, values: Sequence[float]) -> list[float]:
        every = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(every) for _ in range(self.world)]
        dist.all_gather(gathered, every)
        totals: list[float] = torch.stack(gathered).cpu().sum(0).tolist()
        return totals

    def close(self) -> None:
        dist.destroy_process_group()
