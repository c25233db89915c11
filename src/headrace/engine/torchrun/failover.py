"""Decides, on rank 0, which of a launcher's processes are lost without which a run on several hosts goes on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import Enum
from time import monotonic
from urllib.parse import urlsplit

from headrace.engine.base import LivenessProbe
from headrace.engine.torchrun.elastic_workers.barrier import member_name
from headrace.engine.torchrun.elastic_workers.returning import admit
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.errors import PeerLost
from headrace.parameter_server.replication.failover import FailoverController, replaceable_ranks
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import BackupReady, Lost, Notice
from headrace.spec.plan import Plan, outlives_workers
from headrace.worker.events import write_for_launcher
from headrace.worker.run_spec import RunSpec

BACK_S = 5.0
"""How long a process that comes back, and rank 0, wait for each other beyond the run's `timeout_s`."""

_PROBE_S = 0.2
_PARTED_S = 1.0
"""For so long a server and its backup must say that they do not reach each other, and how often, at least."""

_TOLD = 2
"""Heartbeats after which what another rank told is from after an event; one may be on its way."""


def expendable_ranks(plan: Plan) -> frozenset[int]:
    """Returns the ranks without which a run on several hosts goes on.

    Workers that lease their data, or of which some may be lost, and servers with backups; not rank 0, which serves the
    store: without it workers in lockstep go on by themselves.
    """
    workers = range(1, plan.workers) if outlives_workers(plan) else ()
    return frozenset((*workers, *replaceable_ranks(plan)))


class MemberStanding(Enum):
    """What a rank's present process is to workers that agree among themselves on who is lost."""

    UNKNOWN = "begins"
    MEMBER = "trains"
    LEFT = "has left"
    LOST = "is lost"


