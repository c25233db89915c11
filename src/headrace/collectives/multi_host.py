"""Collectives of processes on several hosts: torch.distributed's gloo carries them over TCP.

Each process has a control page of its own, and somebody else brings the marks of all of them to each. What rank 0
decides for a round comes with the first sum or barrier of it, because that is when all must know.
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
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    Work,
)

from headrace.collectives.base import ProcessGroup
from headrace.shared_memory.barrier import reached
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.finished_ranks import FinishedRanks

_SLICE = timedelta(milliseconds=50)

_ON_THE_WAY_S = 5.0

Grow = Callable[[str, int, int], ProcessGroupGloo]
Accuse = Callable[[Exception, int | None], NoReturn]

_FOREVER = timedelta(days=365)
"""gloo's own limit would take a long step for a loss; signs of life are looked at instead."""


def connect(store: Store, rank: int, world: int, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Connects every rank with every other; all call it.

    Args:
        store: where the ranks find each other.
        rank: this process's.
        world: how many there are.
        address: of this host, where the others reach it.
        timeout_s: longest wait for the others.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, world, options)


class MultiHostGroup(ProcessGroup):
    """The processes of all hosts of a run.

    `sum` and `barrier` bring rank 0's `stop_after` and `save_after` into every page.

    Args:
        group: connects them.
        page: this process's own, with the others' marks.
        rank: this process's.
        check: called while waiting; raises where a peer was lost.
        accuse: called when a connection has broken, with the place in the page of whoever was at its other end, if one
            was; raises, and says who was lost.
        grow: connects some of the ranks with each other: given a name, this one's place, and how many there are; None
            where there are no groups in this one.
        seats: places in the page of the ranks; None for all.
        ends: whose loop has ended; None where the page tells it.
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
        self.moved_bytes = 0
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
        seats = [self._seats[member] for member in members]
        ends = self.ends.among(members)
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
        # They only grow, and in a group in this one it may be anybody who knows.
        page.stop_after, page.save_after = (int(max(row[index] for row in rows)) for index in (0, 1))
        return [sum(column) for column in zip(*(row[2:] for row in rows), strict=True)]

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        if not tensor.is_contiguous():
            raise ValueError("all_reduce needs a contiguous tensor")
        options = AllreduceOptions()
        options.timeout = _FOREVER
        # A ring sends and receives 2 (world - 1) / world of the tensor.
        self.moved_bytes += 4 * (self.world - 1) * tensor.nbytes // self.world
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
        # It goes to each of the others, and one comes from each.
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
            # Its destructor would wait for what will never end.
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
            # Not in time, or not at all: the last wait says it.
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
            # Its counter is of all ranks' meetings. What it sent before its loop ended may still be on the way.
            return monotonic() - self._seen_ended_s.setdefault(peer, monotonic()) < _ON_THE_WAY_S
        return reached(self._page.ranks[self._seats[peer]].barrier_counter, target)
