"""Downpour SGD: every worker goes on by itself, and tells the servers what it has gathered from time to time.

    compute                    synchronize                                 update
    local step every step      push the accrued gradient every             on the shard
                               `push_every` steps, fetch parameters
                               every `fetch_every`, in threads of
                               their own

    worker    ░step░░step░░step░░step░░step░░step░
    push              └─ sum of 3 ─►        └─ sum of 3 ─►
    fetch     ◄─ parameters ─┐       ◄─ parameters ─┐
    servers   ───────────────▓▓▓▓──────────────────▓▓▓▓───

Dean et al., "Large scale distributed deep networks", 2012, section 4.1 and algorithm 7.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.parameter_server.client.data_leases import ServerDataLeases, blocks, steady
from headrace.parameter_server.client.downpour import Background, ServerLinks
from headrace.parameter_server.client.exchange import ServedExchange
from headrace.parameter_server.client.gradients import GradientAccumulator, GradientBuffer, LeaderClient, ReplicaGroup
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
from headrace.parameter_server.server.optimizer import RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire.layout import ShardLayout
from headrace.parameter_server.wire.messages import Kind, Message
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.strategy import ServerContext, Strategy, WorkerContext, check_count, describe_options
from headrace.training.clipping import HEALTHY, StepDecision
from headrace.training.exchange import Replica
from headrace.training.optimizer import build
from headrace.training.optimizer_state import StatePiece
from headrace.training.update import Schedule

_MOST = 65_535
"""Steps that a message can say a push is the sum of."""


@dataclass(frozen=True)
class Downpour(Strategy):
    """Downpour SGD over parameter servers; the job's optimizer (Adagrad in the paper) runs on the shards.

    Attributes:
        workers: how many compute; None for the launcher's processes but `servers`, or the machine's accelerators.
        servers: how many hold shards.
        backups: of each server: with 1, nothing is lost with a server, and the run goes on.
        fetch_every, push_every: steps between two fetches, and between two pushes.
        warmstart_steps: rounds that worker 0 trains alone before the others begin, to the end of a push.
        overlap: push and fetch while the worker goes on computing; else it waits for both.
        sharding, placement: as of `ParameterServer`.
        scale: "share" applies gradients with the learning rate times their share of the global batch, "full" with the
            whole learning rate, as the paper does; on the shards and in the local step.
        transport: "shared_memory" on one host, or "tcp", encrypted, also on one.
        push_codec, pull_codec: how gradients and parameters travel: "plain", "bf16", or "int8" with error feedback.
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

    name = "downpour"
    synchronous = False

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        for name in ("servers", "fetch_every", "push_every"):
            _check_steps(name, getattr(self, name))
        check_backups(self.backups, self.servers)
        check_seats(self.sharding, self.placement, self.scale, (self.transport, self.push_codec, self.pull_codec))
        if self.warmstart_steps is None:
            raise UsageError("warmstart_steps must be a whole number of at least 0, got None")
        check_whole("warmstart_steps", self.warmstart_steps)
        if not isinstance(self.overlap, bool):
            raise UsageError(f"overlap must be True or False, got {self.overlap!r}")

    @property
    def elastic(self) -> bool:
        return True

    def check(self, options: Options) -> None:
        check_served(options)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        # Besides: the sum that accrues; with overlap the one that is being pushed, too, and what is being fetched.
        copies = 6 if self.overlap else 4
        roles, segments = seats(
            self.name,
            self.workers,
            self.servers,
            self.sharding,
            self.placement,
            model,
            cluster,
            self.transport,
            copies,
            self.backups,
        )
        return Plan(
            strategy=self.name,
            options=describe_options(self),
            roles=roles,
            shares=(1,) * sum(role.kind == "worker" for role in roles),
            gradient_bytes=model.trainable_bytes,
            segments=segments,
        )

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        layouts = [layout_of(plan, context.model, server) for server in context.servers.ranks]
        places = [places_of(layout, context.module) for layout in layouts]
        replica_group = context.agreement()
        links = self._links(plan, context, layouts, places, replica_group)
        if context.inside:
            links.main.pulled = context.inside.spread
        exchange = DownpourExchange(
            self, plan, links, layouts, context, replica_group, leads(links.main, context.servers.worker)
        )
        exchange.give(places)
        return Replica(context.whole_model(exchange.buffer, portions=len(plan.shares)), exchange, exchange.portions)

    def _links(
        self,
        plan: Plan,
        context: WorkerContext,
        layouts: Sequence[ShardLayout],
        places: Sequence[Sequence[Tensor]],
        replica_group: ReplicaGroup,
    ) -> ServerLinks:
        servers, check = context.servers, context.group.check
        roles, who = [plan.roles[server] for server in servers.ranks], (servers.worker, servers.incarnation)
        opens = functools.partial(connect, servers.addresses(), layouts, find=servers.find)
        if not self.overlap:
            return ServerLinks(
                opens(places, who, check, roles, context.closing), places, self.fetch_every, replica_group
            )
        # One thread a link: what pushes and what fetches meanwhile has links of its own.
        fetched = [[torch.empty_like(place, device="cpu") for place in own] for own in places]
        pushing = Background("push", opens(fetched, who, check, roles, context.closing))
        fetching = Background("fetch", opens(fetched, who, check, roles, context.closing, observes=True))

        def watch() -> None:
            check()
            # Whose push has failed would wait for data for ever.
            pushing.check()
            fetching.check()

        main = opens(places, who, watch, roles, context.closing, observes=True)
        return ServerLinks(main, places, self.fetch_every, replica_group, pushing, fetching, fetched)

    def server(self, plan: Plan, rank: int, context: ServerContext) -> Server:
        rank = plan.server_of(rank)
        layout = layout_of(plan, context.model, rank)
        clock = RoundClock(context.options, context.rounds_per_epoch, context.first)
        applier = ShardOptimizer(layout, context.optimizer, context.model.parameters, clock, self.scale == "full")
        machines = [Shard(range(plan.replicas), Unbounded(), EveryPush()) for _ in range(len(layout))]
        until = context.first + blocks(context.first, context.until, self.push_every)
        alone = blocks(context.first, max(context.first, self.warmstart_steps), self.push_every)
        first = rank == plan.servers[0]
        members = range(plan.replicas)
        leases = LeaseTable(len(plan.shares), until, context.first, alone=alone, workers=members) if first else None
        coordinates = (leases, context.first, context.until, self.push_every) if leases else None
        port = open_port(layout, self.transport)
        replicated = pair(port, layout, context.process) if self.backups else None
        return Server(
            replicated.transport if replicated else port, layout, applier, machines, coordinates, replicated=replicated
        )