class LaunchedFailover:
    """Lets a run go on without lost processes, takes back those that come back, and promotes backups of lost servers.

    A worker is lost when its connection to rank 0 has ended, or when it gives no sign of life for the run's
    `timeout_s`. A server that was killed refuses connections, which is tried as soon as another process suspects it.
    Where the workers agree among themselves on who is lost, `standing` tells what a rank is to them; `workers` are
    those to watch, None for all but rank 0.
    """

    def __init__(
        self,
        spec: RunSpec,
        page: ControlPage,
        relay: HeartbeatRelay,
        standing: Callable[[int], MemberStanding] = lambda _: MemberStanding.UNKNOWN,
        workers: Collection[int] | None = None,
    ) -> None:
        self._standing = standing
        self._spec, self._page, self._relay = spec, page, relay
        self._lost: set[int] = set()
        self._ended: dict[int, int] = {}
        self._controller = FailoverController(spec.plan, page)
        self._servers = {rank: LivenessProbe(0) for rank in replaceable_ranks(spec.plan)}
        watched = expendable_ranks(spec.plan) if workers is None else frozenset(workers)
        self._workers = {rank: LivenessProbe(0) for rank in watched - self._servers.keys()}
        self._suspicions = [0] * len(page.ranks)
        self._parted: dict[tuple[int, int], tuple[float, ...]] = {}
        for rank in self._servers:
            self._controller.up(rank)

    def look(self) -> None:
        """Decides by what the page tells; sets its `abort` where the run cannot go on."""
        over = any(self._page.ranks[rank].heartbeat.finished for rank in range(self._spec.plan.workers))
        # First, so that others know of a loss before another process is in the same place.
        self._take_back(over)
        self._look_at_workers()
        # Servers end after the workers.
        if not over:
            self._look_at_servers()

    def _take_back(self, over: bool) -> None:
        for rank in list(self._lost):
            incarnation, passed_s = 0 if over else self._page.ranks[rank].restarts, monotonic() - self._spec.started
            if admit(self._relay.store, self._relay.prefix, rank, incarnation, passed_s) and incarnation:
                self._lost.remove(rank)
                if rank in replaceable_ranks(self._spec.plan):
                    self._servers[rank] = LivenessProbe(0)
                    # It becomes the backup of the one that has taken its place, which fills it.
                    self._controller.up(rank)
                else:
                    self._workers[rank] = LivenessProbe(0)
                text = f"rank {rank} on {self._spec.plan.role(rank).host} has come back"
                write_for_launcher(self._spec, Notice, text)

    def _look_at_workers(self) -> None:
        ranks = self._page.ranks
        served = any(record.heartbeat.finished for record in ranks[self._spec.plan.workers :])
        for rank, probe in list(self._workers.items()):
            silent_s, standing = probe.silent_s(ranks[rank].heartbeat.count), self._standing(rank)
            if standing == MemberStanding.LEFT:
                self._lose_worker(rank, "")
            elif rank in self._relay.left:
                del self._workers[rank]
            elif standing == MemberStanding.LOST:
                self._lose_worker(rank, "the other workers do not reach it")
            elif standing == MemberStanding.MEMBER:
                continue
            elif rank in self._relay.severed:
                self._lose_worker(rank, "its connection to rank 0 has ended")
            elif served and not ranks[rank].heartbeat.finished:
                self._lose_worker(rank, "it came back when all was done")
            # One that comes back still has to begin.
            elif silent_s > self._spec.timeout_s + (0 if ranks[rank].heartbeat.pid else BACK_S):
                self._lose_worker(rank, f"gave no sign of life for {silent_s:.1f} s")

    def _look_at_servers(self) -> None:
        page = self._page
        for ready in self._controller.look().items():
            write_for_launcher(self._spec, BackupReady, *ready)
        told = self._take_suspicions()
        self._look_at_pairs(told)
        suspects = {suspect for _, suspect in told}
        for rank, probe in list(self._servers.items()):
            silent_s = probe.silent_s(page.ranks[rank].heartbeat.count)
            # One that comes back still has to begin.
            if silent_s > self._spec.timeout_s + (0 if page.ranks[rank].heartbeat.pid else BACK_S):
                self._lose_server(rank, f"gave no sign of life for {silent_s:.1f} s")
            elif (
                rank in self._ended or (rank in suspects and _refuses(page.ranks[rank].address.read()))
            ) and self._backup_has_told(rank):
                self._lose_server(rank, "its process has ended")

    def _backup_has_told(self, rank: int) -> bool:
        """Returns whether what the backup of an ended server told last is from after that end.

        A backup that has become ready just before has told it to the server, and rank 0 learns it later.
        """
        backup = self._controller.unready_backup(rank)
        if backup is None:
            return True
        count = self._page.ranks[backup].heartbeat.count
        return count >= self._ended.setdefault(rank, count + _TOLD)

    def _look_at_pairs(self, told: set[tuple[int, int]]) -> None:
        """Gives up a backup that lives and does not reach its server; the server goes on without it."""
        now, heartbeats = monotonic(), [record.heartbeat for record in self._page.ranks]
        for server in self._controller.servers if self._servers else ():
            pair = self._controller.pair(server)
            if pair is None:
                continue
            primary, backup = pair
            if {(primary, backup), (backup, primary)} & told:
                first, _, *counts = self._parted.get(pair) or (now, now, *(heartbeats[rank].count for rank in pair))
                self._parted[pair] = (first, now, *counts)
            if pair not in self._parted:
                continue
            first, last, *counts = self._parted[pair]
            if now - last > _PARTED_S:
                del self._parted[pair]
            elif (
                now - first > _PARTED_S
                and backup in self._servers
                and all(heartbeats[rank].count > count + _TOLD for rank, count in zip(pair, counts, strict=True))
            ):
                del self._parted[pair]
                host = self._spec.plan.role(primary).host
                self._lose_server(
                    backup, f"it and its server, rank {primary} on {host}, live and do not reach each other"
                )

    def _take_suspicions(self) -> set[tuple[int, int]]:
        """Returns which rank suspects which since the last call."""
        suspicions = [record.suspicion for record in self._page.ranks]
        known, self._suspicions = self._suspicions, [each.count for each in suspicions]
        pairs = enumerate(zip(suspicions, known, strict=True))
        return {(rank, each.rank) for rank, (each, before) in pairs if each.count > before}

    def _lose_worker(self, rank: int, cause: str) -> None:
        del self._workers[rank]
        # First, because an arrival that the others do not wait for must not count.
        self._relay.store.lose(member_name(self._relay.prefix, rank, self._page.ranks[rank].restarts))
        self._tell(rank, cause)

    def _lose_server(self, rank: int, cause: str) -> None:
        del self._servers[rank]
        self._ended.pop(rank, None)
        try:
            self._controller.down(rank, cause)
        except PeerLost as error:
            # The page has room for the rank alone.
            write_for_launcher(self._spec, Notice, str(error))
            self._page.abort = self._page.abort or rank + 1
        else:
            self._tell(rank, cause)

    def _tell(self, rank: int, cause: str) -> None:
        record, host = self._page.ranks[rank], self._spec.plan.role(rank).host
        self._relay.follow_next(rank)
        self._lost.add(rank)
        if cause:
            write_for_launcher(self._spec, Lost, rank, record.restarts - 1, cause, False, host)
        else:
            write_for_launcher(self._spec, Notice, f"rank {rank} on {host} has left, as it was asked to")


def _refuses(address: str) -> bool:
    """Returns whether no process listens at a server's address, on a host that answers; one that begins has none."""
    if not address:
        return False
    place = urlsplit(address.split()[-1])
    with suppress(TimeoutError, OSError):
        try:
            socket.create_connection((str(place.hostname), place.port or 0), _PROBE_S).close()
        except ConnectionRefusedError:
            return True
    return False
