"""Downpour SGD: every worker trains by itself, and exchanges gradients and parameters with servers from time to time.

    compute                    synchronize                                 update
    local step every step      push the accumulated gradient every         on the shard
                               `push_every` steps, fetch parameters
                               every `fetch_every`, in threads of
                               their own

    worker    ░step░░step░░step░░step░░step░░step░
    push              └─ sum of 3 ─►        └─ sum of 3 ─►
    fetch     ◄─ parameters ─┐       ◄─ parameters ─┐
    servers   ───────────────▓▓▓▓──────────────────▓▓▓▓───

Dean et al., "Large scale distributed deep networks", 2012, section 4.1 and algorithm 7.1. With `local="optimizer"` the
local steps are those of the job's optimizer, what is pushed is how far they have moved the worker (as in Zhang et al.,
"Deep learning with elastic averaging SGD", 2015), and a fetch leaves the worker its own steps that it lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.parameter_server.client.data_leases import ServerDataLeases, fixed_span, leases_between
from headrace.parameter_server.client.downpour import (
    Background,
    DownpourExchange,
    LocalSteps,
    OwnStepsExchange,
    ServerLinks,
)
from headrace.parameter_server.client.exchange import ReplicaGroup
from headrace.parameter_server.client.own_steps import LocalOptimizer, OwnSteps
from headrace.parameter_server.connecting import brings_parameters, build_server, connect
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.planning import (
    check_server_options,
    check_whole,
    layout_of,
    places_of,
)
from headrace.parameter_server.replication.directory import ServerDirectory
from headrace.parameter_server.replication.failover import server_of
from headrace.parameter_server.server.optimizer import RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import ShardLayout
from headrace.policies.behaviour import Behaviour, ServerTerms
from headrace.policies.segments import everywhere
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec, OptimizerNeeds
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.checks import check_count, refuse_backups, refuse_modes
from headrace.strategies.context import WorkerContext
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.served import ServedStrategy, ServerContext, agreement
from headrace.training.exchange import Replica
from headrace.transport.codec import sent_share

_MOST = 65_535
"""Steps that a message can say a push is the sum of."""


@dataclass(frozen=True)
class Downpour(ServedStrategy):
    """Downpour SGD over parameter servers; the job's optimizer (Adagrad in the paper) runs on the shards.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold shards.
        backups: of each server: with 1, the run continues without loss when a server fails.
        fetch_every, push_every: steps between two fetches, and between two pushes.
        warmstart_steps: rounds that worker 0 trains alone before the others begin, to the end of a push.
        overlap: push and fetch while the worker computes; otherwise it waits for both.
        sharding, placement: as of `ParameterServer`.
        scale: "share" applies gradients with the learning rate times their share of the global batch, "full" with the
            whole learning rate, as the paper does; on the shards and, of plain SGD, in the local step.
        transport: "shared_memory" within a host, or "tcp", also there; between hosts TCP, encrypted.
        push_codec, pull_codec: how gradients and parameters travel: "plain", "bf16", or "int8" with error feedback.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.Downpour(workers=2, fetch_every=2, push_every=2))
        >>> run.status
        'ok'
    """

    workers: int | None = None
    servers: int = 1
    backups: int = 0
    fetch_every: int = 5
    push_every: int = 5
    warmstart_steps: int = 0
    overlap: bool = True
    sharding: str | None = None
    placement: str = "greedy"
    scale: str = "share"
    transport: str = "shared_memory"
    push_codec: str = "plain"
    pull_codec: str = "plain"
    local: str = "sgd"

    name = "downpour"
    equals_one_device = False
    lock_step = False
    mixes_devices = True
    alone: ClassVar[Mapping[str, object]] = {
        "workers": 1, "fetch_every": 1, "push_every": 1, "warmstart_steps": 0, "overlap": False,
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        for name in ("servers", "fetch_every", "push_every"):
            _check_steps(name, getattr(self, name))
        codecs = (self.push_codec, self.pull_codec)
        check_server_options(
            self.servers, self.backups, self.transport, self.sharding, self.placement, self.scale, codecs
        )
        if self.warmstart_steps is None:
            raise UsageError("warmstart_steps must be a whole number of at least 0, got None")
        check_whole("warmstart_steps", self.warmstart_steps)
        if not isinstance(self.overlap, bool):
            raise UsageError(f"overlap must be True or False, got {self.overlap!r}")
        if self.local not in ("sgd", "optimizer"):
            raise UsageError(f"local must be 'sgd' or 'optimizer', got {self.local!r}")

    @property
    def moves(self) -> bool:
        """Whether workers push how far they have moved."""
        return self.local == "optimizer"

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        # Also the accumulated sum; with overlap the sum that is being pushed, and the parameters being fetched.
        copies = 6 if self.overlap else 4
        if self.moves:
            # The servers treat every element alone, whatever the job's optimizer does.
            refuse_modes(self.name, model)
            model = replace(model, sliceable=True, optimizer=OptimizerNeeds())
        return self.plan_with_servers(model, cluster, copies)

    def behave(self, workers: int) -> Behaviour:
        terms = ServerTerms(
            self.policies(workers), self.servers, self.push_every, self.overlap, local=True,
            pushed=sent_share(self.push_codec), pulled=sent_share(self.pull_codec), alone=self.warmstart_steps,
        )  # fmt: skip
        fetches = ("parameters are taken to be fetched with every push",)
        not_rehearsed = refuse_backups(self.backups)
        if self.moves:
            not_rehearsed = "the local steps of a rehearsal are plain SGD; use local='sgd'"
        return Behaviour(
            terms, notes=() if self.fetch_every == self.push_every else fetches, not_rehearsed=not_rehearsed
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        model, replica_group, servers = context.model, agreement(context), context.servers()
        layouts = [layout_of(plan, model, server) for server in servers.ranks]
        places = [places_of(layout, context.module) for layout in layouts]
        shapes = [[piece.shape for piece in layout.pieces] for layout in layouts]
        own = OwnSteps(places, shapes) if self.moves else None
        links = self._links(context, servers, layouts, places, replica_group, own)
        if context.inside:
            links.main.pulled = context.inside.spread
        leads = brings_parameters(links.main, servers.worker)
        leases = ServerDataLeases(
            links.main, replica_group.group, leads, len(plan.shares),
            fixed_span(self.push_every), links, self.warmstart_steps,
        )  # fmt: skip
        every = leases, layouts, model, context.group, replica_group, links
        if own is not None:
            # The servers keep the moving average.
            without = replace(context, options=replace(context.options, ema_decay=None))
            local = LocalExchange(everywhere(model.parameters), without)
            moving = OwnStepsExchange(*every, LocalOptimizer(local, len(model.trainable), context.first))
            moving.load_values(places)
            return Replica(context.whole_model(local_shares=len(plan.shares)), moving, leases)
        steps = LocalSteps(
            context.module, model, context.optimizer, context.options, context.rounds_per_epoch, context.first
        )
        exchange = DownpourExchange(*every, steps, self.scale == "share")
        exchange.load_values(places)
        return Replica(context.whole_model(exchange.buffer, local_shares=len(plan.shares)), exchange, leases)

    def _links(
        self,
        context: WorkerContext,
        servers: ServerDirectory,
        layouts: Sequence[ShardLayout],
        places: Sequence[Sequence[Tensor]],
        replica_group: ReplicaGroup,
        own: OwnSteps | None,
    ) -> ServerLinks:
        check = context.group.check
        together = context.model.optimizer.at_once and not self.moves
        opens = functools.partial(connect, servers, layouts, closing=context.closing, together=together)
        if not self.overlap:
            main = opens(places, check)
            return ServerLinks(main, places, self.fetch_every, replica_group, own_steps=own)
        # A connection belongs to one thread, so each thread has its own.
        fetched = [[torch.empty_like(place) for place in own] for own in places]
        pushing = Background(servers.thread("push"), opens(fetched, check))
        fetching = Background(servers.thread("fetch"), opens(fetched, check, observes=True))

        def check_all() -> None:
            check()
            # A worker whose push has failed would wait for data for ever.
            pushing.thread.check()
            fetching.thread.check()

        main = opens(places, check_all, observes=True)
        return ServerLinks(main, places, self.fetch_every, replica_group, pushing, fetching, fetched, own)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        rank, first = server_of(plan, rank), context.first
        layout = layout_of(plan, context.model, rank)
        clock, factory = RoundClock(context.options, context.rounds_per_epoch, first), context.optimizer
        if self.moves:
            # Schedules are the workers', the moving average is that of what they make together.
            clock = replace(clock, options=Options(ema_decay=context.options.ema_decay))
            factory = functools.partial(torch.optim.SGD, lr=1.0)
        optimizer = ShardOptimizer(
            layout, factory, context.model.parameters, clock, self.scale == "full",
            needs=None if self.moves else context.model.optimizer,
        )  # fmt: skip
        until = first + leases_between(first, context.until, self.push_every)
        alone = leases_between(first, max(first, self.warmstart_steps), self.push_every)
        table = LeaseTable(len(plan.shares), until, first, alone=alone, workers=range(plan.replicas))
        leases = (table, first, context.until, self.push_every)
        policies = self.policies(plan.replicas)
        return build_server(plan, rank, layout, optimizer, policies, leases, self.transport, context.process)


def _check_steps(name: str, count: int | None) -> None:
    if count is None:
        raise UsageError(f"{name} must be a whole number of at least 1, got None")
    check_count(name, count)
    if count > _MOST:
        raise UsageError(f"{name} must be at most {_MOST:,}, got {count:,}")
