"""Which process does what on which device, with how many threads and examples: pure functions of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from headrace.devices import HOST, NAMED, kind_of
from headrace.errors import InfeasiblePlan, UsageError
from headrace.policies.segments import everywhere
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Plan, Role, Segment, has_stages, stage_ranks
from headrace.spec.plan import micro_batches as micro_batches_of

MICRO_BATCHES_A_STAGE = 4
"""Of a pipeline: from so many on, the bubble hardly matters (GPipe, section 2.3)."""


def pieces_of(plan: Plan, examples: int, micro_batches: int) -> list[int]:
    """Returns how many examples of a global batch are computed at a time, by workers without stages in so many."""
    if has_stages(plan):
        chosen = micro_batches_of(plan)
        micro_batches = chosen if isinstance(chosen, int) else MICRO_BATCHES_A_STAGE * stage_ranks(plan)
    shares = [stop - start for start, stop in bounds(examples, plan.data_shares)]
    parts = (bounds(share, (1,) * micro_batches) for share in shares)
    return [stop - start for pieces in parts for start, stop in pieces if stop > start]


def worker_roles(strategy: str, workers: int | None, cluster: Cluster, spread: bool = False) -> tuple[Role, ...]:
    """Places `workers`: as many as the launcher started, or as there are accelerators, if None.

    `spread` says whether they may be on several hosts, where a launcher has started them. Raises an `InfeasiblePlan` if
    the number contradicts the launcher or the machine.
    """
    if len(cluster.hosts) > 1:
        if not spread or cluster.ranks is None:
            names = ", ".join(host.name for host in cluster.hosts)
            remedy = "start a process on each by a launcher" if spread else "use mirrored or parameter_averaging there"
            raise InfeasiblePlan(
                f"{strategy} works on one host, this cluster has {len(cluster.hosts)}: {names}; {remedy}"
            )
        _count(strategy, workers, cluster)
        roles = [role for host in cluster.hosts for role in _roles_on(strategy, host, host.ranks, cluster)]
        return _with_own_devices(strategy, roles, cluster)
    (host,) = cluster.hosts
    count = _count(strategy, workers, cluster)
    return _with_own_devices(strategy, _roles_on(strategy, host, range(count), cluster), cluster)


def worker_and_server_roles(
    strategy: str, workers: int | None, servers: int, cluster: Cluster, backups: int = 0
) -> tuple[Role, ...]:
    """Places workers, then servers, and one backup of each server if `backups` is 1.

    Of a launcher's processes the last are servers and backups; a backup is on another host than its server. Raises an
    `InfeasiblePlan` if the numbers contradict the launcher or the machine.
    """
    kinds = ["server"] * servers + ["backup"] * servers * backups
    if cluster.ranks is None:
        # Several hosts need a launcher: with `spread` the error says so.
        roles = worker_roles(strategy, workers, cluster, spread=True)
        host = cluster.hosts[0].name
        return (*roles, *(Role(len(roles) + index, kind, host, "cpu", 1, -1) for index, kind in enumerate(kinds)))
    if backups and len(cluster.hosts) == 1:
        raise InfeasiblePlan(
            f"{strategy} asks for backups={backups}, and a launcher started all processes on one host, with which a "
            "server and its backup would be lost; start them on several hosts, or use backups=0, or start the run "
            "without a launcher"
        )
    left, serving = cluster.ranks - len(kinds), f"{servers} servers" + backups * f" and {servers} backups"
    if left < 1 or workers not in (None, left):
        asked = f"{workers} workers and {serving}" if workers is not None else f"workers and {serving}"
        raise InfeasiblePlan(
            f"{strategy} asks for {asked} and the launcher started {cluster.ranks} processes, the last "
            f"{len(kinds)} of which are servers; start {(workers or 1) + len(kinds)}, or ask for fewer"
        )
    among = tuple(replace(host, ranks=tuple(rank for rank in host.ranks if rank < left)) for host in cluster.hosts)
    if len(cluster.hosts) > 1:
        for part in among:
            _require_names(strategy, part, len(part.ranks))
        among = tuple(host for host in among if host.ranks)
    roles = worker_roles(strategy, workers, replace(cluster, hosts=among, ranks=left), spread=True)
    names = {rank: host.name for host in cluster.hosts for rank in host.ranks}
    hosts = [names.get(rank, cluster.hosts[0].name) for rank in range(left, cluster.ranks)]
    kinds = _pair_over_hosts(strategy, hosts, left) if backups else kinds
    placed = enumerate(zip(kinds, hosts, strict=True), left)
    return (*roles, *(Role(rank, kind, host, "cpu", 1, -1) for rank, (kind, host) in placed))


def data_parallel_plan(
    strategy: str,
    options: Mapping[str, object],
    workers: int | None,
    model: ModelSpec,
    cluster: Cluster,
    *,
    copies: tuple[int, int],
    cut: Callable[[Sequence[ParameterSpec], int], tuple[Segment, ...]] = everywhere,
    spread: bool = False,
    balance: str = "equal",
) -> Plan:
    """Plans workers that each hold the whole model and take equal shares of a global batch.

    Args:
        workers: how many were asked for; None for what there is.
        copies: of the trainable parameters: for each worker, and once for all. They are refused where they do not fit.
        cut: gives every parameter owners, given how many workers there are.
        balance: "speed" where the shares are to follow the workers' speed.

    Raises:
        InfeasiblePlan: the cluster cannot hold it, with the numbers.
    """
    roles = worker_roles(strategy, workers, cluster, spread)
    copies_each, once = copies
    require_memory(strategy, (copies_each * len(roles) + once) * model.trainable_bytes, cluster, roles, model)
    _require_table_memory(strategy, roles, model, cluster)
    return Plan(
        strategy=strategy,
        options=options,
        roles=roles,
        shares=(1,) * len(roles),
        gradient_bytes=model.trainable_bytes,
        segments=cut(model.parameters, len(roles)),
        balances=balance == "speed",
    )


def elastic_plan(plan: Plan, min_workers: int | None, max_workers: int | None, cluster: Cluster) -> Plan:
    """Returns a plan with workers that may be lost, join and leave; as it is without `min_workers`.

    Raises:
        InfeasiblePlan: they are fewer than `min_workers`, or a launcher's, and more are to join.
    """
    if min_workers is None:
        return plan
    if cluster.ranks is not None and (max_workers or 0) > cluster.ranks:
        raise InfeasiblePlan(
            f"max_workers={max_workers}, and the launcher has started {cluster.ranks} processes, to which headrace "
            "adds none; leave out max_workers, or start more"
        )
    workers = plan.workers
    there = f"{plan.strategy} has {workers} worker{'s' * (workers > 1)}"
    how = "give workers=" if cluster.ranks is None else "let the launcher start "
    if workers < min_workers:
        raise InfeasiblePlan(
            f"{there}, fewer than min_workers={min_workers}; {how}{min_workers}, or a lower min_workers"
        )
    if max_workers and workers > max_workers:
        raise InfeasiblePlan(f"{there}, more than max_workers={max_workers}; {how}{max_workers}, or leave it out")
    return replace(plan, elastic=True, min_workers=min_workers, max_workers=max_workers or 0)


def require_cpu(strategy: str, cluster: Cluster) -> None:
    """Refuses accelerators with an `InfeasiblePlan`, for a strategy of one's own that does not know them."""
    if cluster.device != HOST:
        raise InfeasiblePlan(
            f"{strategy} runs on CPUs, and the devices are {kind_of(cluster.device).row()}; use device='cpu'"
        )


