"""Parameter averaging through servers: those hold the average, and workers tell them how far they have come from it.

    compute                    synchronize                               update
    forward, backward          at the end of a lease of `period`         the job's optimizer, on the worker;
                               rounds, push centre - own, and pull       the outer step on the shard
                               the centre

    worker 0   ░step░░step░░step░ push ─┐           ┌─ pull ░step░░step░░step░
    server     ─────────────────────────▓▓▓ mean ▓▓▓┴─────────────────────────
    worker 1   ░step░░░step░░░step░ push ─┘         └─ pull ░step░░░step░░░step░

To a shard all that is an ordinary round: what is pushed is a gradient, of which SGD with a learning rate of 1 makes the
workers' mean, and SGD with Nesterov momentum DiLoCo's outer step. So leases, staleness, codecs, backups and snapshots
are those of every strategy with servers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.averaging.averager import require_alike
from headrace.averaging.outer_steps import Elastic, MeanStep, OuterStep
from headrace.averaging.period import AutoPeriod, Measured, PeriodController, first_stretch
from headrace.errors import InfeasiblePlan, UsageError
from headrace.parameter_server.client.center import CenterVariable, OptimizerMirror
from headrace.parameter_server.client.data_leases import ServerDataLeases, leases_between
from headrace.parameter_server.client.exchange import ServedExchange
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.planning import (
    brings_parameters,
    build_server,
    check_server_options,
    connect,
    layout_of,
    places_of,
    plan_with_servers,
)
from headrace.parameter_server.replication.failover import server_of
from headrace.parameter_server.server.optimizer import RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.policies.sharding import everywhere
from headrace.policies.staleness import AllMembers, Combination, DecidedElsewhere, EveryPush, FirstPushes, Unbounded
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.strategy import ServerContext, WorkerContext, check_count
from headrace.training.clipping import HEALTHY, StepDecision
from headrace.training.exchange import Replica
from headrace.training.optimizer import build
from headrace.training.optimizer_state import MeanState, StatePiece, mean_state
from headrace.training.update import AVERAGE

Wait = str | int | float
"""Whom an average waits for: "all" workers, so many of them, so many seconds (as a float), or "nobody"."""


_MOST = 65_535
"""Rounds that a message can say a push is of."""


@dataclass(frozen=True)
class ServedAveragingConfig:
    """How parameters are averaged through servers.

    Attributes:
        period: rounds between two averages, or the bounds of one that adapts.
        outer: step.
        wait: for whom.
        servers: how many hold shards.
        backups: of each server.
        transport: "shared_memory" or "tcp".
        post_local: rounds at the beginning after each of which there is an average.
        average_state: whether the optimizers' state is averaged, too.
    """

    period: int | AutoPeriod
    outer: OuterStep
    wait: Wait = "all"
    servers: int = 1
    backups: int = 0
    transport: str = "shared_memory"
    post_local: int = 0
    average_state: bool = False

    def __post_init__(self) -> None:
        check_count("servers", self.servers)
        longest = self.period if isinstance(self.period, int) else self.period.longest
        if longest > _MOST:
            raise UsageError(f"period must be at most {_MOST:,} through servers, got {longest:,}")
        check_server_options(self.servers, self.backups, self.transport)
        wait = self.wait
        if isinstance(wait, bool) or not (wait in ("all", "nobody") or isinstance(wait, int | float)):
            raise UsageError(f"wait must be 'all', 'nobody', a number of workers (3) or of seconds (3.0), got {wait!r}")
        if isinstance(wait, int) and wait < 1:
            raise UsageError(f"wait={wait} workers make no average; wait for 1 or more, or for 'all'")
        if isinstance(wait, float) and not 0 < wait < math.inf:
            raise UsageError(f"wait={wait} must be a number of seconds above 0; use wait='all' to wait for everybody")
        if wait == "nobody" and not isinstance(self.outer, Elastic):
            raise UsageError(
                "wait='nobody' would put each worker's parameters in place of the average; use it with "
                "outer='elastic', or wait='all'"
            )
        if wait == "nobody" and self.average_state:
            raise UsageError(
                "wait='nobody' makes no average of the optimizers' state; use average_optimizer_state=False, or "
                "wait='all'"
            )

    def plan(
        self, strategy: str, options: Mapping[str, object], workers: int | None, model: ModelSpec, cluster: Cluster
    ) -> Plan:
        """Decides who works and who serves; raises InfeasiblePlan if the average would wait for too many workers."""
        # The outer step treats every element alone, whatever the job's optimizer does.
        cut = replace(model, sliceable=True)
        # Beside its parameters and gradients, a worker has a copy of the average, and what lies on its way.
        plan = plan_with_servers(
            strategy,
            options,
            cut,
            cluster,
            workers=workers,
            servers=self.servers,
            backups=self.backups,
            transport=self.transport,
            copies=4,
            elastic=True,
        )
        if isinstance(self.wait, int) and self.wait > plan.workers:
            raise InfeasiblePlan(
                f"wait={self.wait} waits for {self.wait} workers and there are {plan.workers}; use wait='all', or at "
                f"most wait={plan.workers}"
            )
        return plan

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        """Builds what a worker runs."""
        require_alike(context.module, context.model, rank)
        local = LocalExchange(
            everywhere(context.model.parameters),
            # The servers have the moving average, which is one of averages.
            replace(context, options=replace(context.options, ema_decay=None)),
        )
        named = dict(context.module.named_parameters())
        state = mean_state(named, local.updater.optimizer) if self.average_state else None
        beside = OptimizerMirror(state)
        layouts = [layout_of(plan, context.model, server, state) for server in plan.servers]
        own = [places_of(layout, context.module, beside.named) for layout in layouts]
        copy = [[torch.empty_like(place, device="cpu") for place in places] for places in own]
        servers = [plan.roles[server] for server in plan.servers]
        client = connect(
            context.servers.addresses(), layouts, copy, (rank, context.servers.incarnation), context.group.check,
            servers, context.closing, together=True, in_turn=self._in_turn, find=context.servers.find,
        )  # fmt: skip
        center = CenterVariable(client, layouts, own, copy, beside, keeps=not self.outer.agrees)
        exchange = ServedAveragingExchange(self, plan, center, layouts, context, local, brings_parameters(client, rank))
        exchange.load_values(center.own)
        return Replica(context.whole_model(portions=len(plan.shares)), exchange, exchange.portions)

    def server(self, plan: Plan, rank: int, context: ServerContext, by_share: bool = False) -> Server:
        """Builds what a server runs; `by_share` moves the average by the share of its rounds that contributed."""
        rank = server_of(plan, rank)
        state = _state_of(context) if self.average_state else None
        layout = layout_of(plan, context.model, rank, state)
        first = rank == plan.servers[0]
        # Schedules are the inner optimizer's, the moving average is that of the average.
        clock = RoundClock(Options(ema_decay=context.options.ema_decay), context.rounds_per_epoch, context.first)
        beside = state.specs if state else []
        optimizer = functools.partial(
            _outer_optimizer, {each.name for each in beside}, self._outer_options(plan.workers)
        )
        shard_optimizer = ShardOptimizer(
            layout, optimizer, [*context.model.parameters, *beside], clock, full=not by_share
        )
        combination = self._combination() if first or not self._in_turn else DecidedElsewhere()
        until, span = first_stretch(self.period, self.post_local, context.first, context.until)
        # Whoever waits for all goes in step with them, and every run is the same.
        fixed, last = self.wait == "all", context.first + leases_between(context.first, until, span)
        table = LeaseTable(len(plan.shares), last, context.first, fixed, workers=range(plan.workers))
        leases, policies = (table, context.first, until, span), (Unbounded(), combination)
        return build_server(
            plan, rank, layout, shard_optimizer, policies, leases, self.transport, context.process, measures=True
        )

    @property
    def drops(self) -> bool:
        """Whether who comes too late is left out."""
        return self.wait not in ("all", "nobody")

    @property
    def _in_turn(self) -> bool:
        """Whether the first of several servers says who is too late."""
        return self.servers > 1 and self.drops

    def _combination(self) -> Combination:
        if self.wait == "nobody":
            return EveryPush()
        return FirstPushes(self.wait) if isinstance(self.wait, int) else AllMembers()

    def _outer_options(self, workers: int) -> dict[str, Any]:
        if not isinstance(self.outer, Elastic):
            return dict(self.outer.sgd())
        # beta of the mean is alpha of each.
        return {"lr": self.outer.beta / (workers if self.wait == "nobody" else 1)}


def _state_of(context: ServerContext) -> MeanState:
    """Returns what the workers' optimizers keep, over parameters that are not there."""
    zeros = ((each, torch.zeros(each.shape, dtype=getattr(torch, each.dtype))) for each in context.model.parameters)
    named = {each.name: nn.Parameter(tensor, requires_grad=each.trainable) for each, tensor in zeros}
    return mean_state(named, build(context.optimizer, named.items()))


