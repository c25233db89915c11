"""Where a launcher's processes find each other and tell each other texts: a store that rank 0 serves."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic

from headrace.devices import HOST, NAMED, kind_of
from headrace.engine.schedulers.environment import secret_remedy
from headrace.engine.torchrun.address import START_TIMEOUT, is_here, master, start_timeout_s, state_of
from headrace.engine.torchrun.elastic_workers.leader_file import STORE
from headrace.engine.torchrun.key_value import NotOfThisRun, StoreClient
from headrace.engine.torchrun.secret import HOW_TO_MAKE, ask, given_secret, hand_out
from headrace.engine.torchrun.store_server import StoreServer
from headrace.errors import HeadraceError, InfeasiblePlan, RunFailed, UnfitMachine, UsageError, WorkerFailed
from headrace.machine.identity import host_name
from headrace.policies.own_devices import with_own_devices
from headrace.spec.cluster import Cluster
from headrace.spec.plain import from_plain, to_plain

NOTICE_S = 10.0
"""After which a process that waits says so."""

_LISTENS_S = 2.0
"""How long an address is tried before it is asked for again."""

_NAMED = 16
"""Ranks that an error lists; more would hide the rest."""

_tried: list[bool] = []
"""Has an item if this process has tried to join the store."""

_gathered = itertools.count()


def launched_store() -> StoreClient:
    """Returns the store of all the launcher's processes."""
    return _store()[0]


def launched_secret() -> bytes:
    """Returns the run's secret, 32 bytes: the user's, or on one host one that rank 0 has made."""
    return _store()[1]


def reached(within_s: float) -> StoreClient | None:
    """Returns a connection to the store; None where it was not reached before, is not in time, or knows this rank."""
    known = _store.cache_info().currsize == 1
    if _tried and not known:
        return None
    try:
        store, _, back = _store() if known or int(os.environ["RANK"]) == 0 else _connect(within_s)
    except HeadraceError:
        return None
    # The others of a process that comes back do not wait for it.
    return None if back else store


def comes_back() -> bool:
    """Whether another process of the launcher has had this rank before."""
    return _store()[2]


def gather(text: str) -> list[str]:
    """Returns the text of every rank, by rank; all ranks call it together.

    A process that comes back gets what was told before, and of itself what its predecessor told.

    Raises:
        WorkerFailed: a rank cannot take part, and has said why.
    """
    store, rank, world = launched_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The same processes may gather again, so each time has keys of its own.
    prefix = f"headrace/told/{next(_gathered)}"
    if not comes_back():
        store.set(f"{prefix}/{rank}", text)
    texts: list[str] = []

    def missing() -> str:
        return f"rank 0 on {host_name()} waits for rank {len(texts)}; what that prints may say why"

    with _notice(missing if rank == 0 else None):
        for other in range(world):
            try:
                texts.append(store.get(f"{prefix}/{other}").decode())
            except TimeoutError as error:
                raise _not_all(store, world) from error
    if store.add(f"{prefix}/read", 1) == world:
        store.set(f"{prefix}/all", "read")
    if rank == 0:
        # The store ends with rank 0, which must not end before the others have read. What is wrong with one of them may
        # be wrong here, too, and else the next time says it.
        with suppress(WorkerFailed):
            store.get(f"{prefix}/all")
    return texts