def require_memory(
    strategy: str, needed_bytes: int, cluster: Cluster, roles: Sequence[Role], model: ModelSpec, server_bytes: int = 0
) -> None:
    """Refuses a plan that needs more host memory than there is.

    `needed_bytes` are of all workers together, if they are on CPUs; one on a device has there what it trains with, and
    builds the model in host memory. Each host's are in proportion to its workers. Raises an `InfeasiblePlan` with both
    numbers.
    """
    workers = [role for role in roles if role.computes]
    far = sum(role.device != HOST for role in workers)
    needed_bytes = needed_bytes * (len(workers) - far) // len(workers) + far * model.parameter_bytes + server_bytes
    for host in cluster.hosts:
        needed = needed_bytes * len(host.ranks) // cluster.ranks if cluster.ranks and host.ranks else needed_bytes
        if needed > host.memory_bytes:
            raise InfeasiblePlan(
                f"{strategy} needs {needed:,} bytes of host memory for parameters and gradients, and {host.name} "
                f"has {host.memory_bytes:,} left; use fewer workers, or central_storage, which keeps one copy"
            )


def _require_table_memory(strategy: str, roles: Sequence[Role], model: ModelSpec, cluster: Cluster) -> None:
    """Refuses sparse tables, of which every worker may come to hold all rows, with an `InfeasiblePlan`."""
    if not model.tables:
        return
    table_bytes = sum(table.bytes for table in model.tables)
    largest = max(model.tables, key=lambda table: table.bytes)
    for host in cluster.hosts:
        workers = sum(role.host == host.name for role in roles)
        if workers * table_bytes > host.memory_bytes:
            raise InfeasiblePlan(
                f"{strategy} needs {workers * table_bytes:,} bytes on {host.name} for the rows of sparse tables and "
                f"their optimizer's state on {workers} workers, and it has {host.memory_bytes:,} left; the largest "
                f"table is {largest.name!r}, {largest.rows:,} rows of {largest.width}; use parameter_server, with "
                "servers on several hosts, or with rows=hr.RowOptions(expected=1000) where fewer rows are ever changed"
            )