def _check_steps(name: str, count: int | None) -> None:
    if count is None:
        raise UsageError(f"{name} must be a whole number of at least 1, got None")
    check_count(name, count)
    if count > _MOST:
        raise UsageError(f"{name} must be at most {_MOST:,}, got {count:,}")


class DownpourExchange(ServedExchange):
    """Args:
    strategy: its options.
    plan: the run's.
    links: of this worker.
    forms: the servers' shards.
    context: of this worker.
    agreement: of its replica.
    leads: whether this worker brings what there is to begin with.

    Attributes:
        portions: this worker's data; a lease is of `push_every` steps.
    """

    def __init__(
        self,
        strategy: Downpour,
        plan: Plan,
        links: ServerLinks,
        layouts: Sequence[ShardLayout],
        context: WorkerContext,
        replica_group: ReplicaGroup,
        leads: bool,
    ) -> None:
        buffer = GradientBuffer(layouts, context.model)
        super().__init__(links.main, layouts, buffer, context.group, replica_group, leads)
        copies = 2 if strategy.overlap else 1
        self.parameter_bytes = copies * sum(parameter.bytes for parameter in context.model.parameters)
        self.portions = ServerDataLeases(
            LeaderClient(links.main, replica_group.group), leads, len(layouts), len(plan.shares),
            steady(strategy.push_every), links, strategy.warmstart_steps,
        )  # fmt: skip
        self._links = links
        self._weighed = strategy.scale == "share"
        self._local = LocalSteps(context)
        self._accrued = GradientAccumulator(layouts, context.model, self._weighed)
        self._spoilt = False

    def begin(self, round_: int) -> None:
        # In a loop of one's own, forward lies behind: the parameters must not move before the gradient is there.
        self._round = round_

    def synchronize(self, finite: bool = True) -> StepDecision:
        portions = self.portions
        if portions.lease < 0:
            # It had no data before the workers meet.
            return HEALTHY
        decision = self.judge(finite)
        if decision.apply:
            self._local.step(self._round, self.buffer.gradients, portions.share if self._weighed else 1.0)
            self._accrued.add(self.buffer, portions.share)
        else:
            self._spoilt = True
        if not portions.left:
            self._pour()
        self._links.step()
        return decision

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._local.load(settings)
        super().load(pieces, settings)

    def swap_weights(self, averaged: bool) -> None:
        self.client.forget()
        super().swap_weights(averaged)

    def _pour(self) -> None:
        """Pushes what has been accrued."""
        portions, pushing = self.portions, self._links.pushing
        gradients, share, steps = self._accrued.take()
        # Of a lease whose every gradient was left out, the server hears that there was one.
        # Nobody has looked at the sum.
        finite, self._spoilt = None if steps else not self._spoilt, False
        client, lease = pushing.client if pushing else self.client, portions.lease
        push = functools.partial(
            client.push, gradients, lease, float(steps > 0), share, finite,
            steps=max(1, steps), versions=self._links.versions,
        )  # fmt: skip
        if pushing is None:
            push()
            # The lease is done when all ranks of the replica have pushed.
            self.replica_group.any(False)
            return

        def push_and_commit() -> None:
            push()
            # What another rank still pushes is there before anybody gets past the next fence.
            if self.replica_group.leads:
                # Nobody looks at this link before the next push: what was only told could be lost.
                client.ask(0, Message(Kind.COMMIT, lease=lease))

        pushing.start(push_and_commit)
        portions.lease = -1


