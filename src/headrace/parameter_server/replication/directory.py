"""What a worker knows of the servers of its run: where they are now, and whether it reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.collectives.base import ProcessGroup
from headrace.errors import PeersApart
from headrace.parameter_server.replication.failover import primary_address, primary_rank
from headrace.parameter_server.replication.links import LinkProbe
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.plan import Plan, Role

_LOOK_EVERY_S = 0.001


@dataclass(frozen=True)
class ServerReach:
    """Whether a worker reaches each of the servers from which nothing comes."""

    page: ControlPage
    plan: Plan
    rank: int
    servers: tuple[int, ...]
    timeout_s: float
    _probes: dict[int, LinkProbe] = field(init=False, default_factory=dict)

    def among(self, places: Sequence[int]) -> ServerReach:
        """Returns the same for some of the servers, in order."""
        return replace(self, servers=tuple(self.servers[place] for place in places))

    def require(self, index: int, silent_s: float) -> None:
        """Looks where nothing has come from a server for so long; raises PeersApart if both live and are cut."""
        primary = primary_rank(self.page, self.plan, self.servers[index])
        address = primary_address(self.page, self.plan, self.servers[index], self.rank)
        if not address:
            return
        probe = self._probes.setdefault(index, LinkProbe(self.page, self.timeout_s))
        if probe.is_cut(primary, address, silent_s):
            here, there = ((each, self.plan.role(each).host) for each in (self.rank, primary))
            raise PeersApart(here, there, f"no progress for {silent_s:.1f} s: no packet comes from there")


@dataclass(frozen=True)
class ServerDirectory:
    """What a worker knows of the servers before it connects to them.

    Attributes:
        addresses: blocks until every server can be reached; returns their addresses, in the order of `roles`.
        find: returns where a server can be reached now, by its place in `roles`; raises ConnectionError if it cannot.
            None if the addresses stay.
        suspect: reports to the process that decides on failover that a server may be lost, by its place in `roles`.
        incarnation: of this worker: how many processes there were in its place before.
        reach: whether the servers can be reached; None where that is not watched.
    """

    roles: tuple[Role, ...] = ()
    worker: int = 0
    addresses: Callable[[], tuple[str, ...]] = tuple
    find: Callable[[int], str] | None = None
    suspect: Callable[[int], object] = int
    incarnation: int = 0
    reach: ServerReach | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The servers' ranks in the plan."""
        return tuple(role.rank for role in self.roles)


def find_servers(plan: Plan, rank: int, page: ControlPage, group: ProcessGroup, timeout_s: float) -> ServerDirectory:
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
        tuple(plan.roles[server] for server in servers),
        rank,
        lambda: tuple(map(wait_for, servers)),
        find,
        suspect,
        page.ranks[rank].restarts,
        ServerReach(page, plan, rank, servers, timeout_s),
    )
