"""The decision: the only thing that crosses from deciding to doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.devices import kind_of
from headrace.spec.notebook.shown import ShownAsTable

MOST_MEMBERS = 64
"""How many workers may come and go in a run."""

EVERY_WORKER = -1
"""The owner of a parameter that every worker holds and updates itself."""


@dataclass(frozen=True)
class Role:
    """What one process does.

    Attributes:
        kind: "worker", which computes, "server", which holds shards, or "backup", which holds a copy of a server's.
        device: "cpu" or "cuda:1"; those of workers may be of several kinds.
        data_rank: which share of a global batch it computes, the same on all ranks of one replica; -1 for none.
        stage: which part of its replica it holds: a stage of a pipeline, or a slice of each split layer; of a
            server, which part of all replicas its shards belong to.
        identity: the device's UUID, where its name does not say which one it is; else "".
    """

    rank: int
    kind: str
    host: str
    device: str
    threads: int
    data_rank: int
    stage: int = 0
    identity: str = ""

    @property
    def computes(self) -> bool:
        """Whether it is a worker; else it serves workers."""
        return self.kind == "worker"


@dataclass(frozen=True)
class Segment:
    """A contiguous piece of one flattened parameter, and who updates it.

    It is elements `[start, stop)` of the flattened parameter; the owner is a rank, or `EVERY_WORKER`.
    """

    parameter: str
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage of a pipeline, by the profile of its layers.

    Attributes:
        seconds: for a micro-batch: forward, backward, sending and receiving.
        parameter_bytes: of the parameters that it uses, each once.
        bytes: parameters with their copies, and what is kept of the micro-batches in flight.
        received_bytes: of a micro-batch, from the stages before it.
    """

    layers: int
    seconds: float
    parameter_bytes: int
    bytes: int
    received_bytes: int


@dataclass(frozen=True)
class ProcessCounts:
    """The processes that a strategy is started with, where an engine starts them before it is known where they run.

    Attributes:
        one_host: whether the workers must share the memory of one host.
    """

    workers: int
    servers: int = 0
    backups: int = 0
    one_host: bool = False

    @property
    def serving(self) -> int:
        """Number of processes that hold shards, or a copy of them."""
        return self.servers + self.backups


