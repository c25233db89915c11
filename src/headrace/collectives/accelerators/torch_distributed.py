"""Collectives of accelerators, by the backend of torch.distributed that the device table names: NCCL among GPUs.

A group of headrace's own: torch's default group, which a process has once, is left to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace import internals
from headrace.collectives.accelerators.backends import connect
from headrace.collectives.accelerators.divided import DividedTensors
from headrace.collectives.base import Collective, Peers, ProcessGroup
from headrace.collectives.compression import PLAIN, Compression
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.devices import kind_of
from headrace.errors import UnfitMachine

if TYPE_CHECKING:
    from headrace.internals import Store


class TorchDistributed(DividedTensors):
    """The ranks that find each other in `store`, each with a device of its own ("cuda:0"), whose tensors it carries.

    A call that is not done after `timeout_s` fails. What a call gives is there for what the device does next: only
    `sum` and `barrier` wait for the device.
    """

    def __init__(
        self, store: Store, rank: int, world: int, device: str, timeout_s: float, ranks: Sequence[int] = ()
    ) -> None:
        kind = kind_of(device)
        if not kind.backend:
            raise UnfitMachine(f"torch.distributed has no backend for {kind.row()}; use one worker, or device='cpu'")
        self.rank, self.world = rank, world
        self._store, self._device, self._timeout_s = store, torch.device(device), timeout_s
        self.groups: list[TorchDistributed] = []
        self._among: dict[tuple[int, ...], Collective] = {}
        self._backend = connect(kind, store, (rank, world), timeout_s, self._device, ranks)
        # Of others each send waits for the other side before the next call. A backend of somebody else may not say.
        batches = getattr(self._backend, "supports_coalescing", False)
        self.peers = TorchPeers(self._backend) if batches else None

    def among(self, group: ProcessGroup, members: Sequence[int]) -> Collective | None:
        key = tuple(members)
        if key == tuple(range(self.world)):
            return self
        if key not in self._among:
            self._among[key] = self._connect(key) if len(key) > 1 else ThreadCollective(ThreadGroup(1), 0)
        return self._among[key]

    def _connect(self, members: tuple[int, ...]) -> TorchDistributed:
        store = dist.PrefixStore("-".join(map(str, members)), self._store)  # type: ignore[attr-defined]
        place, world = members.index(self.rank), len(members)
        self.groups.append(TorchDistributed(store, place, world, str(self._device), self._timeout_s, members))
        return self.groups[-1]

    def barrier(self) -> None:
        self.sum([0.0])

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        work = self._backend.allreduce([tensor], dist.AllreduceOptions())
        self._count_ring(tensor)

        def wait() -> None:
            work.wait()

        return wait

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._backend.broadcast([tensor], options).wait()
        self.moved_bytes += tensor.nbytes

    def sum(self, values: Sequence[float]) -> list[float]:
        own = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        every = own.new_empty(self.world, len(own))
        self._gather_into(every, own)
        totals: list[float] = every.cpu().sum(0).tolist()
        return totals

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._backend.shutdown()

    def abort(self) -> None:
        """Ends what is under way without the others: whoever waits for it gets an error."""
        for group in self.groups:
            group.abort()
        self._backend.abort()


class TorchPeers(Peers):
    """Send and receive of a backend of torch.distributed."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        # In one batch, so that neither of two ranks that send to each other waits for the other.
        internals.begin_batch(self._backend)()
        for tensor, peer in sends:
            self._backend.send([tensor], peer, 0)
        for tensor, peer in receives:
            self._backend.recv([tensor], peer, 0)
        work: Any = internals.end_batch(self._backend)()

        def wait() -> None:
            work.wait()

        return wait
