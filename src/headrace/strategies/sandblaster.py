"""Sandblaster L-BFGS: one large batch at a time, in portions that workers ask for; the solver's vectors are on servers.

    compute                    synchronize                                 update
    one portion of the batch   push its gradient; one worker steers the    on the servers: search direction,
    after the other, on        solver, which sees numbers alone            history and line search
    demand

    worker 0   ░p0░ ░p2░ ░p3░ ░p5░ steers ░p0░ ░p2░
    worker 1   ░p1░ ░░p4░░         ─┐     ░p1░ ░p3░
    servers    ─sum of gradients──▓▓▓▓▓▓──sum of gra...     x ← x + t d

A portion that a slow worker has is computed by a fast one, too, and the first gradient counts.

Dean et al., "Large scale distributed deep networks", 2012, section 4.3 and algorithm 2 (appendix).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from headrace.errors import UsageError
from headrace.internals import BatchNorm, DropoutNd
from headrace.modules import frozen_until
from headrace.parameter_server.client.data_leases import ServerDataLeases
from headrace.parameter_server.connecting import brings_parameters, build_server, connect
from headrace.parameter_server.core.portions import PortionTable
from headrace.parameter_server.lbfgs.client import PortionExchange, Steering
from headrace.parameter_server.lbfgs.solver import SolverOptions
from headrace.parameter_server.lbfgs.store import VectorStore
from headrace.parameter_server.planning import (
    check_server_options,
    layout_of,
    places_of,
)
from headrace.parameter_server.replication.failover import server_of
from headrace.parameter_server.server.server import Server
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.strategies.checks import check_count
from headrace.strategies.context import ModelProbe, WorkerContext
from headrace.strategies.refusals import LBFGS, Refusal
from headrace.strategies.served import ServedStrategy, ServerContext, agreement
from headrace.training.exchange import Replica
from headrace.training.optimizer import build

_PORTIONS = 8
"""Portions of a batch for each worker: a worker that is 4 times slower than the others delays them little."""

_WORKING_COPIES = 12
"""What a server has besides the history: parameters, direction, gradients of a line search, and sums of them."""


@dataclass(frozen=True)
class Sandblaster(ServedStrategy):
    """L-BFGS over large batches, whose vectors are on servers.

    The job's optimizer is `torch.optim.LBFGS`, and says all but `history`. One round is one call of its `step`: up to
    `max_iter` iterations and `max_eval` evaluations over one global batch, with a line search if `line_search_fn` is
    "strong_wolfe". With `max_iter=1`, give `max_eval=25`: torch's own default leaves one evaluation. The loss that is
    reported is that at the round's begin, and examples count once a round.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold a part of every vector.
        history: pairs of the last steps and changes of the gradient; fewer if the optimizer's `history_size` is less.
        portions: of a global batch, handed out one by one; None for 8 a worker. The result depends on their number,
            by rounding, and not on who computes them.
        backups: of each server: with 1, the run continues without loss when a server fails.
        sharding, placement: as of `ParameterServer`.
        transport: "shared_memory" within a host, or "tcp", also there; between hosts TCP, encrypted.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> from dataclasses import replace
        >>> from functools import partial
        >>> job = replace(job, optimizer=partial(torch.optim.LBFGS, max_iter=2))
        >>> hr.fit(job, hr.Sandblaster(workers=2, servers=1)).status
        'ok'
    """

    workers: int | None = None
    servers: int = 1
    history: int = 10
    portions: int | None = None
    backups: int = 0
    sharding: str | None = None
    placement: str = "greedy"
    transport: str = "shared_memory"

    name = "sandblaster"
    equals_one_device = False
    lock_step = False
    closures = True
    snapshots = False

    def __post_init__(self) -> None:
        for name in ("workers", "portions"):
            check_count(name, getattr(self, name))
        for name in ("servers", "history"):
            if getattr(self, name) is None:
                raise UsageError(f"{name} must be a whole number of at least 1, got None")
            check_count(name, getattr(self, name))
        check_server_options(self.servers, self.backups, self.transport, self.sharding, self.placement)

    def refusals(self) -> tuple[Refusal, ...]:
        return (*super().refusals(), *LBFGS)

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        if until := frozen_until(probe.module):
            name, epoch = next(iter(until.items()))
            raise UsageError(
                f"{name!r} is frozen until epoch {epoch}, and L-BFGS compares gradients of different rounds, which "
                "must be of the same parameters; use hr.frozen without until_epoch, or another strategy"
            )
        for name, module in probe.module.named_modules():
            reason = _impure(module)
            if reason:
                raise UsageError(
                    f"{name or 'the model'} ({type(module).__name__}) {reason}, so that the loss is not a function of "
                    "the parameters alone, which a line search needs; leave it out, or use another strategy and "
                    "optimizer"
                )
        return model

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        return self.plan_with_servers(model, cluster, server_copies=_WORKING_COPIES + 2 * self.history)

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        servers, model, replica_group = context.servers(), context.model, agreement(context)
        layouts = [layout_of(plan, model, server) for server in servers.ranks]
        places = [places_of(layout, context.module) for layout in layouts]
        client = connect(servers, layouts, places, context.group.check, context.closing)
        portions, leads = self._portions(plan), brings_parameters(client, servers.worker)
        leases = ServerDataLeases(client, replica_group.group, leads, portions)
        leases.steer = Steering(client, self._options(context), portions).take
        exchange = PortionExchange(leases, layouts, model, context.group, replica_group)
        exchange.load_values(places)
        return Replica(context.whole_model(exchange.buffer, local_shares=portions), exchange, leases)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        rank, workers = server_of(plan, rank), plan.replicas
        layout, portions = layout_of(plan, context.model, rank), self._portions(plan)
        table = PortionTable(portions, context.until, context.first, workers=range(workers))
        leases, store = (table, context.first, context.until, 1), VectorStore(layout, portions)
        return build_server(plan, rank, layout, store, self.policies(workers), leases, self.transport, context.process)

    def _portions(self, plan: Plan) -> int:
        return self.portions or _PORTIONS * plan.workers

    def _options(self, context: WorkerContext) -> SolverOptions:
        (group,) = build(context.optimizer, context.module.named_parameters()).param_groups
        return SolverOptions(
            float(group["lr"]),
            group["max_iter"],
            group["max_eval"],
            group["tolerance_grad"],
            group["tolerance_change"],
            min(self.history, group["history_size"]),
            group["line_search_fn"] is not None,
        )


def _impure(module: nn.Module) -> str:
    """Says why a layer's output depends on more than its input and the parameters; "" if it does not."""
    if not module.training:
        return ""
    if isinstance(module, DropoutNd) and module.p > 0:
        return f"draws random numbers (p={module.p:g})"
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
        return f"draws random numbers (dropout={module.dropout:g})"
    if isinstance(module, nn.RReLU):
        return "draws random numbers"
    if isinstance(module, BatchNorm):
        return "normalises by the statistics of a portion"
    return ""
