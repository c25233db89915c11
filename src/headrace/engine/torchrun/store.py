"""The launcher's store: there its processes find each other, tell each other texts, and exchange signs of life."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import Any

from headrace.errors import HeadraceError, InfeasiblePlan, RunFailed, UsageError
from headrace.machine import host_name
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.cluster import Cluster
from headrace.spec.plain import from_plain, to_plain

MEET_S = 120.0
"""How long processes wait for each other to start, seconds."""

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_EVERY_S = 0.25
_LINGER_S = 2.0
_MARKS = struct.Struct("<? 2q i 7q d q 32s")
"""left, abort, stop, barrier counter; count, step, examples, pid, finished, saved bytes and error; loss; saved step,
digest."""

_gathered = itertools.count()


def launched_ranks() -> int | None:
    """Returns how many processes the launcher has started, None if there is no launcher.

    Raises UsageError where it has set only some of its variables.
    """
    given = [name for name in _VARIABLES if name in os.environ]
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    if len(given) < len(_VARIABLES):
        missing = sorted(set(_VARIABLES) - set(given))
        raise UsageError(f"the launcher set {', '.join(given)} but not {', '.join(missing)}")
    return int(os.environ["WORLD_SIZE"])


def launched_store() -> Any:
    """Returns the store of all the launcher's processes."""
    store, _ = _store(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return store


def gather(text: str) -> list[str]:
    """Returns the text of every rank, by rank; all ranks call it together."""
    store, rank, world = launched_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The same processes may gather again, so each time has keys of its own.
    prefix = f"headrace/told/{next(_gathered)}"
    store.set(f"{prefix}/{rank}", text)
    texts = [store.get(f"{prefix}/{other}").decode() for other in range(world)]
    if store.add(f"{prefix}/read", 1) == world:
        store.set(f"{prefix}/all", "read")
    if rank == 0:
        # The store ends with rank 0, which must not end before the others have read.
        store.wait([f"{prefix}/all"])
    return texts


def of_first(make: Callable[[], str]) -> str:
    """Returns what rank 0 makes, on every rank of a launcher; all call it together.

    Raises:
        RunFailed: rank 0 could not make it; on rank 0 its own error is raised.
    """
    if int(os.environ["RANK"]) > 0:
        made, refused = json.loads(gather("")[0])
        if refused:
            raise RunFailed(f"rank 0 refused to begin: {refused}")
        return str(made)
    try:
        own = make()
    except HeadraceError as error:
        gather(json.dumps(["", str(error)]))
        raise
    gather(json.dumps([own, ""]))
    return own


def join(cluster: Cluster) -> Cluster:
    """Returns the cluster of all the launcher's processes, from what each sees; all call it together.

    Raises InfeasiblePlan where some have devices of another kind.
    """
    if cluster.ranks in (None, 1):
        return cluster
    return joined([from_plain(Cluster, json.loads(text)) for text in gather(json.dumps(to_plain(cluster)))])


def joined(seen: Sequence[Cluster]) -> Cluster:
    """Returns the cluster of which each rank sees its own host alone; raises InfeasiblePlan as `join`."""
    kinds = {each.device: each.hosts[0].name for each in seen}
    if len(kinds) > 1:
        found = ", ".join(f"{kind} on {name}" for kind, name in kinds.items())
        raise InfeasiblePlan(f"the launcher's processes have different devices: {found}; say device='cpu' or 'cuda'")
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(seen):
        ranks.setdefault(each.hosts[0].name, []).append(rank)
    if len(ranks) == 1:
        return seen[0]
    hosts = tuple(replace(seen[each[0]].hosts[0], ranks=tuple(each)) for each in ranks.values())
    return Cluster(hosts, len(seen), seen[0].device)


def total_of_hosts(count: int, cluster: Cluster) -> int:
    """Returns the sum of the hosts' counts; all the launcher's processes call it together."""
    counts = gather(str(count))
    return sum(int(counts[host.ranks[0]]) for host in cluster.hosts)


def own_address() -> str:
    """Returns the address by which this host reaches the launcher's first: there the others reach this one.

    Raises:
        UsageError: that is this host's address for itself.
    """
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: the system looks up the route.
        probe.connect(address)
        own: str = probe.getsockname()[0]
    if own == "::1" or own.startswith("127."):
        raise UsageError(
            f"MASTER_ADDR={master} is {own} on {host_name()}, which no other host reaches, and there are several; "
            "give every process the address of the first host in the network of all"
        )
    return own


@functools.cache
def _store(rank: int, world: int) -> tuple[Any, Any]:
    # Here, because a process without a launcher need not import it.
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    timeout = timedelta(seconds=MEET_S)
    kept = None
    listener = _listener() if rank == 0 else None
    if listener is not None:
        # Of several masters in a process, those that follow join the first.
        kept = TCPStore(
            *(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, True, timeout, False),
            multi_tenant=True,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )
    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunFailed(
            f"rank {rank} on {host_name()} cannot reach rank 0 at {where} (MASTER_ADDR:MASTER_PORT): {error}"
        ) from error
    return store, kept


def _listener() -> socket.socket | None:
    """Returns a socket that listens at the launcher's address and nowhere else: torch's own listens everywhere."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None  # torchrun's agent holds the store
    try:
        family, _, _, _, address = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError:
        return None  # this process holds the port already, or has the address by another name: torch finds out


class HeartbeatRelay:
    """A thread that copies heartbeats between the control pages of several hosts, through the store.

        rank 0   page ──┐                        ┌─► page
                        ├─► store: a key a rank ─┤            four times a second
        rank 1   page ──┘                        └─► page

    Attributes:
        told_s: when it last sent and received, on the monotonic clock.
        broken: why it has ended early; "" while it has not.
    """

    def __init__(self, store: Any, prefix: str, page: ControlPage, rank: int) -> None:
        self.told_s = monotonic()
        self.broken = ""
        self._store = store
        self._keys = [f"{prefix}/marks/{each}" for each in range(len(page.ranks))]
        self._page = page
        self._rank = rank
        self._left: set[int] = set()
        self._over = threading.Event()
        # The first one waits until all ranks have started.
        self._exchange()
        self._thread = threading.Thread(target=self._follow, name="headrace-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends this rank's marks a last time."""
        self._over.set()
        self._thread.join(_LINGER_S + 1)

    def _follow(self) -> None:
        try:
            while not self._over.wait(_EVERY_S):
                self._exchange()
            self._exchange()
            if self._rank == 0:
                self._linger()
        except (RuntimeError, struct.error) as error:  # of the store, and of what is in it
            self.broken = str(error).partition("\n")[0]

    def _linger(self) -> None:
        # The store may end with rank 0, and the others must read the reason before that.
        pause = threading.Event()
        give_up = monotonic() + _LINGER_S
        lost = {0, self._page.abort - 1}
        while self._page.abort and monotonic() < give_up and self._left | lost != set(range(len(self._page.ranks))):
            pause.wait(_EVERY_S)
            self._exchange()

    def _exchange(self) -> None:
        self._page.ranks[self._rank].heartbeat.count += 1
        self._store.set(self._keys[self._rank], self._pack())
        for rank, marks in enumerate(self._store.multi_get(self._keys)):
            if rank != self._rank:
                self._apply(rank, marks)
        self.told_s = monotonic()

    def _pack(self) -> bytes:
        record = self._page.ranks[self._rank]
        heartbeat, saved = record.heartbeat, record.saved
        # Read first, because they say that the rest is complete.
        finished, saved_step = heartbeat.finished, saved.step_plus_1
        return _MARKS.pack(
            *(self._over.is_set(), self._page.abort, self._page.stop, record.barrier_counter),
            *(heartbeat.count, heartbeat.step, heartbeat.examples, heartbeat.pid, finished, saved.nbytes, saved.error),
            *(heartbeat.loss, saved_step, bytes(saved.digest)),
        )

    def _apply(self, rank: int, marks: bytes) -> None:
        page, record = self._page, self._page.ranks[rank]
        heartbeat, saved = record.heartbeat, record.saved
        left, abort, stop, counter, *numbers, loss, saved_step, digest = _MARKS.unpack(marks)
        # Each only where it is set: this process may set it at the same time.
        if abort and not page.abort:
            page.abort = abort
        if stop:
            page.stop = stop
        record.barrier_counter = counter
        heartbeat.count, heartbeat.step, heartbeat.examples, heartbeat.pid, finished, saved.nbytes, saved.error = (
            numbers
        )
        heartbeat.loss = loss
        saved.digest[:] = list(digest)
        # Last, because they say that the rest is complete.
        saved.step_plus_1, heartbeat.finished = saved_step, finished
        if left:
            self._left.add(rank)
