"""Parameter servers: workers push gradients, servers apply them, workers pull parameters.

    compute                    synchronize                               update
    on the last pulled         push gradients to the shards, pull        on the shard
    parameters                 parameters; the staleness bound says
                               who may proceed

    worker 0   ░compute░ push ─┐           ┌─ pull ░compute░░ push ─┐
    server     ───────────────▓▓▓─────▓▓▓──┴───────────────────────▓▓▓───
    worker 1   ░░░░compute░░░░░░ push ─┘└─ pull ░░░compute░░

With a bound of 0 all workers' gradients of a round are one step (synchronous); without a bound every gradient is a step
of its own as soon as it comes (asynchronous); in between, every gradient is a step, and who is ahead waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import InfeasiblePlan, UsageError
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.data_leases import ServerDataLeases
from headrace.parameter_server.client.exchange import ServedExchange
from headrace.parameter_server.client.gradients import GradientBuffer, LeaderClient, ReplicaGroup
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.planning import (
    check_backups,
    check_seats,
    check_served,
    check_whole,
    connect,
    layout_of,
    leads,
    open_port,
    pair,
    places_of,
    seats,
)
from headrace.parameter_server.server.optimizer import Remedies, RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.policies.staleness import Admission, Bounded, Combination, EveryPush, FirstPushes, Unbounded
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.strategy import ServerContext, Strategy, WorkerContext, check_count, describe_options
from headrace.training.clipping import HEALTHY, StepDecision
from headrace.training.exchange import Replica


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Asynchronous, bounded-stale or synchronous SGD over parameter servers.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold shards.
        backups: of each server: with 1, nothing is lost with a server, and the run goes on.
        staleness_bound: how many rounds the fastest worker may be ahead of the slowest; None for any number, 0 for
            lock-step.
        backup_workers: so many of the workers are spare: a round takes the first gradients of the others' number, and
            drops those that come late.
        sharding: how parameters are cut along their first axis: "whole", "fixed_shards:4", "max_size:4MB",
            "min_size:256kB/8"; None for pieces of at most 4 MB, over TCP 1 MB, where the
            optimizer can work on pieces.
        placement: which server gets a shard: "greedy" by bytes, or "round_robin".
        scale: "share" applies a gradient with the learning rate times its share of the global batch; "full" with the
            whole learning rate, as papers do.
        transport: "shared_memory" on one host, or "tcp", encrypted, also on one.
        push_codec, pull_codec: how gradients and parameters travel: "plain", "bf16", or "int8" with error feedback.
        remedies: for stale gradients; none by default.
    """

    workers: int | None = None
    servers: int = 1
    backups: int = 0
    staleness_bound: int | None = None
    backup_workers: int = 0
    sharding: str | None = None
    placement: str = "greedy"
    scale: str = "share"
    transport: str = "shared_memory"
    push_codec: str = "plain"
    pull_codec: str = "plain"
    remedies: Remedies = field(default_factory=Remedies)

    name = "parameter_server"
    synchronous = False

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_count("servers", self.servers)
        check_backups(self.backups, self.servers)
        check_whole("staleness_bound", self.staleness_bound)
        check_whole("backup_workers", self.backup_workers)
        check_seats(self.sharding, self.placement, self.scale, (self.transport, self.push_codec, self.pull_codec))
        if self.backup_workers and self.staleness_bound:
            raise UsageError(
                f"backup_workers={self.backup_workers} makes rounds synchronous, and staleness_bound="
                f"{self.staleness_bound} lets workers be apart; give one of them"
            )

    @property
    def elastic(self) -> bool:
        # Whoever waits for others counts them.
        return self.staleness_bound is None and not self.backup_workers

    def check(self, options: Options) -> None:
        check_served(options)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        roles, segments = seats(
            self.name,
            self.workers,
            self.servers,
            self.sharding,
            self.placement,
            model,
            cluster,
            self.transport,
            backups=self.backups,
        )
        workers = sum(role.kind == "worker" for role in roles)
        if self.backup_workers and self.servers > 1:
            raise InfeasiblePlan(
                f"backup_workers={self.backup_workers} drops what comes late, and each of {self.servers} servers would "
                "drop another gradient; use servers=1"
            )
        if self.backup_workers >= workers:
            raise InfeasiblePlan(
                f"{self.backup_workers} of {workers} workers cannot be backups; a round needs at least one gradient"
            )
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=roles,
            shares=(1,) * (workers - self.backup_workers),
            gradient_bytes=model.trainable_bytes,
            segments=segments,
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        servers, replica_group = context.servers, context.agreement()
        layouts = [layout_of(plan, context.model, server) for server in servers.ranks]
        places = [places_of(layout, context.module) for layout in layouts]
        roles = [plan.roles[server] for server in servers.ranks]
        # Whoever drops what comes late must drop it whole.
        together = self.backup_workers > 0
        client = connect(
            servers.addresses(), layouts, places, (servers.worker, servers.incarnation), context.group.check, roles,
            context.closing,
            together=together, find=servers.find,
        )  # fmt: skip
        if context.inside:
            client.pulled = context.inside.spread
        brings = leads(client, servers.worker)
        # Where some are lost, others may have to do their portions alone.
        rests = plan.replaces and (self.staleness_bound is not None or self.backup_workers > 0)
        leader = LeaderClient(client, replica_group.group)
        portions = ServerDataLeases(leader, brings, len(layouts), len(plan.shares), rests=rests)
        buffer = GradientBuffer(layouts, context.model)
        exchange = ParameterServerExchange(client, layouts, portions, buffer, context, replica_group, brings)
        exchange.give(places)
        return Replica(context.whole_model(buffer, portions=len(plan.shares)), exchange, portions)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        rank = plan.server_of(rank)
        layout = layout_of(plan, context.model, rank)
        workers, first = plan.replicas, rank == plan.servers[0]
        admission, combination = self._regime(workers)
        full = self.scale == "full"
        schedule = RoundClock(context.options, context.rounds_per_epoch, context.first)
        applier = ShardOptimizer(layout, context.optimizer, context.model.parameters, schedule, full, self.remedies)
        machines = [Shard(range(workers), admission, combination) for _ in range(len(layout))]
        # Whoever is bound to the others does as many rounds as they do.
        fixed = self.staleness_bound is not None and not self.backup_workers
        leases = (
            LeaseTable(len(plan.shares), context.until, context.first, fixed, workers=range(workers)) if first else None
        )
        coordinates = (leases, context.first, context.until, 1) if leases else None
        port = open_port(layout, self.transport)
        replicated = pair(port, layout, context.process) if self.backups else None
        return Server(
            replicated.transport if replicated else port, layout, applier, machines, coordinates, replicated=replicated
        )

    def _regime(self, workers: int) -> tuple[Admission, Combination]:
        if self.staleness_bound == 0 or self.backup_workers:
            return Unbounded(), FirstPushes(workers - self.backup_workers)
        return (Unbounded() if self.staleness_bound is None else Bounded(self.staleness_bound)), EveryPush()