def _with_own_devices(strategy: str, roles: Sequence[Role], cluster: Cluster) -> tuple[Role, ...]:
    """Returns the workers by rank; raises an `InfeasiblePlan` where one lacks a device, or two were given one."""
    if cluster.device != HOST and not cluster.names_devices:
        from headrace.policies.own_devices import require_own_devices

        require_own_devices(strategy, roles, cluster.device)
    return tuple(sorted(roles, key=lambda role: role.rank))


def _roles_on(strategy: str, host: Host, ranks: Sequence[int], cluster: Cluster) -> list[Role]:
    """Returns the workers of a host."""
    devices = _devices(strategy, host, len(ranks), cluster)
    threads = threads_per_worker(host.cores, len(ranks), host.threads)
    # Those that are named follow each other, and so do accelerators.
    identities = host.identities[: len(ranks)] if devices[:1] != (HOST,) or host.worker_devices else ()
    return [
        Role(rank, "worker", host.name, device, threads, rank, identity=identity)
        for rank, device, identity in zip(ranks, devices, identities or ("",) * len(ranks), strict=True)
    ]


def _devices(strategy: str, host: Host, workers: int, cluster: Cluster) -> Sequence[str]:
    """Returns the devices of a host's workers: those that are named, or one accelerator each, or CPUs."""
    if host.worker_devices:
        _require_names(strategy, host, workers)
        return host.worker_devices
    if cluster.device == HOST or cluster.names_devices:
        return (HOST,) * workers
    if workers > (count := len(host.accelerators)):
        raise InfeasiblePlan(
            f"{strategy} asks for {workers} workers on {cluster.device} and {host.name} has {count} such devices; use "
            f"workers={count} or device='cpu', or name the device of each, {NAMED}: workers that share one exchange "
            "through host memory"
        )
    return host.accelerators[:workers]


def _require_names(strategy: str, host: Host, workers: int) -> None:
    """Refuses a host whose workers' devices are named, but not one for each."""
    named = host.worker_devices
    if named and len(named) != workers:
        raise InfeasiblePlan(
            f"device names {len(named)} device{'s' * (len(named) != 1)} on {host.name}, {', '.join(named)}, and "
            f"{strategy} has {workers} worker{'s' * (workers != 1)} there; name one for each worker, or have as many "
            "workers"
        )


def _pair_over_hosts(strategy: str, hosts: Sequence[str], first: int) -> list[str]:
    """Returns which of the last ranks, from `first` on, are servers and which are backups, each on another host."""
    pairs = len(hosts) // 2
    server, backup = ["server"], ["backup"]
    orders = (server * pairs + backup * pairs, (server + 2 * backup + server) * pairs, (server + backup) * pairs)
    for kinds in orders:
        ranks = {kind: [place for place in range(2 * pairs) if kinds[place] == kind] for kind in set(kinds)}
        paired = list(zip(ranks["server"], ranks["backup"], strict=False))
        if len(paired) == pairs and all(hosts[server] != hosts[other] for server, other in paired):
            return kinds[: 2 * pairs]
    where = ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(hosts, first))
    raise InfeasiblePlan(
        f"{strategy} needs each backup on another host than its server, and the last {len(hosts)} processes are "
        f"{where}; let the launcher number these processes by turns over the hosts (--distribution cyclic), or use "
        "backups=0"
    )


def _count(strategy: str, workers: int | None, cluster: Cluster) -> int:
    if cluster.ranks is not None:
        if workers not in (None, cluster.ranks):
            raise InfeasiblePlan(
                f"{strategy} asks for {workers} workers and the launcher started {cluster.ranks} processes; "
                f"leave workers out, or start {workers}"
            )
        return cluster.ranks
    if workers is not None:
        return workers
    return sum(len(host.worker_devices) for host in cluster.hosts) or max(1, cluster.accelerators)


def threads_per_worker(cores: int, workers_on_host: int, most: int = 0) -> int:
    """Returns the threads of one worker so that those of a host do not crowd each other out; at least 1.

    Each may have `most`, or any number where that is 0.

    >>> threads_per_worker(8, 3), threads_per_worker(8, 3, 1)
    (2, 1)
    """
    if cores < 1 or workers_on_host < 1:
        raise UsageError(f"need at least 1 core and 1 worker, got {cores} and {workers_on_host}")
    return max(1, min(cores // workers_on_host, most or cores))


def split(count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Returns how many of `count` examples each worker gets: in proportion to `shares`, whole, summing up.

    Equal shares differ by at most 1 and the first workers get the remainder; a share of 0 gets none.

    >>> split(10, (1, 1, 1))
    (4, 3, 3)
    """
    total = sum(shares)
    sizes = [count * share // total for share in shares]
    remainders = [(count * share) % total for share in shares]
    left = count - sum(sizes)
    for worker in sorted(range(len(shares)), key=lambda worker: (-remainders[worker], worker))[:left]:
        sizes[worker] += 1
    return tuple(sizes)


def bounds(count: int, shares: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns each worker's `(start, stop)` of a batch of `count`, in order and without gaps."""
    ends = tuple(accumulate(split(count, shares)))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))