def _outer_optimizer(
    beside: Container[str], options: Mapping[str, Any], named: Iterable[tuple[str, Tensor]]
) -> torch.optim.SGD:
    """Returns the outer step of parameters; of what is beside them, the mean."""
    every = list(named)
    groups = [
        {"params": [each for name, each in every if (name in beside) is is_beside], **own}
        for is_beside, own in ((False, options), (True, MeanStep().sgd()))
    ]
    return torch.optim.SGD([group for group in groups if group["params"]])


class ServedAveragingExchange(ServedExchange):
    """A worker that steps by itself, and is brought together with the others at the end of every lease.

    Where its optimizer's state is its own, a checkpoint holds that of whoever leads, and all go on with it; the state
    of a worker that is lost is lost with it, and whoever comes in its place begins anew.

    Args:
        service: how.
        plan: the run's.
        centre: of this worker.
        forms: the servers' shards.
        context: of this worker.
        local: its own steps.
        leads: whether this worker brings what there is to begin with.

    Attributes:
        portions: this worker's data; a lease is of `period` rounds.
    """

    def __init__(
        self,
        service: ServedAveragingConfig,
        plan: Plan,
        center: CenterVariable,
        layouts: Sequence[ShardLayout],
        context: WorkerContext,
        local: LocalExchange,
        leads: bool,
    ) -> None:
        client = center.client
        super().__init__(client, layouts, context.model, context.group, context.agreement(), leads)
        self._pacing = PeriodController(service.period, service.post_local, context.group)
        self.portions = ServerDataLeases(
            client,
            self.replica_group.group,
            leads,
            len(plan.shares),
            self._pacing.stretch,
            center,
            rests=service.wait != "nobody",
        )
        self._center = center
        self._outer = service.outer
        self._alpha = service.outer.beta / plan.workers if isinstance(service.outer, Elastic) else 0.0
        self._waits = service.wait != "nobody"
        self._drops = service.drops
        self._patience_s = service.wait if isinstance(service.wait, float) else math.inf
        self._averages_state = service.average_state
        self._inner = local
        self._names = {parameter.name for parameter in context.model.parameters}
        self._pieces = range(len(context.model.trainable))
        self._advanced = context.first
        self._weight = 0.0
        self._shares: list[float] = []
        self._began_s, self._lease_s, self._fastest_s = 0.0, 0.0, math.inf

    def begin(self, round_: int) -> None:
        self._round = round_
        self._began_s = perf_counter()
        if not self._shares:
            self._lease_s = self._began_s
        self._inner.begin(round_)

    def synchronize(self, finite: bool = True) -> StepDecision:
        portions = self.portions
        if portions.lease < 0:
            # It had no data before the workers meet.
            return HEALTHY
        decision = self._inner.synchronize(finite)
        if decision.apply:
            self._advance(self._round)
            self._inner.updater.apply(self._pieces, self._round)
            self._weight += portions.weight
        self._shares.append(portions.share)
        self._fastest_s = min(self._fastest_s, perf_counter() - self._began_s)
        if not portions.left:
            self._meet()
        elif self._drops and self.client.is_behind:
            self._give_up()
        return replace(decision, bad_losses=(self._group.rank,)) if decision.bad_losses else decision

    def swap_weights(self, averaged: bool) -> None:
        super().swap_weights(averaged)
        self._center.take()

    def state(self) -> tuple[StatePiece, ...]:
        of_parameters = (piece for piece in super().state() if piece.parameter in self._names)
        outer = (replace(piece, key=_KEPT) if piece.key == _MOMENTUM else piece for piece in of_parameters)
        return (*outer, *(self._inner.state() if self._group.rank == 0 else ()))

    def settings(self) -> dict[str, Any]:
        # Others have done rounds that this worker has not.
        self._advance(self.portions.synced_round)
        return {**self._inner.settings(), "averaging": self._pacing.settings()}

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = list(pieces)
        outer = (replace(piece, key=_MOMENTUM) for piece in every if piece.key == _KEPT)
        super().load([*outer, *(piece for piece in every if piece.key == AVERAGE)])
        self._inner.load([piece for piece in every if piece.key != AVERAGE], settings)
        self._pacing.load(settings)
        # What is averaged begins with it.
        self._center.gather()
        self.load_values(self._center.own, only_state=True)

    def memory(self) -> tuple[int, int]:
        parameter_bytes, state_bytes = self._inner.memory()
        return 2 * parameter_bytes, state_bytes

    def _advance(self, round_: int) -> None:
        """Lets the schedule go by rounds that are over."""
        while self._advanced < round_:
            self._inner.updater.skip(self._advanced)
            self._advanced += 1

    def _meet(self) -> None:
        """Tells the servers how far this worker has come, and goes on from where they are."""
        if self._fastest_s > self._patience_s:
            raise UsageError(
                f"wait={self._patience_s:g} s is shorter than one step, which takes {self._fastest_s:.3g} s: whoever "
                "is a step behind would never be part of an average; wait longer, or use wait='all'"
            )
        weight, shares, self._weight, self._shares = self._weight, self._shares, 0.0, []
        center, portions = self._center, self.portions
        began_s = perf_counter()
        if not self._waits:
            self.client.pull()
        distances = center.distances()
        if self._alpha:
            center.approach(self._alpha)
        weight = weight if self._outer.weighted else float(weight > 0)
        reason = self.client.push(
            distances, portions.lease, weight, sum(shares) / len(shares),
            pull=self._waits, steps=len(shares), patience_s=self._patience_s,
        )  # fmt: skip
        spoilt = reason == Reason.NOT_FINITE
        if spoilt and not self._averages_state:
            # Of what has made such parameters nothing is kept.
            self._inner.load(())
        center.take(all_of_it=spoilt or not self._alpha)
        portions.late = reason == Reason.LATE
        if not portions.late and self._waits:
            ended_s, norm = perf_counter(), center.norm
            drift = self.client.apart / norm if norm else 0.0
            seen = Measured(len(shares), began_s - self._lease_s, ended_s - began_s, drift)
            left_out = (self._group.members[self._group.rank],) if spoilt else ()
            portions.meeting = self._pacing.note(seen, portions.span, self.client.versions[0][0], left_out)

    def _give_up(self) -> None:
        """Leaves the rest of a lease to others: the average has gone on, and what is made of an old one is dropped."""
        nothing = [[None] * len(places) for places in self._center.own]
        share, self._weight, self._shares = self._shares[0], 0.0, []
        # Whoever waits for no one who has once been late waits for this worker again.
        reason = self.client.push(nothing, self.portions.lease, 0.0, share, pull=True, patience_s=self._patience_s)
        self._center.take(all_of_it=not self._alpha)
        self.portions.late = reason == Reason.LATE


_MOMENTUM, _KEPT = "momentum_buffer", "headrace.outer-1"
"""Keys of the outer step's momentum: torch's own, and that of checkpoints, in which it is no inner optimizer's."""
