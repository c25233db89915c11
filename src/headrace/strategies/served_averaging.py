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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headrace.errors import InfeasiblePlan, UsageError
from headrace.policies.sharding import everywhere
from headrace.policies.staleness import Anytime, Combination, Each, Everybody, FirstOf
from headrace.ps.applier import Applier, Pace
from headrace.ps.assembly import connect, form_of, leads, open_port, pair, places_of
from headrace.ps.client import Client
from headrace.ps.events import Reason
from headrace.ps.exchange import ServedExchange
from headrace.ps.form import Form
from headrace.ps.held import HeldGradients
from headrace.ps.leases import Leases
from headrace.ps.leasing import LeasedPortions, blocks
from headrace.ps.planning import check_backups, check_seats, seats
from headrace.ps.server import Server
from headrace.ps.shard import Shard
from headrace.replica.conditioning import HEALTHY, Verdict
from headrace.replica.exchange import Replica, StatePiece
from headrace.replica.outer import Elastic, OuterStep
from headrace.replica.update import AVERAGE
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.strategy import Parts, ServerParts, check_count

__all__ = ["Service", "Wait"]

Wait = str | int | float
"""Whom an average waits for: "all" workers, so many of them, so many seconds (as a float), or "nobody"."""


_MOST = 65_535
"""Rounds that a message can say a push is of."""


@dataclass(frozen=True)
class Service:
    """How parameters are averaged through servers.

    Attributes:
        period: rounds between two averages.
        outer: step.
        wait: for whom.
        servers: how many hold shards.
        backups: of each server.
        transport: "shared_memory" or "tcp".
    """

    period: int
    outer: OuterStep
    wait: Wait = "all"
    servers: int = 1
    backups: int = 0
    transport: str = "shared_memory"

    def __post_init__(self) -> None:
        check_count("servers", self.servers)
        if self.period > _MOST:
            raise UsageError(f"period must be at most {_MOST:,} through servers, got {self.period:,}")
        check_backups(self.backups, self.servers)
        check_seats(None, "greedy", "full", (self.transport, "plain", "plain"))
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
        if wait not in ("all", "nobody") and self.servers > 1:
            raise UsageError(
                f"wait={wait!r} drops what comes late, and each of {self.servers} servers would drop another worker's; "
                "use servers=1, or wait='all'"
            )

    def plan(
        self, strategy: str, options: Mapping[str, object], workers: int | None, model: ModelSpec, cluster: Cluster
    ) -> Plan:
        """Decides who works and who serves.

        Raises:
            InfeasiblePlan: the cluster cannot hold it, or the average would wait for more workers than there are.
        """
        # The outer step treats every element alone, whatever the job's optimizer does.
        cut = replace(model, sliceable=True)
        # Beside its parameters and gradients, a worker has a copy of the average, and what lies on its way.
        roles, segments = seats(
            strategy, workers, self.servers, None, "greedy", cut, cluster, self.transport, 4, self.backups
        )
        count = sum(role.kind == "worker" for role in roles)
        if isinstance(self.wait, int) and self.wait > count:
            raise InfeasiblePlan(
                f"wait={self.wait} waits for {self.wait} workers and there are {count}; use wait='all', or at most "
                f"wait={count}"
            )
        return Plan(
            strategy=strategy,
            options=dict(options),
            roles=roles,
            shares=(1,) * count,
            gradient_bytes=model.trainable_bytes,
            segments=segments,
        )

    def replica(self, plan: Plan, rank: int, parts: Parts) -> Replica:
        """Builds what a worker runs."""
        forms = [form_of(plan, parts.model, server) for server in plan.servers]
        own = [places_of(form, parts.module) for form in forms]
        copy = [[torch.empty_like(place, device="cpu") for place in places] for places in own]
        servers = [plan.roles[server] for server in plan.servers]
        client = connect(
            parts.addresses(), forms, copy, (rank, parts.incarnation), parts.host.check, servers, parts.closing,
            together=True, find=parts.find,
        )  # fmt: skip
        centre = Centre(client, forms, own, copy, keeps=not self.outer.agrees)
        exchange = Drifting(self, plan, centre, forms, parts, leads(client, rank))
        exchange.give(own)
        return Replica(parts.whole_model(portions=len(plan.shares)), exchange, exchange.portions)

    def server(self, plan: Plan, rank: int, parts: ServerParts, by_share: bool = False) -> Server:
        """Builds what a server runs.

        Args:
            plan, rank, parts: as of a strategy.
            by_share: move the average by the share of its rounds that the workers had, so that what an example moves is
                the same however many have contributed.
        """
        rank = plan.server_of(rank)
        form = form_of(plan, parts.model, rank)
        members, first = range(plan.workers), rank == plan.servers[0]
        # Schedules are the inner optimizer's, the moving average is that of the average.
        pace = Pace(Options(ema_decay=parts.options.ema_decay), parts.rounds_per_epoch, parts.first)
        optimizer = functools.partial(torch.optim.SGD, **self._outer_options(plan.workers))
        applier = Applier(form, optimizer, parts.model.parameters, pace, full=not by_share)
        machines = [Shard(members, Anytime(), self._combination()) for _ in range(len(form))]
        until = parts.first + blocks(parts.first, parts.until, self.period)
        # Whoever waits for all goes in step with them, and every run is the same.
        fixed = self.wait == "all"
        leases = Leases(len(plan.shares), until, parts.first, fixed, workers=members) if first else None
        coordinates = (leases, parts.first, parts.until) if leases else None
        port = open_port(form, self.transport)
        pairing = pair(port, form, parts.process) if self.backups else None
        return Server(pairing.port if pairing else port, form, applier, machines, coordinates, pairing=pairing)

    def _combination(self) -> Combination:
        if self.wait == "nobody":
            return Each()
        return FirstOf(self.wait) if isinstance(self.wait, int) else Everybody()

    def _outer_options(self, workers: int) -> dict[str, Any]:
        if not isinstance(self.outer, Elastic):
            return dict(self.outer.sgd())
        # beta of the mean is alpha of each.
        return {"lr": self.outer.beta / (workers if self.wait == "nobody" else 1)}


