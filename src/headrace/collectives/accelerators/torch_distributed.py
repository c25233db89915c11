"""Collectives of accelerators, by the backend of torch.distributed that the device table names: NCCL among GPUs.

A group of headrace's own: torch's default group, which a process has once, is left to the user.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace import internals
from headrace.collectives.accelerators.divided import DividedTensors
from headrace.collectives.base import Collective, Peers, ProcessGroup
from headrace.collectives.compression import PLAIN, Compression
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.collectives.watchdog.call_log import CallLog
from headrace.devices import HOST, DeviceKind, asks_capture, kind_of
from headrace.errors import UnfitMachine
from headrace.shared_memory.calls import GroupCalls
from headrace.shared_memory.control_page import Heartbeat

if TYPE_CHECKING:
    from headrace.collectives.watchdog.watchdog import Watchdog
    from headrace.internals import Store

_LATER_S = 60.0
"""By how much torch waits longer for a call than headrace: it names no ranks, and may end the process."""


class TorchDistributed(DividedTensors):
    """The ranks that find each other in `store`, each with a device of its own ("cuda:0"), whose tensors it carries.

    A call that is not done after `timeout_s` fails. What a call gives is there for what the device does next: only
    `sum` and `barrier` wait for the device. `ranks` are those of the run, by rank; () for the same. Where a `watchdog`
    looks, it ends a run before torch does.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        device: str,
        timeout_s: float,
        ranks: Sequence[int] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        kind = kind_of(device)
        if not kind.backend:
            raise UnfitMachine(f"torch.distributed has no backend for {kind.row()}; use one worker, or device='cpu'")
        self.rank, self.world = rank, world
        self._store, self._device, self._timeout_s = store, torch.device(device), timeout_s
        self.groups: list[TorchDistributed] = []
        self._among: dict[tuple[int, ...], Collective] = {}
        self._watchdog, self._ranks = watchdog, tuple(ranks) or tuple(range(world))
        self._log = _log_of(watchdog, self._ranks, self._ranks[rank])
        self._log.captures = asks_capture(device)
        self._log.begin(b"connect", 0)
        self._backend = connect(kind, store, (rank, world), timeout_s + _LATER_S, self._device, ranks)
        self._log.abort = self._backend.abort
        # Of others each send waits for the other side before the next call. A backend of another package may not say.
        batches = getattr(self._backend, "supports_coalescing", False)
        self.peers = TorchPeers(self._backend, self._ranks, self._log, watchdog) if batches else None

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
        ranks = [self._ranks[member] for member in members]
        device, timeout_s = str(self._device), self._timeout_s
        self.groups.append(TorchDistributed(store, place, world, device, timeout_s, ranks, self._watchdog))
        return self.groups[-1]

    def barrier(self) -> None:
        self.sum([0.0])

    def all_reduce(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        wait = self._call(b"all_reduce", tensor, self._backend.allreduce, [tensor], dist.AllreduceOptions())
        self._count_ring(tensor)
        return wait

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._call(b"broadcast", tensor, self._backend.broadcast, [tensor], options)()
        self.moved_bytes += tensor.nbytes

    def sum(self, values: Sequence[float]) -> list[float]:
        own = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        every = own.new_empty(self.world, len(own))
        self._gather_into(b"sum", every, own)
        with self._log.explaining():
            totals: list[float] = every.cpu().sum(0).tolist()
        self._log.require()
        return totals

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._log.leave()
        self._backend.shutdown()
        # Later calls would have raised, and this was the last.
        self._log.require_success()

    def abort(self) -> None:
        """Ends what is under way without the others: a wait for it raises."""
        for group in self.groups:
            group.abort()
        self._log.leave()
        self._backend.abort()


class TorchPeers(Peers):
    """Send and receive of a backend of torch.distributed, among `ranks` of the run, whose collectives `log` has."""

    def __init__(self, backend: Any, ranks: Sequence[int], log: CallLog, watchdog: Watchdog | None) -> None:
        self._backend, self._ranks, self._watchdog = backend, ranks, watchdog
        self._me, self._captures = log.me, log.captures
        self._logs: dict[tuple[int, int], CallLog] = {}

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        logs = [self._begin(self._me, self._ranks[peer], tensor) for tensor, peer in sends]
        logs += [self._begin(self._ranks[peer], self._me, tensor) for tensor, peer in receives]
        # In one batch, so that neither of two ranks that send to each other waits for the other.
        with logs[0].explaining():
            internals.begin_batch(self._backend)()
            for tensor, peer in sends:
                self._backend.send([tensor], peer, 0)
            for tensor, peer in receives:
                self._backend.recv([tensor], peer, 0)
            work: Any = internals.end_batch(self._backend)()
        for log in logs:
            log.follow(work)
        return partial(logs[0].wait, work)

    def _begin(self, giver: int, taker: int, tensor: Tensor) -> CallLog:
        """Notes that a tensor goes from one rank to another: both count these, each on its side."""
        log = self._logs.get((giver, taker))
        if log is None:
            log = self._logs[giver, taker] = _log_of(self._watchdog, (giver, taker), self._me, b"send")
            log.abort, log.captures = self._backend.abort, self._captures
        log.begin(b"send", tensor.nbytes, tensor.dtype)
        return log


def _log_of(watchdog: Watchdog | None, ranks: Sequence[int], me: int, kind: bytes = b"") -> CallLog:
    """Returns where the calls of a new group are written down: to be watched, if there is a watchdog."""
    return watchdog.log(ranks, kind) if watchdog else CallLog(ranks, me, 1, GroupCalls(), Heartbeat())


def connect(
    kind: DeviceKind,
    store: internals.Store,
    place: tuple[int, int],
    timeout_s: float,
    device: torch.device,
    ranks: Sequence[int] = (),
) -> Any:
    """Returns the collectives of a kind of devices, as an object of torch.

    Args:
        place: this rank, and how many there are; they find each other in `store`.
        timeout_s: a call that is not done after it fails.
        ranks: of each of them in the whole run, by which torch's records call them; () for the same.

    Raises:
        UnfitMachine: this build of torch does not have the backend.
    """
    rank, world = place
    timeout = timedelta(seconds=timeout_s)
    if plugin := internals.backend_plugins.get(kind.backend.upper()):
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, world, timeout)
        given = internals.backend_options()
        given.store, given.group_rank, given.group_size, given.timeout = store, rank, world, timeout
        given.group_id, given.global_ranks_in_group = "", list(ranks)
        return plugin.creator_fn(given, None)
    named = f"processgroup{kind.backend}"
    make: Any = next((getattr(dist, name) for name in dir(dist) if name.lower() == named), None)
    if make is None:
        raise UnfitMachine(
            f"torch {importlib.metadata.version('torch')} here has no {kind.backend}, which carries tensors between "
            f"the devices of workers; install {kind.remedy} that has it, or use workers=1"
        )
    if kind.name == HOST:
        return make(store, rank, world, timeout)
    options = make.Options()
    setattr(options, internals.group_timeout.name_in(options), timeout)
    options.global_ranks_in_group = list(ranks)
    backend = make(store, rank, world, options)
    if kind.binds:
        backend.eager_connect_single_device(device)
    return backend
