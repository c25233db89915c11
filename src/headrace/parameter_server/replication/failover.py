"""Which process is the primary of each server: the launcher decides it, and workers find it in the control page."""

from __future__ import annotations

from time import monotonic

from headrace.errors import PeerLost
from headrace.parameter_server.replication.machine import Authority, Down, News, PrimaryLost, Ready, Up
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.plan import Plan


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


class FailoverController:
    """Decides, in the launcher, which process is the primary of each server."""

    def __init__(self, plan: Plan, page: ControlPage) -> None:
        self._plan, self._page = plan, page
        self.servers = plan.servers
        self._authorities = {server: Authority() for server in plan.servers} if plan.backups else {}
        self._unguarded_since = dict.fromkeys(self._authorities, monotonic())
        self._guarded_before: set[int] = set()

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
        server = server_of(self._plan, rank)
        passed_s = monotonic() - self._unguarded_since[server]
        try:
            self._tell(rank, Down(process_number(self._page, rank)))
        except PrimaryLost as error:
            since = "the last one was lost" if server in self._guarded_before else "the servers began"
            message = (
                f"{cause}; no backup holds yet all that it held, {passed_s:.1f} s after {since}; resume=True goes on "
                "from a checkpoint, and with more servers each holds less and its backup is filled sooner"
            )
            raise PeerLost(rank, self._plan.roles[rank].host, message) from error

    def unready_backup(self, rank: int) -> int | None:
        """Returns the rank of the backup that would follow the primary at a rank, if it is not known to be ready."""
        authority = self._authorities[server_of(self._plan, rank)]
        view = authority.view
        if view is None or authority.ready or view.backup is None or view.primary != process_number(self._page, rank):
            return None
        return view.backup % len(self._page.ranks)

    def pair(self, server: int) -> tuple[int, int] | None:
        """Returns the ranks of a server's primary and of its backup; None while it has none."""
        view = self._authorities[server].view
        if view is None or view.backup is None:
            return None
        return view.primary % len(self._page.ranks), view.backup % len(self._page.ranks)

    def look(self) -> dict[int, float]:
        """Records which backups have become ready; returns, by rank, for how long a loss would have ended the run."""
        ready = {}
        for server, authority in self._authorities.items():
            view = authority.view
            if view is None or authority.ready or view.backup is None:
                continue
            seats = (view.primary % len(self._page.ranks), view.backup % len(self._page.ranks))
            if any(self._page.ranks[seat].heartbeat.promotable_epoch == view.epoch for seat in seats):
                authority.handle(Ready(view.epoch))
                ready[view.backup % len(self._page.ranks)] = monotonic() - self._unguarded_since[server]
        return ready

    def _tell(self, rank: int, news: News) -> None:
        server = server_of(self._plan, rank)
        authority = self._authorities[server]
        guarded = authority.ready
        view = authority.handle(news)
        if view is not None:
            if guarded:
                self._unguarded_since[server] = monotonic()
                self._guarded_before.add(server)
            backup = -1 if view.backup is None else view.backup
            self._page.ranks[server].server_view.publish(view.epoch, view.primary, backup)