@dataclass(frozen=True)
class Plan(ShownAsTable):
    """Who does what, and who owns what. `to_plain` and `from_plain` carry it as JSON.

    Attributes:
        options: the strategy's fields, as JSON values.
        roles: one a process, by rank.
        shares: relative weights by which a global batch is split, one a replica, by data rank; where data is leased,
            one a portion.
        gradient_bytes: of all gradients of one replica together.
        segments: every trainable parameter, wholly covered, without overlap.
        partition: names of the layers of each stage, by stage; () where nothing is cut into stages.
        stages: what each of them is expected to take.
        elastic: whether further workers may join a run that goes on, and others leave it.
        balances: whether the shares follow the workers' measured speed while the run goes on.
        min_workers: with so many workers, that exchange gradients in every round, the run goes on where others are
            lost; 0 where it ends with the first that is lost.
        max_workers: to so many it may grow, by replacements of lost workers, too; 0 where lost ones are not replaced.
        trusted: whether accelerators of several hosts exchange by themselves, over a network that may read it.
        slices: of how many ranks each has slices of the same stages.
        moves_rows: whether rows of tables move between servers, so that snapshots of different moments do not fit.
    """

    strategy: str
    options: Mapping[str, object]
    roles: tuple[Role, ...]
    shares: tuple[int, ...]
    gradient_bytes: int
    segments: tuple[Segment, ...] = field(repr=False)
    partition: tuple[tuple[str, ...], ...] = ()
    stages: tuple[StageCost, ...] = ()
    elastic: bool = False
    balances: bool = False
    min_workers: int = 0
    max_workers: int = 0
    moves_rows: bool = False
    trusted: bool = False
    slices: int = 1

    @property
    def workers(self) -> int:
        """Number of processes that compute."""
        return sum(role.kind == "worker" for role in self.roles)

    @property
    def replicas(self) -> int:
        """Number of copies of the model that compute, each on one worker or on several."""
        return len({role.data_rank for role in self.roles if role.kind == "worker"})

    @property
    def servers(self) -> tuple[int, ...]:
        """Ranks of the processes that hold shards."""
        return tuple(role.rank for role in self.roles if role.kind == "server")

    @property
    def backups(self) -> tuple[int, ...]:
        """Ranks of the servers' backups: one for each server, in their order, or none."""
        return tuple(role.rank for role in self.roles if role.kind == "backup")

    @property
    def replaces(self) -> bool:
        """Whether lost workers are replaced: where data is leased, and each worker has all of the model."""
        return bool(self.servers) and self.replicas == self.workers

    @property
    def assigns_data(self) -> bool:
        """Whether each replica always gets the same share of a global batch; else any may get any part of it."""
        return not self.servers and not self.min_workers

    @property
    def data_shares(self) -> tuple[int, ...]:
        """Relative weights of the replicas' shares of the data."""
        return self.shares if self.assigns_data else (1,) * self.replicas

    def role(self, rank: int) -> Role:
        """Returns what a rank is; those behind all others are workers that have joined a run that went on."""
        if rank < len(self.roles):
            return self.roles[rank]
        return replace(self.roles[0], rank=rank, data_rank=0)

    def part_of(self, rank: int) -> str:
        """Returns what a rank holds of the model: "stage 1 of 2, replica 0", or "" of a worker with all of it."""
        ranks, role = stage_ranks(self), self.role(rank)
        own = [str(stage) for stage in range(len(self.partition)) if stage % ranks == role.stage // self.slices]
        if not own:
            return "" if role.kind == "worker" else f"a {role.kind}"
        held = f"stage{'s' * (len(own) > 1)} {' and '.join(own)} of {len(self.partition)}"
        if self.slices > 1:
            held += f", slice {role.stage % self.slices} of {self.slices}"
        if role.kind != "worker":
            return f"{role.kind} of {held}"
        return f"{held}, replica {role.data_rank}" if self.replicas > 1 else held

    def leads(self, rank: int) -> bool:
        """Tells whether a worker is the first of those that hold the same part of the model."""
        stage = self.role(rank).stage
        return rank == min(role.rank for role in self.roles if role.kind == "worker" and role.stage == stage)


def describe_processes(plan: Plan) -> str:
    """Returns how many processes there are of each kind, "2 workers and 1 server with a backup,"."""
    servers, text = len(plan.servers), f"{plan.workers} worker{'s' * (plan.workers > 1)}"
    if servers:
        text += f" and {servers} server{'s' * (servers > 1)}"
    if plan.backups:
        text += f", {'each with a backup' if servers > 1 else 'with a backup'},"
    return text


def stage_ranks(plan: Plan) -> int:
    """Returns how many ranks of a replica have stages of their own."""
    return plan.workers // max(1, plan.replicas) // plan.slices


def device_kinds(plan: Plan) -> tuple[str, ...]:
    """Returns the kinds of the workers' devices, each once, by rank."""
    return tuple(dict.fromkeys(role.device.partition(":")[0] for role in plan.roles if role.computes))


def spans_hosts(plan: Plan) -> bool:
    """Whether the workers are on several hosts."""
    return len({role.host for role in plan.roles if role.computes}) > 1


def place_of(role: Role) -> tuple[str, str]:
    """Returns what is another one for each device: its UUID, or its host and name, or rank where all have one name."""
    own = f" of rank {role.rank}" * kind_of(role.device).launched
    return ("", role.identity) if role.identity else (role.host, role.device + own)


def exchanges_in_host_memory(plan: Plan) -> bool:
    """Whether what workers on accelerators exchange goes through host memory, because no backend carries all of theirs.

    Their devices are of several kinds, or on several hosts whose network is not trusted, or several share one; or
    workers of several hosts come and go, whose store may be lost with a host.
    """
    places = [place_of(role) for role in plan.roles if role.computes and role.device != "cpu"]
    apart = len(set(places)) < len(places) or len(device_kinds(plan)) > 1
    return bool(places) and (apart or (spans_hosts(plan) and (plan.min_workers > 0 or not plan.trusted)))


def sums_lie_in_host_memory(plan: Plan) -> bool:
    """Whether what is exchanged there stays there; else it goes on from the devices of all workers, and comes back."""
    passes = spans_hosts(plan) and not plan.min_workers and all(kind_of(each).streams for each in device_kinds(plan))
    return exchanges_in_host_memory(plan) and not passes


def cuts_shares(plan: Plan) -> bool:
    """Whether a replica's share is computed in several micro-batches, from stage to stage."""
    return bool(plan.partition) and micro_batches(plan) != 1


def micro_batches(plan: Plan) -> object:
    """Returns the option of that name of a pipeline, which may be a level of a hybrid."""
    options: Mapping[str, object] = plan.options
    while "micro_batches" not in options and isinstance(inner := options.get("inner"), Mapping):
        outer = options.get("outer")
        options = outer if isinstance(outer, Mapping) and "micro_batches" in outer else inner
    return options.get("micro_batches")


def has_stages(plan: Plan) -> bool:
    """Whether a replica's share is computed from stage to stage."""
    return bool(plan.partition)


def outlives_workers(plan: Plan) -> bool:
    """Whether the run goes on without a lost worker."""
    return plan.replaces or plan.min_workers > 0


def has_backups(plan: Plan) -> bool:
    """Whether other processes take over from servers that are lost."""
    return bool(plan.backups)


def needs_snapshots(plan: Plan) -> bool:
    """Whether there are processes whose state no other process holds, while workers go on without them."""
    return bool(plan.servers) and not plan.backups and not plan.moves_rows


def name_of(plan: Plan, rank: int) -> str:
    """Returns how errors name a worker: with what it holds of the model, where that is not all."""
    return f"rank {rank} ({part})" if (part := plan.part_of(rank)) else f"rank {rank}"


def replica_leader(plan: Plan, rank: int) -> int:
    """Returns the first rank of the replica that a worker belongs to; a worker that has joined is its own."""
    if rank >= len(plan.roles):
        return rank
    mates = (role for role in plan.roles if role.kind == "worker" and role.data_rank == plan.roles[rank].data_rank)
    return min(role.rank for role in mates)
