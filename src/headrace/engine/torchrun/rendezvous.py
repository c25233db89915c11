"""Where the processes of a launcher find each other: the store at the address that it says in the environment."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from headrace.errors import HeadraceError, InfeasiblePlan, RunFailed, UsageError
from headrace.machine import host_name
from headrace.spec.cluster import Cluster
from headrace.spec.plain import from_plain, to_plain

MEET_S = 120.0
"""So long processes wait for each other to begin, seconds."""

_told = itertools.count()


def launched_ranks() -> int | None:
    """Returns how many processes the launcher has started, None if there is no launcher.

    Raises:
        UsageError: it says so in part only.
    """
    given = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    if len(given) < 4:
        missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(given)
        raise UsageError(f"the launcher set {', '.join(given)} but not {', '.join(sorted(missing))}")
    return int(os.environ["WORLD_SIZE"])


def launched_store() -> Any:
    """Returns the store of all the launcher's processes."""
    store, _ = _store(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return store


def gather(text: str) -> list[str]:
    """Returns what every rank has said, by rank; all call it together."""
    store, rank, world = launched_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A process may meet the same others again; every time needs words of its own.
    words = f"headrace/told/{next(_told)}"
    store.set(f"{words}/{rank}", text)
    texts = [store.get(f"{words}/{other}").decode() for other in range(world)]
    if store.add(f"{words}/read", 1) == world:
        store.set(f"{words}/all", "read")
    if rank == 0:
        # The store lives with rank 0, which must not end before the others have read.
        store.wait([f"{words}/all"])
    return texts


def of_first(make: Callable[[], str]) -> str:
    """Returns what rank 0 makes, on every rank of a launcher; all call it together.

    Raises:
        RunFailed: rank 0 could not; there, what has stopped it.
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
    """Returns the cluster that all the launcher's processes are on, from what each sees; all call it together.

    Raises:
        InfeasiblePlan: some have devices of another kind.
    """
    if cluster.ranks in (None, 1):
        return cluster
    return joined([from_plain(Cluster, json.loads(text)) for text in gather(json.dumps(to_plain(cluster)))])


def joined(seen: Sequence[Cluster]) -> Cluster:
    """Returns the cluster of which each rank sees its own host alone.

    Raises:
        InfeasiblePlan: some have devices of another kind.
    """
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
    """Returns the sum of what hosts have, each its own; all the launcher's processes call it together."""
    told = gather(str(count))
    return sum(int(told[host.ranks[0]]) for host in cluster.hosts)


def own_address() -> str:
    """Returns the address by which this host reaches the launcher's first: there the others reach this one.

    Raises:
        UsageError: that is this host's address for itself.
    """
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: the system looks up the way.
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
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Of several masters in a process, those that follow join the first.
        kept = TCPStore(
            host,
            port,
            None,
            True,
            timeout,
            False,
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
    """Returns a socket that listens where the launcher has said and nowhere else: torch's own listens everywhere."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None  # torchrun's agent holds the store
    try:
        family, _, _, _, address = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError:
        return None  # this process holds the port already, or has the address by another name: torch finds out
