"""Collectives of processes on several hosts: torch.distributed's gloo carries them over TCP.

Each process has a control page of its own, and somebody else brings the marks of all of them to each. What rank 0
decides for a round comes with the first sum or barrier of it, because that is when all must know.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
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

from headrace.comm.barrier import check_left, reached
from headrace.comm.collective import SharedCollective
from headrace.comm.control import ControlPage

__all__ = ["BetweenHosts", "connect"]

_SLICE = timedelta(milliseconds=50)

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


class BetweenHosts(SharedCollective):
    """The processes of all hosts of a run.

    `sum` and `barrier` bring rank 0's `stop_after` and `save_after` into every page.

    Args:
        group: connects them.
        page: this process's own, with the others' marks.
        rank: this process's.
        check: called while waiting; raises where a peer was lost.
        accuse: called when a connection has broken; raises, and says who was lost.
    """

    one_memory = False

    def __init__(
        self,
        group: ProcessGroupGloo,
        page: ControlPage,
        rank: int,
        check: Callable[[], None],
        accuse: Callable[[Exception], NoReturn],
    ) -> None:
        self.rank = rank
        self.world = page.ranks
        self.moved_bytes = 0
        self._group: ProcessGroupGloo | None = group
        self._page = page
        self._check = check
        self._accuse = accuse
        self._peers = [peer for peer in range(self.world) if peer != rank]
        self._unfinished = 0

    def check(self) -> None:
        self._check()

    def barrier(self) -> None:
        self.sum([])

    def sum(self, values: Sequence[float]) -> list[float]:
        page = self._page
        own = torch.tensor([page.stop_after, page.save_after, *values], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.world)]
        self._begin(lambda group: group.allgather(every, own, _FOREVER))()
        self.moved_bytes += 2 * (self.world - 1) * own.nbytes
        rows = [row.tolist() for row in every]
        if self.rank != 0:
            page.stop_after, page.save_after = int(rows[0][0]), int(rows[0][1])
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

    def trade(self, pieces: Tensor) -> Tensor:
        options = AllToAllOptions()
        options.timeout = _FOREVER
        given = torch.empty_like(pieces)
        self._begin(lambda group: group.alltoall_base(given, pieces, [], [], options))()
        self.moved_bytes += 2 * (self.world - 1) * pieces.shape[1]
        return given

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        """Raises:
        NotImplementedError: hosts have no memory in common.
        """
        raise NotImplementedError("processes on several hosts share no memory; they exchange by collectives")

    def close(self) -> None:
        if self._unfinished:
            # Its destructor would wait for what will never end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    def _begin(self, act: Callable[[Any], Work]) -> Callable[[], None]:
        assert self._group is not None
        counter = self._page.counters[self.rank]
        counter[0] = target = (counter[0] + 1) & 0x7FFFFFFF
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
                check_left(self._page.ends, peer, self.rank, partial(self._has_come, peer, target))
        try:
            work.wait()
        except RuntimeError as error:
            self._accuse(error)
        self._unfinished -= 1

    def _has_come(self, peer: int, target: int) -> bool:
        return reached(self._page.counters[peer][0], target)