def _not_all(store: StoreClient, world: int) -> RunFailed:
    """Returns the error of a start to which some have not come."""
    come = [rank for rank in range(world) if store.add(_began(rank), 0)]
    missing = sorted(set(range(world)) - set(come))
    store.set(f"headrace/missed/{os.environ['RANK']}", "read")
    if int(os.environ["RANK"]) == 0:
        # The store ends with rank 0, and those who have come read from it who has not.
        with suppress(TimeoutError):
            for rank in come:
                store.get(f"headrace/missed/{rank}")
    return RunFailed(
        f"{len(come)} of {world} processes have come within {start_timeout_s():g} s: rank {_listed(come)}; missing: "
        f"rank {_listed(missing)}. What these print says why; {START_TIMEOUT} waits longer"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")


def _began(rank: int) -> str:
    return f"headrace/began/{rank}"


def of_first(make: Callable[[], str]) -> str:
    """Returns what rank 0 makes, on every rank of a launcher; all call it together.

    Raises:
        WorkerFailed: rank 0 could not make it; on rank 0 its own error is raised.
    """
    if int(os.environ["RANK"]) > 0 or comes_back():
        made, host, code = json.loads(gather("")[0])
        if code:
            raise first_failed(host, code)
        return str(made)
    try:
        own = make()
    except HeadraceError as error:
        gather(json.dumps(["", host_name(), error.exit_code]))
        raise
    gather(json.dumps([own, "", 0]))
    return own


def first_failed(host: str, code: int) -> WorkerFailed:
    """Returns the error of another rank where rank 0 shows why the run ends, with its exit code."""
    return WorkerFailed(0, host, "what it prints says why", exit_code=code)


def join(cluster: Cluster) -> Cluster:
    """Returns the cluster of all the launcher's processes, from what each sees; all call it together.

    Raises InfeasiblePlan where some have accelerators of another kind that the user has not named, or those of a host
    name different ones.
    """
    if cluster.ranks in (None, 1):
        return cluster
    local = os.environ.get("LOCAL_RANK", "")
    told = [json.loads(text) for text in gather(json.dumps([to_plain(cluster), local, _backend_of(cluster)]))]
    _require_same_backend([(seen["hosts"][0]["name"], backend) for seen, _, backend in told])
    told = [(seen, local) for seen, local, _ in told]
    return joined([from_plain(Cluster, seen) for seen, _ in told], [local for _, local in told])


def _backend_of(cluster: Cluster) -> str:
    """Returns what carries the tensors of this process's device, with its version: "nccl 2.21.5"."""
    kind = kind_of(cluster.device)
    if kind.name == HOST or not kind.backend:
        return ""
    from headrace.machine.accelerators import backend_version

    return f"{kind.backend} {backend_version(kind) or 'missing'}"


def _require_same_backend(told: Sequence[tuple[str, str]]) -> None:
    """Raises an UnfitMachine where ranks have other versions of what carries their devices' tensors; "" for none."""
    first: tuple[int, str, str] | None = None
    for rank, (host, backend) in enumerate(told):
        first = first or ((rank, host, backend) if backend else None)
        if first and backend and backend.partition(" ")[0] == first[2].partition(" ")[0] and backend != first[2]:
            raise UnfitMachine(
                f"rank {rank} on {host} has {backend}, and rank {first[0]} on {first[1]} {first[2]}, which need not "
                "understand each other; install the same torch, with what it brings, on all hosts (headrace doctor "
                "--cluster compares them)"
            )


def joined(seen: Sequence[Cluster], local: Sequence[str] = ()) -> Cluster:
    """Returns the cluster of which each rank sees its own host alone; raises InfeasiblePlan as `join`.

    `local` are the ranks' numbers on their hosts, as the launcher says (LOCAL_RANK).
    """
    named = any(each.names_devices for each in seen)
    kinds = {each.device: each.hosts[0].name for each in seen}
    # A process that sees no device may be a server; that of a worker is refused when it is planned.
    device = next((kind for kind in kinds if kind != HOST), HOST)
    if len(kinds.keys() - {HOST}) > 1 and not named:
        found = ", ".join(f"{kind} on {name}" for kind, name in kinds.items())
        raise InfeasiblePlan(
            f"the launcher's processes have different devices: {found}; say the same device= on all, or name those of "
            f"each host's workers, {NAMED}"
        )
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(seen):
        ranks.setdefault(each.hosts[0].name, []).append(rank)
    if named:
        _require_same_names(seen, ranks)
    hosts = tuple(
        with_own_devices([seen[rank].hosts[0] for rank in own], [local[rank] for rank in own] if local else [])
        for own in ranks.values()
    )
    if len(ranks) == 1:
        return replace(seen[0], hosts=hosts, device=device)
    hosts = tuple(replace(host, ranks=tuple(own)) for host, own in zip(hosts, ranks.values(), strict=True))
    return replace(seen[0], hosts=hosts, ranks=len(seen), device=device)


def _require_same_names(seen: Sequence[Cluster], ranks: Mapping[str, Sequence[int]]) -> None:
    """Refuses hosts whose processes name different devices, or name none and would take what is there."""
    for name, own in ranks.items():
        told = {rank: ", ".join(seen[rank].hosts[0].worker_devices) or seen[rank].device for rank in own}
        if len(set(told.values())) > 1:
            each = ", ".join(f"rank {rank} says {device}" for rank, device in told.items())
            raise InfeasiblePlan(
                f"the processes of {name} name different devices: {each}; let each name those of all the host's "
                "workers, in the order of their ranks"
            )
        first = seen[own[0]]
        if first.device != HOST and not first.names_devices:
            raise InfeasiblePlan(
                f"other hosts name the devices of their workers, and {name} says {first.device}; name them there, too, "
                f"{NAMED}"
            )


def total_of_hosts(count: int, cluster: Cluster) -> int:
    """Returns the sum of the hosts' counts; all the launcher's processes call it together."""
    counts = gather(str(count))
    return sum(int(counts[host.ranks[0]]) for host in cluster.hosts)


@contextmanager
def _notice(text: Callable[[], str] | None) -> Iterator[None]:
    """Prints one line where what follows takes long."""
    if text is None:
        yield
        return
    timer = threading.Timer(NOTICE_S, lambda: sys.stderr.write(f"headrace: {text()}\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _store() -> tuple[StoreClient, bytes, bool]:
    """Joins the store, which rank 0 serves; returns a connection, the run's secret, and what `comes_back` does."""
    _tried.append(True)
    return _connect(start_timeout_s())


def _connect(within_s: float) -> tuple[StoreClient, bytes, bool]:
    rank, world, given = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given_secret()
    if STORE in os.environ:
        return _of_leader(os.environ[STORE], rank, given, within_s)
    address = ""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        if given is not None:
            find, secret = _at_master(rank, given), given
        else:
            address, secret = _on_one_host(rank, world, place)
            find = partial(str, address)
        address = find()
        with _notice(lambda: f"rank {rank} on {host_name()} waits for rank 0: {state_of(address)}"):
            give_up = monotonic() + within_s
            while True:
                try:
                    store = StoreClient(address, secret, within_s, min(within_s, _LISTENS_S))
                    return store, secret, store.add(_began(rank), 1) > 1
                except TimeoutError:
                    if monotonic() > give_up:
                        raise
                    address = find()
    except NotOfThisRun as error:
        raise UsageError(
            f"rank {rank} on {host_name()} cannot join the run: {error}. The process that listens there has another "
            "secret, or is not of this run; what rank 0 prints says which addresses it has refused"
        ) from error
    except (ConnectionError, TimeoutError) as error:
        why = state_of(address) if address else str(error)
        raise RunFailed(
            f"rank {rank} on {host_name()} cannot reach rank 0 at {place} (MASTER_ADDR:MASTER_PORT): {why}"
        ) from error


def _of_leader(address: str, rank: int, secret: bytes | None, within_s: float) -> tuple[StoreClient, bytes, bool]:
    """Joins the store of a run that goes on without its rank 0."""
    if secret is None:
        raise UsageError(f"{STORE}={address} names a run that goes on, and there is no secret; give the run's")
    try:
        store = StoreClient(address, secret, within_s, _LISTENS_S)
    except (ConnectionError, TimeoutError) as error:
        raise RunFailed(f"rank {rank} on {host_name()} cannot reach the run at {STORE}={address}: {error}") from error
    store.add(_began(rank), 1)
    return store, secret, True


def _on_one_host(rank: int, world: int, place: str) -> tuple[str, bytes]:
    """Returns address and secret that rank 0 makes, and gives to processes of its user on its host alone."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world or not is_here(master()):
        remedy = secret_remedy(os.environ)
        if remedy and rank > 0:
            # A scheduler gives all processes the same, so rank 0 says it for all.
            raise WorkerFailed(
                0, os.environ["MASTER_ADDR"], "there is no secret; what it prints says how to make one", exit_code=2
            )
        raise UsageError(
            f"rank {rank} on {host_name()}: the launcher's processes are on several hosts, and have no secret to tell "
            f"each other from strangers; {remedy or f'make one: {HOW_TO_MAKE}'}"
        )
    if rank > 0:
        address, secret = json.loads(ask(place, start_timeout_s()))
        return str(address), bytes.fromhex(secret)
    made = secrets.token_bytes(32)
    address = _serve("tcp://127.0.0.1:0", made)
    atexit.register(hand_out(place, json.dumps([address, made.hex()])).close)
    return address, made


def _at_master(rank: int, secret: bytes) -> Callable[[], str]:
    """Returns what tells where the store is: at the launcher's address, or beside the port that torchrun's agent has.

    Where the agents start all processes again, their store has the address of the run before, until rank 0 has begun.
    """
    host = f"[{master()}]" if ":" in master() else master()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        address = f"tcp://{host}:{os.environ['MASTER_PORT']}"
        return partial(str, _serve(address, secret) if rank == 0 else address)
    # Here, because it costs what other launchers' processes need not pay.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    agent = TCPStore(master(), int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=start_timeout_s()))
    # Not secret: what listens at a wrong address does not have the secret.
    key = "headrace/store"
    if rank == 0:
        agent.set(key, _serve(f"tcp://{host}:0", secret))
    return lambda: str(agent.get(key).decode())


def _serve(address: str, secret: bytes) -> str:
    try:
        server = StoreServer(address, secret)
    except UsageError as error:
        raise UsageError(
            f"rank 0 on {host_name()} cannot listen at {address.removeprefix('tcp://')} (MASTER_ADDR:MASTER_PORT): "
            f"{os.strerror(getattr(error.__cause__, 'errno', 0))}; MASTER_ADDR must be an address of this host, and "
            "MASTER_PORT free"
        ) from None
    atexit.register(server.close)
    return server.address
