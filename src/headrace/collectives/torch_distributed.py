"""Collectives by torch.distributed: NCCL among GPUs, and gloo over TCP between the processes of several hosts.

Between hosts, each process has a control page of its own, and the engine copies the other processes' records into it.
What rank 0 decides for a round comes with the first sum or barrier of it, because then all must know.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    Work,
)

from headrace.collectives.base import Collective, ProcessGroup
from headrace.shared_memory.barrier import FinishedRanks, reached
from headrace.shared_memory.control_page import ControlPage

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "tpu": "tpu_dist"}
"""Which backend of torch.distributed carries a device's tensors."""


class TorchDistributed(Collective):
    """A process group of torch.distributed for tensors of `device` ("cuda:0"); ranks find each other in `store`."""

    def __init__(self, store: Store, rank: int, world: int, device: str, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self._device = torch.device(device)
        dist.init_process_group(
            BACKENDS[self._device.type],
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=self._device if self._device.type == "cuda" else None,
        )

    def barrier(self) -> None:
        self.sum([0.0])

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
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


_SLICE = timedelta(milliseconds=50)
_ON_THE_WAY_S = 5.0
Grow = Callable[[str, int, int], ProcessGroupGloo]
Accuse = Callable[[Exception, int | None], NoReturn]
_FOREVER = timedelta(days=365)
"""gloo's own limit would take a long step for a loss; heartbeats are checked instead."""


def connect(store: Store, rank: int, world: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Connects every rank with every other; all call it, each with the address of its host."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, world, options)


class MultiHostGroup(ProcessGroup):
    """The processes of all hosts of a run.

    `sum` and `barrier` bring rank 0's `stop_after` and `save_after` into every page. `accuse` is called when a
    connection has broken, with the peer's place in the page if it is known; it raises and names the lost rank. `grow`
    connects some of the ranks with each other, given a name, this one's place, and how many there are; None for a group
    without groups in it. `seats` are the ranks' places in the page, None for all; `ends` is None where the page tells.
    """

    one_memory = False

    def __init__(
        self,
        group: ProcessGroupGloo,
        page: ControlPage,
        rank: int,
        check: Callable[[], None],
        accuse: Accuse,
        grow: Grow | None = None,
        seats: Sequence[int] | None = None,
        ends: FinishedRanks | None = None,
    ) -> None:
        self._seats = range(len(page.ranks)) if seats is None else seats
        self._whole = seats is None
        self._seat = rank
        self.rank = self._seats.index(rank)
        self.world = len(self._seats)
        self._group: ProcessGroupGloo | None = group
        self._page = page
        self._check = check
        self._accuse = accuse
        self.ends = ends or FinishedRanks([record.heartbeat for record in page.ranks])
        self._peers = [peer for peer in range(self.world) if peer != self.rank]
        self._unfinished = 0
        self._grow = grow
        self.groups: list[MultiHostGroup] = []
        self._seen_ended_s: dict[int, float] = {}

    def subgroup(self, members: Sequence[int]) -> MultiHostGroup:
        if self._grow is None:
            raise NotImplementedError("a group in a group has no groups in it")
        name = f"{len(self.groups)}/{'-'.join(map(str, members))}"
        connected = self._grow(name, list(members).index(self.rank), len(members))
        seats, ends = [self._seats[member] for member in members], self.ends.among(members)
        group = MultiHostGroup(connected, self._page, self._seat, self._check, self._accuse, None, seats, ends)
        if self.home:
            group.home = replace(self.home, hosts=tuple(self.home.hosts[member] for member in members))
        self.groups.append(group)
        return group

    def check(self, peer: int | None = None, broken: str = "") -> None:
        self._check()
        if peer is not None and broken:
            self._accuse(ConnectionError(broken), self._seats[peer])

    def barrier(self) -> None:
        self.sum([])

    def sum(self, values: Sequence[float]) -> list[float]:
        page = self._page
        own = torch.tensor([page.stop_after, page.save_after, *values], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.world)]
        self._begin(lambda group: group.allgather(every, own, _FOREVER))()
        self.moved_bytes += 2 * (self.world - 1) * own.nbytes
        rows = [row.tolist() for row in every]
        # They only grow, and in a subgroup any rank may be the one that knows.
        page.stop_after, page.save_after = (int(max(row[index] for row in rows)) for index in (0, 1))
        return [sum(column) for column in zip(*(row[2:] for row in rows), strict=True)]

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        if not tensor.is_contiguous():
            raise ValueError("all_reduce needs a contiguous tensor")
        options = AllreduceOptions()
        options.timeout = _FOREVER
        self._count_ring(tensor)
        return self._begin(lambda group: group.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.timeout = _FOREVER
        if tensor.numel():
            # Bytes, because not every type of numbers can be sent.
            content = tensor.view(-1).view(torch.uint8)
            self._begin(lambda group: group.broadcast([content], options))()
        self.moved_bytes += tensor.nbytes * (self.world - 1 if self.rank == 0 else 1)

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.world, len(tensor))
        own = tensor.contiguous()
        self._begin(lambda group: group.allgather(list(every.unbind()), own, _FOREVER))()
        # It goes to each of the others, and each sends one.
        self.moved_bytes += 2 * (self.world - 1) * len(tensor)
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        options = AllToAllOptions()
        options.timeout = _FOREVER
        given = torch.empty_like(pieces)
        self._begin(lambda group: group.alltoall_base(given, pieces, [], [], options))()
        self.moved_bytes += 2 * (self.world - 1) * pieces.shape[1]
        return given

    def close(self) -> None:
        for group in self.groups:
            group.close()
        if self._unfinished:
            # Its destructor would wait for operations that never end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _begin(self, act: Callable[[Any], Work]) -> Callable[[], None]:
        assert self._group is not None
        own = self._page.ranks[self._seat]
        if self._whole:
            own.barrier_counter = (own.barrier_counter + 1) & 0x7FFFFFFF
        target = own.barrier_counter
        self._unfinished += 1
        return partial(self._finish, act(self._group), target)

    def _finish(self, work: Work, target: int) -> None:
        while not work.is_completed():
            # A time-out or a failure: the wait below tells which.
            with suppress(RuntimeError):
                work.wait(_SLICE)
                continue
            self._check()
            for peer in self._peers:
                self.ends.check(peer, self.rank, partial(self._has_come, peer, target))
        try:
            work.wait()
        except RuntimeError as error:
            self._accuse(error, None)
        self._unfinished -= 1

    def _has_come(self, peer: int, target: int) -> bool:
        if not self._whole:
            # Its counter counts barriers of all ranks. What it sent before its loop ended may still be on the way.
            return monotonic() - self._seen_ended_s.setdefault(peer, monotonic()) < _ON_THE_WAY_S
        return reached(self._page.ranks[self._seats[peer]].barrier_counter, target)
