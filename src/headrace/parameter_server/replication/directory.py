"""What a worker knows of the servers of its run: where they are now, and whether it reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.collectives.base import ProcessGroup
from headrace.errors import PeersApart
from headrace.machine.background import BackgroundThread
from headrace.parameter_server.replication.failover import primary_address, primary_rank
from headrace.parameter_server.replication.links import LinkProbe
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.plan import Plan, Role
from headrace.transport.base import ClientTransport

_LOOK_EVERY_S = 0.001


@dataclass(frozen=True)
class ServerDirectory:
    """Where a worker's servers are, which other processes may replace; an index is that in `ranks`.

    Attributes:
        rank, worker: of this process, and its number for the servers.
        ranks: of the servers in the plan.
        open: opens a connection to an address; None for that of its kind.
        thread: makes a thread beside this worker's own.
    """

    page: ControlPage
    plan: Plan
    rank: int
    group: ProcessGroup
    timeout_s: float
    worker: int
    ranks: tuple[int, ...]
    open: Callable[..., ClientTransport] | None = None
    thread: Callable[[str], BackgroundThread] = BackgroundThread
    _probes: dict[int, LinkProbe] = field(init=False, default_factory=dict)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The servers' roles in the plan."""
        return tuple(self.plan.roles[rank] for rank in self.ranks)

    @property
    def incarnation(self) -> int:
        """How many processes there were in this worker's place before."""
        return self.page.ranks[self.rank].restarts

    def among(self, ranks: Sequence[int], worker: int) -> ServerDirectory:
        """Returns the same for some of the servers, to which this process is another worker."""
        return replace(self, ranks=tuple(ranks), worker=worker)

    def addresses(self) -> tuple[str, ...]:
        """Blocks until every server can be reached; returns their addresses."""
        return tuple(map(self._wait_for, self.ranks))

    def find(self, index: int) -> str:
        """Returns where a server can be reached now; raises ConnectionError if it cannot."""
        address = primary_address(self.page, self.plan, self.ranks[index], self.rank)
        if not address:
            raise ConnectionError("no server has its address yet")
        return address

    def suspect(self, index: int) -> None:
        """Reports to the process that decides on failover that a server may be lost."""
        self.page.ranks[self.rank].suspicion.raise_against(primary_rank(self.page, self.plan, self.ranks[index]))

    def require(self, index: int, silent_s: float) -> None:
        """Looks where nothing has come from a server for so long; raises PeersApart if both live and are cut."""
        primary = primary_rank(self.page, self.plan, self.ranks[index])
        address = primary_address(self.page, self.plan, self.ranks[index], self.rank)
        if not address:
            return
        probe = self._probes.setdefault(index, LinkProbe(self.page, self.timeout_s))
        if probe.is_cut(primary, address, silent_s):
            here, there = ((rank, self.plan.role(rank).host) for rank in (self.rank, primary))
            raise PeersApart(here, there, f"no progress for {silent_s:.1f} s: no packet comes from there")

    def _wait_for(self, server: int) -> str:
        while not (address := primary_address(self.page, self.plan, server, self.rank)):
            self.group.check()
            time.sleep(_LOOK_EVERY_S)
        return address


def find_servers(plan: Plan, rank: int, page: ControlPage, group: ProcessGroup, timeout_s: float) -> ServerDirectory:
    """Returns the directory of all servers of a run for the worker at a rank."""
    return ServerDirectory(page, plan, rank, group, timeout_s, rank, plan.servers)
