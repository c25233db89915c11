"""Which process is the primary of each server: the launcher decides it, and workers find it in the control page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.collectives.base import ProcessGroup
from headrace.errors import PeerLost
from headrace.parameter_server.replication.machine import Authority, Down, News, PrimaryLost, Ready, Up
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.plan import Plan

_LOOK_EVERY_S = 0.001


def process_number(page: ControlPage, rank: int) -> int:
    """Returns the number of the process that is at a rank now; no other process of the run ever has it."""
    return page.ranks[rank].restarts * len(page.ranks) + rank


def primary_rank(page: ControlPage, plan: Plan, server: int) -> int:
    """Returns the rank of a server's primary: the server's own without backups; -1 if there is none yet."""
    if not plan.backups:
        return server
    epoch, primary, _ = page.ranks[server].server_view.read()
    return primary % len(page.ranks) if epoch else -1


def primary_address(page: ControlPage, plan: Plan, server: int, rank: int) -> str:
    """Returns where a rank reaches a server now; "" if it has no address. With backups it is that of its primary."""
    primary = primary_rank(page, plan, server)
    return nearest(page.ranks[primary].address.read(), plan, primary, rank) if primary >= 0 else ""


def nearest(address: str, plan: Plan, server: int, rank: int) -> str:
    """Returns the part of a server's address for a rank of the same host, or of another; "" of an empty one."""
    ways = address.split() or [""]
    return ways[0 if plan.role(server).host == plan.role(rank).host else -1]


def server_of(plan: Plan, rank: int) -> int:
    """Returns the server whose shards a server or a backup holds: their owner in the plan's segments."""
    return plan.servers[plan.backups.index(rank)] if rank in plan.backups else rank


def replaceable_ranks(plan: Plan) -> tuple[int, ...]:
    """Returns the ranks of the servers that have backups, then of these: the run continues if one of them is lost."""
    return (*plan.servers, *plan.backups) if plan.backups else ()


@dataclass(frozen=True)
class ServerDirectory:
    """What a worker knows of the servers before it connects to them.

    Attributes:
        addresses: blocks until every server can be reached; returns their addresses, in the order of `ranks`.
        find: returns where a server can be reached now, by its place in `ranks`; raises ConnectionError if it cannot.
        suspect: reports to the process that decides on failover that a server may be lost, by its place in `ranks`.
        incarnation: of this worker: how many processes there were in its place before.
    """

    ranks: tuple[int, ...] = ()
    worker: int = 0
    addresses: Callable[[], tuple[str, ...]] = tuple
    find: Callable[[int], str] | None = None
    suspect: Callable[[int], object] = int
    incarnation: int = 0


def find_servers(plan: Plan, rank: int, page: ControlPage, group: ProcessGroup) -> ServerDirectory:
    """Returns the directory of a run's servers for one worker; an empty one where the run has none."""
    servers = plan.servers

    def wait_for(server: int) -> str:
        while not (address := primary_address(page, plan, server, rank)):
            group.check()
            time.sleep(_LOOK_EVERY_S)
        return address

    def find(index: int) -> str:
        address = primary_address(page, plan, servers[index], rank)
        if not address:
            raise ConnectionError("no server has its address yet")
        return address

    def suspect(index: int) -> None:
        page.ranks[rank].suspicion.raise_against(primary_rank(page, plan, servers[index]))

    return ServerDirectory(
        servers, rank, lambda: tuple(map(wait_for, servers)), find, suspect, page.ranks[rank].restarts
    )


class FailoverController:
    """Decides, in the launcher, which process is the primary of each server."""

    def __init__(self, plan: Plan, page: ControlPage) -> None:
        self._plan, self._page = plan, page
        self.servers = plan.servers
        self._authorities = {server: Authority() for server in plan.servers} if plan.backups else {}

    def server_of(self, rank: int) -> int:
        """Returns the server whose shards the process at a rank holds."""
        return server_of(self._plan, rank)

    def __contains__(self, rank: int) -> bool:
        """Returns whether the run continues if the process at a rank is lost."""
        return server_of(self._plan, rank) in self._authorities

    def up(self, rank: int) -> None:
        """Handles the start of a process at a rank."""
        self._tell(rank, Up(process_number(self._page, rank)))

    def down(self, rank: int, cause: str) -> None:
        """Handles the loss of a process before another is started; raises PeerLost if no process holds its state."""
        try:
            self._tell(rank, Down(process_number(self._page, rank)))
        except PrimaryLost as error:
            told = f"{cause}; its backup does not hold yet all that it held"
            raise PeerLost(rank, self._plan.roles[rank].host, told) from error

    def unready_backup(self, rank: int) -> int | None:
        """Returns the rank of the backup that would follow the primary at a rank, if it is not known to be ready."""
        authority = self._authorities[server_of(self._plan, rank)]
        view = authority.view
        if view is None or authority.ready or view.backup is None or view.primary != process_number(self._page, rank):
            return None
        return view.backup % len(self._page.ranks)

    def look(self) -> list[int]:
        """Records which backups have become ready; returns their ranks."""
        ready = []
        for authority in self._authorities.values():
            view = authority.view
            if view is None or authority.ready or view.backup is None:
                continue
            seats = (view.primary % len(self._page.ranks), view.backup % len(self._page.ranks))
            if any(self._page.ranks[seat].heartbeat.promotable_epoch == view.epoch for seat in seats):
                authority.handle(Ready(view.epoch))
                ready.append(view.backup % len(self._page.ranks))
        return ready

    def _tell(self, rank: int, news: News) -> None:
        server = server_of(self._plan, rank)
        view = self._authorities[server].handle(news)
        if view is not None:
            backup = -1 if view.backup is None else view.backup
            self._page.ranks[server].server_view.publish(view.epoch, view.primary, backup)