class ParameterServerExchange(ServedExchange):
    """Args:
    client: of this worker.
    forms: the servers' shards.
    portions: says from which lease a gradient is.
    held: the gradients.
    context: of this worker.
    agreement: of its replica.
    leads: whether this worker brings what there is to begin with.
    """

    def __init__(
        self,
        client: Client,
        layouts: Sequence[ShardLayout],
        portions: ServerDataLeases,
        buffer: GradientBuffer,
        context: WorkerContext,
        replica_group: ReplicaGroup,
        leads: bool,
    ) -> None:
        super().__init__(client, layouts, buffer, context.group, replica_group, leads)
        self.parameter_bytes = sum(parameter.bytes for parameter in context.model.parameters)
        self._portions = portions
        self._fresh = False

    def begin(self, round_: int) -> None:
        if not self._fresh:
            self.client.pull()
        self._fresh = False

    def synchronize(self, finite: bool = True) -> StepDecision:
        portions = self._portions
        if portions.lease < 0:
            # It had no data before the workers meet, and nobody waits for it.
            return HEALTHY
        decision = self.judge(finite)
        known = decision.apply if self.replica_group.looked or not decision.apply else None
        reason = self.client.push(
            self.buffer.by_shard(), portions.lease, portions.weight, portions.share, known, pull=True
        )
        self._fresh = True
        # The lease is done when all ranks of the replica have pushed.
        portions.late = self.replica_group.any(reason == Reason.LATE)
        return decision