class Centre:
    """A worker's copy of what the servers hold, beside its own parameters.

    Args:
        client: brings the copy up to date.
        forms: the servers' shards.
        own: this worker's parameters, by server and shard.
        copy: places of the copy, alike.
        keeps: whether the worker goes on from its own parameters, and has the centre's where all meet alone.

    Attributes:
        client: see there.
    """

    def __init__(
        self,
        client: Client,
        forms: Sequence[Form],
        own: Sequence[Sequence[Tensor]],
        copy: Sequence[Sequence[Tensor]],
        keeps: bool,
    ) -> None:
        self.client = client
        self._own, self._copy = ([place for each in places for place in each] for places in (own, copy))
        self._shapes = [[piece.shape for piece in form.pieces] for form in forms]
        self._keeps = keeps
        self._kept: list[Tensor] | None = None
        self._begun = False

    def take(self) -> None:
        """Goes on from the centre."""
        torch._foreach_copy_(self._own, self._copy)

    def renew(self) -> None:
        """Brings the centre up to date, and puts it where the parameters are."""
        # Whoever comes has nothing of its own yet.
        if self._keeps and self._begun and self._kept is None:
            self._kept = [own.clone() for own in self._own]
        self.client.pull()
        self.take()

    def resume(self) -> None:
        """Goes on from what was there before the centre, where that is kept."""
        self._begun = True
        if self._kept is not None:
            torch._foreach_copy_(self._own, self._kept)
            self._kept = None

    def distances(self) -> list[list[Tensor]]:
        """Returns, by server and shard, the way from this worker's parameters to the centre."""
        ways = (copy - own.to(copy.device) for own, copy in zip(self._own, self._copy, strict=True))
        return [[next(ways).view(shape) for shape in shapes] for shapes in self._shapes]

    def approach(self, alpha: float) -> None:
        """Goes a part of the way to the centre."""
        for own, copy in zip(self._own, self._copy, strict=True):
            own.lerp_(copy.to(own.device), alpha)

    @property
    def moved_bytes(self) -> int:
        """Nothing: all goes over the client's links."""
        return 0

    def close(self) -> None:
        """Leaves the links to whoever leases over them."""


