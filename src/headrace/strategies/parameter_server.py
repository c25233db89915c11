"""Parameter servers: workers push gradients, servers apply them, workers pull parameters.

    compute                    synchronize                               update
    on the last pulled         push gradients to the shards, pull        on the shard
    parameters                 parameters; the staleness bound says
                               who may proceed

    worker 0   ░compute░ push ─┐           ┌─ pull ░compute░░ push ─┐
    server     ───────────────▓▓▓─────▓▓▓──┴───────────────────────▓▓▓───
    worker 1   ░░░░compute░░░░░░ push ─┘└─ pull ░░░compute░░

With a bound of 0 all workers' gradients of a round are one step (synchronous); without a bound every gradient is a step
of its own as soon as it arrives (asynchronous); in between, every gradient is a step, and a worker that is ahead waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from headrace.aggregation.robust import WorkerMean
from headrace.aggregation.table import require_workers, worker_mean
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.parameter_server.client.data_leases import ServerDataLeases
from headrace.parameter_server.client.exchange import ParameterServerExchange
from headrace.parameter_server.connecting import brings_parameters, build_server, connect
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.planning import (
    check_server_options,
    check_whole,
    layout_of,
    places_of,
)
from headrace.parameter_server.replication.failover import server_of
from headrace.parameter_server.server.optimizer import Remedies, RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.sparse.client import RowClient
from headrace.parameter_server.sparse.near import RowsAhead
from headrace.parameter_server.sparse.placement import ROW_PLACEMENTS, RowPlaces
from headrace.parameter_server.sparse.planning import RowOptions, check_near, part_of, require_rows
from headrace.parameter_server.sparse.rebalancing import RowMover
from headrace.parameter_server.sparse.tables import ServedTables
from headrace.parameter_server.sparse.worker import WorkerRows
from headrace.policies.behaviour import Behaviour, ServerTerms
from headrace.policies.staleness import Admission, Bounded, Combination, EveryPush, FirstPushes, Unbounded
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.checks import check_count, refuse_backups
from headrace.strategies.context import WorkerContext
from headrace.strategies.served import ServedStrategy, ServerContext, agreement
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.exchange import Replica
from headrace.transport.codec import sent_share

_REBALANCE = ":rebalance"


@dataclass(frozen=True)
class ParameterServer(ServedStrategy):
    """Asynchronous, bounded-stale or synchronous SGD over parameter servers.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold shards.
        backups: of each server: with 1, the run continues without loss when a server fails.
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
        transport: "shared_memory" within a host, or "tcp", also there; between hosts TCP, encrypted.
        push_codec, pull_codec: how gradients and parameters travel: "plain", "bf16", or "int8" with error feedback.
        remedies: for stale gradients; none by default.
        sparse: names of embeddings that are trained as with `sparse=True`; "*.item" for those that end so.
        row_placement: which server has a row of a sparse embedding: by "hash" of its index, or by "range". With
            "hash:rebalance" or "range:rebalance", rows that are asked for most move to servers that are asked for less,
            while training goes on.
        rows: how workers read rows of sparse embeddings, and how many the servers must have memory for.
        mean: with `staleness_bound=0` or `backup_workers`, what the mean of a round's gradients is: None for that
            weighted by examples, "trimmed_mean" or a `WorkerMean` for another.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.ParameterServer(workers=2, servers=1, staleness_bound=2))
        >>> len(run.plan.roles), run.plan.workers
        (3, 2)
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
    sparse: Sequence[str] = field(default_factory=list)
    row_placement: str = "hash"
    rows: RowOptions = field(default_factory=RowOptions)
    mean: str | WorkerMean | None = None

    name = "parameter_server"
    lock_step = False
    sparse_tables = True
    mixes_devices = True
    alone: ClassVar[Mapping[str, object]] = {"workers": 1, "backup_workers": 0}

    @property
    def equals_one_device(self) -> bool:
        # Servers that wait for all workers make their gradients one step.
        return self.staleness_bound == 0 and not self.backup_workers and self.scale == "share" and self.mean is None

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_count("servers", self.servers)
        check_whole("staleness_bound", self.staleness_bound)
        check_whole("backup_workers", self.backup_workers)
        codecs = (self.push_codec, self.pull_codec)
        check_server_options(
            self.servers, self.backups, self.transport, self.sharding, self.placement, self.scale, codecs
        )
        if worker_mean(self.mean) is not None and self.staleness_bound != 0 and not self.backup_workers:
            raise UsageError(
                f"mean={self.mean!r} is of a round's gradients, and with staleness_bound={self.staleness_bound} each "
                "gradient is a step by itself; use staleness_bound=0, or backup_workers"
            )
        known = [*ROW_PLACEMENTS, *(f"{name}{_REBALANCE}" for name in ROW_PLACEMENTS)]
        if self.row_placement not in known:
            raise UnknownName("row_placement", self.row_placement, known)
        object.__setattr__(self, "rows", RowOptions.of(self.rows))
        names = [self.sparse] if isinstance(self.sparse, str) else list(self.sparse)
        object.__setattr__(self, "sparse", names)
        if self.backup_workers and self.staleness_bound:
            raise UsageError(
                f"backup_workers={self.backup_workers} makes rounds synchronous, and staleness_bound="
                f"{self.staleness_bound} lets workers be apart; give one of them"
            )

    def sparse_names(self) -> tuple[str, ...]:
        return tuple(self.sparse)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        # The number of workers is fixed where they wait for each other.
        elastic = self.staleness_bound is None and not self.backup_workers
        plan = self.plan_with_servers(model, cluster, spare_workers=self.backup_workers, elastic=elastic)
        require_workers(worker_mean(self.mean), len(plan.shares))
        check_near(self.rows, model.tables, len(plan.shares), self.staleness_bound)
        if model.tables:
            self._check_tables(model, plan, cluster)
            plan = replace(plan, moves_rows=self._rebalances)
        if self.backup_workers and self.servers > 1:
            raise InfeasiblePlan(
                f"backup_workers={self.backup_workers} drops what comes late, and each of {self.servers} servers would "
                "drop another gradient; use servers=1"
            )
        return plan

    def behave(self, workers: int) -> Behaviour:
        terms = ServerTerms(
            self.policies(workers),
            self.servers,
            fixed=self._fixed,
            pushed=sent_share(self.push_codec),
            pulled=sent_share(self.pull_codec),
            spare=self.backup_workers,
        )
        own = f"a rehearsal has the weighted mean of gradients, and not mean={self.mean!r}; use real workers"
        return Behaviour(terms, not_rehearsed=refuse_backups(self.backups) or (own if self.mean is not None else ""))

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        servers, model, replica_group = context.servers(), context.model, agreement(context)
        layouts = [layout_of(plan, model, server) for server in servers.ranks]
        places = [places_of(layout, context.module) for layout in layouts]
        # A late gradient must be dropped in all shards, and one step() may have to have all of them.
        together = self.backup_workers > 0 or model.optimizer.at_once
        client = connect(servers, layouts, places, context.group.check, context.closing, together=together)
        if context.inside:
            client.pulled = context.inside.spread
        leads = brings_parameters(client, servers.worker)
        # When workers are lost, the others may have to compute their leases alone.
        rests = plan.replaces and (self.staleness_bound is not None or self.backup_workers > 0)
        leases = ServerDataLeases(client, replica_group.group, leads, len(plan.shares), rests=rests)
        rows = None
        if model.tables:
            moved = RowClient(client, self._places(plan, model), self._rebalances)
            mover = RowMover(moved, model.tables, len(plan.shares)) if self._rebalances else None
            ahead = RowsAhead(client, moved) if self.rows.prefetch else None
            rows = WorkerRows(moved, tuple(sparse_layers(context.module)), mover, self.rows, ahead)
            leases.prepare = rows.foresee if ahead is not None else None
        exchange = ParameterServerExchange(leases, layouts, model, context.group, replica_group, rows)
        exchange.load_values(places)
        return Replica(context.whole_model(exchange.buffer, local_shares=len(plan.shares)), exchange, leases)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        rank, workers = server_of(plan, rank), plan.replicas
        layout = layout_of(plan, context.model, rank)
        clock = RoundClock(context.options, context.rounds_per_epoch, context.first)
        full, model = self.scale == "full", context.model
        tables = None
        if model.tables:
            rounds, divide = (context.rounds_per_epoch, context.first), self.remedies.divide
            own = replace(model, tables=tuple(part_of(table, len(plan.servers)) for table in model.tables))
            tables = ServedTables(own, context.optimizer, context.options, rounds, full, divide)
            if self._rebalances:
                tables.moving = plan.servers.index(rank), self._places(plan, model)
        optimizer = ShardOptimizer(
            layout, context.optimizer, model.parameters, clock, full, self.remedies, tables, model.optimizer
        )
        rule = worker_mean(self.mean)
        optimizer.mean = rule.mean if rule else None
        table = LeaseTable(len(plan.shares), context.until, context.first, self._fixed, workers=range(workers))
        leases = (table, context.first, context.until, 1)
        policies = self.policies(workers)
        return build_server(plan, rank, layout, optimizer, policies, leases, self.transport, context.process)

    @property
    def _fixed(self) -> bool:
        # Workers with a bounded staleness each compute the same number of rounds.
        return self.staleness_bound is not None and not self.backup_workers

    @property
    def _rebalances(self) -> bool:
        return self.row_placement.endswith(_REBALANCE)

    @property
    def _base_placement(self) -> str:
        return self.row_placement.removesuffix(_REBALANCE)

    def _places(self, plan: Plan, model: ModelSpec) -> RowPlaces:
        return RowPlaces(ROW_PLACEMENTS[self._base_placement], model.tables, len(plan.servers))

    def _check_tables(self, model: ModelSpec, plan: Plan, cluster: Cluster) -> None:
        """Refuses what rows do not have, and tables that the servers have no memory for."""
        first = model.tables[0].name
        if self.mean is not None:
            raise InfeasiblePlan(
                f"mean={self.mean!r} is of a round's gradients, and each worker's rows of the sparse embedding "
                f"{first!r} are a step by themselves; leave mean out"
            )
        if self.backup_workers:
            raise InfeasiblePlan(
                f"backup_workers={self.backup_workers} drops what comes late, and the rows of the sparse embedding "
                f"{first!r} are pushed by themselves; use backup_workers=0"
            )
        if self._rebalances and self.staleness_bound == 0:
            raise InfeasiblePlan(
                f"row_placement={self.row_placement!r} moves rows of the sparse embedding {first!r} while workers "
                "push, and with staleness_bound=0 they wait for each other; use staleness_bound=None, or "
                f"row_placement={self._base_placement!r}"
            )
        if self.remedies.compensation or self.remedies.asynchronous_workers:
            raise InfeasiblePlan(
                f"of the remedies for stale gradients, the rows of the sparse embedding {first!r} have divide alone; "
                "leave out compensation and asynchronous_workers"
            )
        require_rows(self.name, model.tables, self.rows.expected, plan, cluster)

    def policies(self, workers: int) -> tuple[Admission, Combination]:
        if self.staleness_bound == 0 or self.backup_workers:
            return Unbounded(), FirstPushes(workers - self.backup_workers)
        return (Unbounded() if self.staleness_bound is None else Bounded(self.staleness_bound)), EveryPush()
