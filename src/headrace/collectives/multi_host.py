"""Collectives of the processes of several hosts: shared memory inside a host, encrypted connections between hosts.

    host 0   rank 0 ┐ share 0 ◄═══════════► share 0 ┌ rank 2   host 1
                    │ shared memory   shared memory │
             rank 1 ┘ share 1 ◄═══════════► share 1 └ rank 3

The ranks of a host add up one share each, sum it with the ranks of the other hosts that have the same share, and read
all shares: with L ranks a host, 1/L of a flat ring's bytes leave it. Where hosts have unequal numbers of ranks, there
are as many shares as the smallest host has ranks. What is small goes through the first rank of each host.

Each process has a control page of its own, and the engine copies the other processes' records into it. What rank 0
decides for a round comes with the first sum or barrier of it, because then all must know.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from headrace.collectives.base import HostMap, ProcessGroup, add_in_order, gather_texts
from headrace.collectives.compression import PLAIN, Compression
from headrace.collectives.links import HostLinks
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import PeersApart, UnfitMachine
from headrace.shared_memory.barrier import reached
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks
from headrace.shared_memory.segment import SharedSegment

T = TypeVar("T")

_SMALL_BYTES = 64 * 1024
"""Of all ranks together: so little is gathered and added up by each, which takes one way between hosts, not two."""
_WINDOW_BYTES = 32 << 20
"""What ranks of a host put into shared memory at a time."""


@dataclass(frozen=True)
class Watch:
    """How a process notices that others are lost.

    Attributes:
        page: its control page, with the marks of all.
        check: called about every 50 ms of waiting; raises where a process is lost.
        accuse: called when a connection has broken, with the place in the page of the process at its other end;
            raises, and names the lost one.
        timeout_s: so long a connection may be silent.
    """

    page: ControlPage
    check: Callable[[], None]
    accuse: Callable[[Exception, int], NoReturn]
    timeout_s: float


class MultiHostGroup(ProcessGroup):
    """The processes of all hosts of a run, or some of them: those with the places `seats` in the page, None for all.

    `sum` and `barrier` bring rank 0's `stop_after`, `save_after` and `rate_after` into every page. `tell` returns
    the texts of all ranks of this group, by rank; every rank makes the group at the same time. `ends` is None where the
    page tells.

    Attributes:
        abandoned: whether it is closed in the middle of what it does, so that nothing more is sent.
        between_hosts_bytes: that this rank has sent to other hosts and received from them.
    """

    one_memory = False
    # The first leaves early, because backward is short beside a slow link; a link with much latency needs large ones.
    bucket_bytes = (1 << 20, 8 << 20)
    home: HostMap
    between_hosts_bytes = 0

    def __init__(
        self,
        watch: Watch,
        rank: int,
        home: HostMap,
        tell: Callable[[str], Sequence[str]],
        seats: Sequence[int] | None = None,
        ends: FinishedRanks | None = None,
    ) -> None:
        self.rank, self.world, self.home = rank, len(home.hosts), home
        self._watch = watch
        self._whole = seats is None
        self._seats = range(self.world) if seats is None else seats
        self.ends = ends or FinishedRanks([record.heartbeat for record in watch.page.ranks])
        self.groups: list[MultiHostGroup] = []
        self._target = 0
        self._closed = self.abandoned = False
        self._background: ThreadPoolExecutor | None = None
        self.start_barrier = lambda: self._start(partial(self._sum, []))
        self.start_when = lambda *what: self._start(partial(self._all_reduce_when, *what))
        self._pending: list[Future[object]] = []
        names = list(dict.fromkeys(home.hosts))
        self._mates = [[r for r in range(self.world) if home.hosts[r] == name] for name in names]
        self._host = names.index(home.hosts[rank])
        self._own = self._mates[self._host]
        self._place = self._own.index(rank)
        self._shares = min(map(len, self._mates))
        self._segment: SharedSegment | None = None
        self._local: SharedMemoryGroup | None = None
        self._links: HostLinks | None = None
        self._regions: tuple[Tensor, ...] = ()
        try:
            self._connect(tell)
            self.barrier()
            if len(self._own) == self.world:
                self.in_memory = self._local or ThreadCollective(ThreadGroup(1), 0)
        except BaseException:
            self.close()
            raise

    def subgroup(self, members: Sequence[int]) -> MultiHostGroup:
        def tell(text: str) -> list[str]:
            every = gather_texts(self, text)
            return [every[member] for member in members]

        home = replace(self.home, hosts=tuple(self.home.hosts[member] for member in members))
        seats, ends = [self._seats[member] for member in members], self.ends.among(members)
        self.groups.append(MultiHostGroup(self._watch, list(members).index(self.rank), home, tell, seats, ends))
        return self.groups[-1]

    def check(self, peer: int | None = None, broken: str = "") -> None:
        self._watch.check()
        if peer is not None and broken:
            self._watch.accuse(ConnectionError(broken), self._seats[peer])

    def barrier(self) -> None:
        self.sum([])

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._now(partial(self._sum, values))

    def _sum(self, values: Sequence[float]) -> list[float]:
        page = self._watch.page
        own = torch.tensor([page.stop_after, page.save_after, page.rate_after, *values], dtype=torch.float64)
        rows = self._gather(own.view(torch.uint8)).view(torch.float64).tolist()
        # They only grow, and in a subgroup any rank may be the one that knows.
        decided = [int(max(row[index] for row in rows)) for index in range(3)]
        page.stop_after, page.save_after, page.rate_after = decided
        return [add_in_order(column) for column in zip(*(row[3:] for row in rows), strict=True)]

    def all_reduce(self, tensor: Tensor) -> None:
        self._now(partial(self._all_reduce, _flat(tensor), PLAIN))

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        return self._start(partial(self._all_reduce, _flat(tensor), compression))

    def broadcast(self, tensor: Tensor) -> None:
        self._now(partial(self._broadcast, _flat(tensor).view(torch.uint8)))

    def gather(self, tensor: Tensor) -> Tensor:
        return self._now(partial(self._gather, tensor.contiguous()))

    def all_to_all(self, pieces: Tensor) -> Tensor:
        return self._now(partial(self._all_to_all, pieces))

    def close(self) -> None:
        self._closed = True
        for group in self.groups:
            group.abandoned |= self.abandoned
            group.close()
        if self._background:
            self._background.shutdown()
        self._regions = ()
        if self._links:
            self._links.close(lingers=not self.abandoned)
        for each in (self._local, self._segment):
            if each:
                each.close()
        self._links = self._local = self._segment = self.in_memory = None

    def _connect(self, tell: Callable[[str], Sequence[str]]) -> None:
        hosts, page = len(self._mates), []
        if len(self._own) > 1 and self._place == 0:
            self._segment = SharedSegment.create(ControlPage.nbytes(len(self._own)), "host")
            page = [os.getpid(), self._segment.descriptor, self._segment.nbytes]
        if hosts > 1 and self._place < self._shares:
            timeout_s = self._watch.timeout_s
            self._links = HostLinks(self._host, hosts, self.home, self._check_host, timeout_s)
        addresses = self._links.addresses if self._links else {}
        told = [json.loads(text) for text in tell(json.dumps([page, addresses]))]
        if len(self._own) > 1:
            self._segment = self._segment or self._opened(told[self._own[0]][0])
            ends = self.ends.among(self._own)
            local_page = ControlPage(self._segment, len(self._own))
            self._local = SharedMemoryGroup(local_page, self._place, self._check_open, ends)
        if self._links:
            others = [host for host in range(hosts) if host != self._host]
            given = {host: told[self._mates[host][self._place]][1][str(self._host)] for host in others}
            self._links.connect(given)

    def _opened(self, offer: Sequence[int]) -> SharedSegment:
        """Opens what the first rank of this host has offered, which may have died since."""
        try:
            return SharedSegment.open(*offer)
        except UnfitMachine as error:
            with suppress(PeersApart):
                self._watch.accuse(error, self._seats[self._own[0]])
            raise

    def _begin(self) -> int:
        """Counts a collective; returns its number."""
        own = self._watch.page.ranks[self._seats[self.rank]]
        if self._whole:
            own.barrier_counter = (own.barrier_counter + 1) & 0x7FFFFFFF
        return own.barrier_counter

    def _start(self, act: Callable[[], object]) -> Callable[[], None]:
        """Does a collective in a thread, after those that have been started; returns what waits for it."""
        self._background = self._background or ThreadPoolExecutor(1, "headrace-all-reduce")
        started = self._background.submit(self._do, self._begin(), act)
        # Who waits for one that has failed hears of it there.
        self._pending = [*(each for each in self._pending if not each.done()), started]

        def wait() -> None:
            started.result()

        return wait

    def _now(self, act: Callable[[], T]) -> T:
        """Does a collective after those that have been started."""
        for each in self._pending:
            each.result()
        self._pending.clear()
        return self._do(self._begin(), act)

    def _do(self, number: int, act: Callable[[], T]) -> T:
        self._target = number
        try:
            return act()
        finally:
            self.between_hosts_bytes = self._links.moved_bytes if self._links else 0
            self.moved_bytes = self.between_hosts_bytes + (self._local.moved_bytes if self._local else 0)

    def _all_reduce(self, flat: Tensor, compression: Compression) -> None:
        local, count = self._local, len(self._own)
        if self.world == 1 or not flat.numel():
            return
        if flat.nbytes * self.world <= _SMALL_BYTES:
            rows = self._gather(flat.view(torch.uint8)).view(flat.dtype)
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            flat.copy_(total)
        elif self._links is None and len(self._mates) == 1:
            assert local
            local.all_reduce(flat)
        elif local is None:
            self._between_hosts(flat, compression, flat.data_ptr())
        else:
            step = _WINDOW_BYTES // flat.element_size()
            for start in range(0, flat.numel(), step):
                self._reduce_window(local, flat[start : start + step], compression)
            local.moved_bytes += flat.nbytes * (3 * count - 2) // count

    def _all_reduce_when(self, arrived: Callable[[], object], tensor: Tensor, compression: Compression) -> None:
        arrived()
        self._all_reduce(_flat(tensor), compression)

    def _reduce_window(self, local: SharedMemoryGroup, window: Tensor, compression: Compression) -> None:
        if not self._regions or len(self._regions[0]) < window.nbytes:
            self._regions = local.share(window.nbytes)
        sources = [region[: window.nbytes].view(window.dtype) for region in self._regions]
        sources[self._place].copy_(window)
        local.barrier()
        if self._place < self._shares:
            low, high = (window.numel() * place // self._shares for place in (self._place, self._place + 1))
            total = sources[0][low:high]
            for source in sources[1:]:
                total.add_(source[low:high])
            self._between_hosts(total, compression, window[low:].data_ptr())
        local.barrier()
        window.copy_(sources[0])
        # Before any rank writes the next one.
        local.barrier()

    def _between_hosts(self, flat: Tensor, compression: Compression, place: int) -> None:
        assert self._links
        self._links.all_reduce(flat, compression.encoder(place, flat))

    def _gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.world, len(tensor))
        near = self._local.gather(tensor) if self._local else tensor[None]
        every[self._own] = near
        for host, rows in self._trade_between_hosts(dict.fromkeys(self._other_hosts, near), len(tensor)).items():
            every[self._mates[host]] = rows
        return every

    def _all_to_all(self, pieces: Tensor) -> Tensor:
        nbytes = pieces.shape[1]
        near = self._local.gather(pieces.reshape(-1)).view(-1, *pieces.shape) if self._local else pieces[None]
        given = torch.empty_like(pieces)
        given[self._own] = near[:, self.rank]
        outgoing = {host: near[:, self._mates[host]] for host in self._other_hosts}
        for host, rows in self._trade_between_hosts(outgoing, len(self._own) * nbytes).items():
            given[self._mates[host]] = rows.view(len(self._mates[host]), len(self._own), nbytes)[:, self._place]
        return given

    def _broadcast(self, content: Tensor) -> None:
        if self._links and self._place == 0:
            self._links.broadcast(content)
        if self._local:
            self._local.broadcast(content)

    @property
    def _other_hosts(self) -> list[int]:
        return [host for host in range(len(self._mates)) if host != self._host]

    def _trade_between_hosts(self, outgoing: dict[int, Tensor], nbytes: int) -> dict[int, Tensor]:
        """Sends rows to each host, and returns the rows, `nbytes` each, that each has sent, one a rank of it."""
        sizes = {host: len(self._mates[host]) * nbytes for host in self._other_hosts}
        every = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        received = dict(zip(sizes, every.split(list(sizes.values())), strict=True))
        if self._links and self._place == 0:
            self._links.trade({host: rows.reshape(-1) for host, rows in outgoing.items()}, received)
        if self._local and self._other_hosts:
            self._local.broadcast(every)
        return {host: rows.view(len(self._mates[host]), nbytes) for host, rows in received.items()}

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the group was closed before its collectives had ended")
        self._watch.check()

    def _check_host(self, host: int, broken: str) -> None:
        self._check_open()
        # Not those of other hosts, which may have done their part and ended.
        for peer in self._mates[host]:
            if self._whole:
                self.ends.check(peer, self.rank, partial(self._has_come, peer))
            else:
                # Its counter counts barriers of all ranks.
                self.ends.check_far(peer, self.rank)
        if broken:
            self.check(self._mates[host][self._place], broken)

    def _has_come(self, peer: int) -> bool:
        return reached(self._watch.page.ranks[peer].barrier_counter, self._target)


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError("a collective needs a contiguous tensor")
    # One value is contiguous whatever its strides are.
    return tensor.as_strided((tensor.numel(),), (1,))