class Drifting(ServedExchange):
    """A worker that steps by itself, and is brought together with the others at the end of every lease.

    Its optimizer's state is its own. A checkpoint holds that of whoever leads, and all go on with it; the state of a
    worker that is lost is lost with it, and whoever comes in its place begins anew.

    Args:
        service: how.
        plan: the run's.
        centre: of this worker.
        forms: the servers' shards.
        parts: of this worker.
        leads: whether this worker brings what there is to begin with.

    Attributes:
        portions: this worker's data; a lease is of `period` rounds.
    """

    def __init__(
        self, service: Service, plan: Plan, centre: Centre, forms: Sequence[Form], parts: Parts, leads: bool
    ) -> None:
        client, options = centre.client, parts.options
        held = HeldGradients(forms, parts.model)
        super().__init__(client, forms, held, parts.host, options, parts.scale, parts.device, leads)
        self.portions = LeasedPortions(
            client, leads, len(forms), len(plan.shares), service.period, centre, rests=service.wait != "nobody"
        )
        self._centre = centre
        self._outer = service.outer
        self._alpha = service.outer.beta / plan.workers if isinstance(service.outer, Elastic) else 0.0
        self._waits = service.wait != "nobody"
        self._patience_s = service.wait if isinstance(service.wait, float) else math.inf
        # The servers have the moving average, which is one of averages.
        self._inner = LocalExchange(
            everywhere(parts.model.parameters), replace(parts, options=replace(options, ema_decay=None))
        )
        self._pieces = range(len(parts.model.trainable))
        self._advanced = parts.first
        self._weight = 0.0
        self._shares: list[float] = []
        self._began_s, self._fastest_s = 0.0, math.inf

    def begin(self, round_: int) -> None:
        self._round = round_
        self._began_s = perf_counter()
        self._inner.begin(round_)

    def synchronize(self, finite: bool = True) -> Verdict:
        portions = self.portions
        if portions.lease < 0:
            # It had no data before the workers meet.
            return HEALTHY
        verdict = self._inner.synchronize(finite)
        if verdict.apply:
            self._advance(self._round)
            self._inner.updater.apply(self._pieces, self._round)
            self._weight += portions.weight
        self._shares.append(portions.share)
        self._fastest_s = min(self._fastest_s, perf_counter() - self._began_s)
        if not portions.left:
            self._meet()
        return replace(verdict, bad_losses=(self._host.rank,)) if verdict.bad_losses else verdict

    def show_average(self, on: bool) -> None:
        super().show_average(on)
        self._centre.take()

    def state(self) -> tuple[StatePiece, ...]:
        outer = (replace(piece, key=_KEPT) if piece.key == _MOMENTUM else piece for piece in super().state())
        return (*outer, *(self._inner.state() if self._host.rank == 0 else ()))

    def settings(self) -> dict[str, Any]:
        # Others have done rounds that this worker has not.
        self._advance(self.portions.met)
        return self._inner.settings()

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = list(pieces)
        outer = (replace(piece, key=_MOMENTUM) for piece in every if piece.key == _KEPT)
        super().load([*outer, *(piece for piece in every if piece.key == AVERAGE)])
        self._inner.load([piece for piece in every if piece.key != AVERAGE], settings)

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
        centre, portions = self._centre, self.portions
        if not self._waits:
            self.client.pull()
        distances = centre.distances()
        if self._alpha:
            centre.approach(self._alpha)
        weight = weight if self._outer.weighted else float(weight > 0)
        reason = self.client.push(
            distances, portions.lease, weight, sum(shares) / len(shares),
            pull=self._waits, steps=len(shares), patience_s=self._patience_s,
        )  # fmt: skip
        if reason == Reason.NOT_FINITE:
            # Of what has made such parameters nothing is kept.
            self._inner.load(())
        if reason == Reason.NOT_FINITE or not self._alpha:
            centre.take()
        portions.late = reason == Reason.LATE


_MOMENTUM, _KEPT = "momentum_buffer", "headrace.outer-1"
"""Keys of the outer step's momentum: torch's own, and that of checkpoints, in which it is no inner optimizer's."""