class LocalSteps:
    """Plain SGD on this worker's own parameters, with the learning rates of the job's optimizer and schedule.

    Args:
        context: of this worker.
    """

    def __init__(self, context: WorkerContext) -> None:
        named = dict(context.module.named_parameters())
        ghosts = [
            (name, nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad))
            for name, tensor in named.items()
        ]
        self._optimizer = build(context.optimizer, ghosts)
        self._schedule = Schedule(context.options, self._optimizer, self._optimizer, context.rounds_per_epoch)
        index = {parameter.name: number for number, parameter in enumerate(context.model.trainable)}
        self._groups = [
            (group, [(index[name], named[name].data) for name in group["param_names"] if name in index])
            for group in self._optimizer.param_groups
        ]
        self._round = context.first

    @torch.no_grad()
    def step(self, round_: int, gradients: Sequence[Tensor | None], share: float) -> None:
        """Moves the parameters by one gradient."""
        while self._round < round_:
            self._schedule.advance(self._round)
            self._round += 1
        with self._schedule.warmed(round_, share):
            for group, members in self._groups:
                moved = [
                    (tensor, gradient) for number, tensor in members if (gradient := gradients[number]) is not None
                ]
                if moved:
                    tensors, present = zip(*moved, strict=True)
                    sign = 1.0 if group.get("maximize") else -1.0
                    torch._foreach_add_(list(tensors), list(present), alpha=sign * float(group["lr"]))

    def load(self, settings: Mapping[str, Any] | None) -> None:
        """Takes up where the schedule was."""
        if settings is not None:
            self._schedule.load(settings)
