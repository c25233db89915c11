"""Where a worker finds the servers of its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.collectives.base import ProcessGroup
from headrace.parameter_server.replication.failover import primary_address
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.plan import Plan

_LOOK_EVERY_S = 0.001


@dataclass(frozen=True)
class ServerDirectory:
    """What a worker knows of the servers before it connects to them.

    Attributes:
        addresses: blocks until every server can be reached; returns their addresses, in the order of `ranks`.
        find: returns where a server can be reached now, by its place in `ranks`; raises ConnectionError if it cannot.
        incarnation: of this worker: how many processes there were in its place before.
    """

    ranks: tuple[int, ...] = ()
    worker: int = 0
    addresses: Callable[[], tuple[str, ...]] = tuple
    find: Callable[[int], str] | None = None
    incarnation: int = 0


def find_servers(plan: Plan, rank: int, page: ControlPage, group: ProcessGroup) -> ServerDirectory:
    """Returns the directory of a run's servers for one worker; an empty one where the run has none."""
    servers = plan.servers

    def wait_for(server: int) -> str:
        while not (address := primary_address(page, plan, server)):
            group.check()
            time.sleep(_LOOK_EVERY_S)
        return address

    def find(index: int) -> str:
        address = primary_address(page, plan, servers[index])
        if not address:
            raise ConnectionError("no server has its address yet")
        return address

    return ServerDirectory(servers, rank, lambda: tuple(map(wait_for, servers)), find, page.ranks[rank].restarts)
