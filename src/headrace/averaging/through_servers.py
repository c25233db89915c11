"""Parameter averaging through servers: they hold the average, and workers push how far they have moved from it.

    compute                    synchronize                               update
    forward, backward          at the end of a lease of `period`         the job's optimizer, on the worker;
                               rounds, push center - own, and pull       the outer step on the shard
                               the center

    worker 0   ░step░░step░░step░ push ─┐           ┌─ pull ░step░░step░░step░
    server     ─────────────────────────▓▓▓ mean ▓▓▓┴─────────────────────────
    worker 1   ░step░░░step░░░step░ push ─┘         └─ pull ░step░░░step░░░step░

To a shard this is an ordinary round: what is pushed is a gradient, of which SGD with a learning rate of 1 makes the
workers' mean, and SGD with Nesterov momentum DiLoCo's outer step. So leases, staleness, codecs, backups and snapshots
are those of every strategy with servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.averaging.averager import OUTER
from headrace.averaging.outer_steps import AnchoredStep, Elastic, MeanStep, OuterStep
from headrace.averaging.period import PeriodController
from headrace.collectives.base import ProcessGroup
from headrace.errors import InfeasiblePlan, UsageError
from headrace.parameter_server.client.center import CenterVariable
from headrace.parameter_server.client.data_leases import LeasedStep, ServerDataLeases
from headrace.parameter_server.client.exchange import ReplicaGroup, ServedExchange
from headrace.parameter_server.client.own_steps import LocalOptimizer
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.planning import check_server_options
from headrace.parameter_server.wire import ShardLayout
from headrace.policies.period import AutoPeriod, Measured
from headrace.policies.staleness import AllMembers, Combination, DecidedElsewhere, EveryPush, FirstPushes
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan
from headrace.training.clipping import StepDecision
from headrace.training.exchange import UpdatingExchange
from headrace.training.optimizer import StatePiece, build
from headrace.training.synchronization import MeanState, mean_state
from headrace.training.update import AVERAGE

Wait = str | int | float
"""What an average waits for: "all" workers, so many of them, so many seconds (as a float), or "none"."""

_MOST_ROUNDS = 65_535
"""Of one push, as its message can say."""


@dataclass(frozen=True)
class ServedAveragingConfig:
    """How parameters are averaged through servers.

    `period` is the rounds between two averages, or the bounds of one that adapts; in the first `post_local` rounds of a
    run there is an average after each.
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
        longest = self.period if isinstance(self.period, int) else self.period.longest
        if longest > _MOST_ROUNDS:
            raise UsageError(f"period must be at most {_MOST_ROUNDS:,} through servers, got {longest:,}")
        check_server_options(self.servers, self.backups, self.transport)
        wait = self.wait
        if self.outer.follows_rate:
            raise UsageError(
                f"the outer step {self.outer!r} follows the workers' learning rate, and servers have none; use "
                "via='all_reduce', or hr.Momentum()"
            )
        if isinstance(wait, bool) or not (wait in ("all", "none") or isinstance(wait, int | float)):
            raise UsageError(f"wait must be 'all', 'none', a number of workers (3) or of seconds (3.0), got {wait!r}")
        if isinstance(wait, int) and wait < 1:
            raise UsageError(f"wait={wait} workers make no average; wait for 1 or more, or for 'all'")
        if isinstance(wait, float) and not 0 < wait < math.inf:
            raise UsageError(f"wait={wait} must be a number of seconds above 0; use wait='all' to wait for all")
        if wait == "none" and not isinstance(self.outer, Elastic):
            raise UsageError(
                "wait='none' would put each worker's parameters in place of the average; use it with "
                "outer='elastic', or wait='all'"
            )
        if wait == "none" and self.average_state:
            raise UsageError(
                "wait='none' makes no average of the optimizers' state; use average_optimizer_state=False, or "
                "wait='all'"
            )

    def require_workers(self, count: int) -> None:
        """Raises InfeasiblePlan if the average would wait for more workers than there are."""
        if isinstance(self.wait, int) and self.wait > count:
            raise InfeasiblePlan(
                f"wait={self.wait} waits for {self.wait} workers and there are {count}; use wait='all', or at "
                f"most wait={count}"
            )

    @property
    def drops(self) -> bool:
        """Whether a worker that comes too late is left out."""
        return self.wait not in ("all", "none")

    @property
    def in_turn(self) -> bool:
        """Whether the first of several servers decides which workers are too late."""
        return self.servers > 1 and self.drops

    def combination(self, first: bool) -> Combination:
        """Returns when a server has enough pushes for an average; `first` if it is the first server."""
        if not first and self.in_turn:
            return DecidedElsewhere()
        if self.wait == "none":
            return EveryPush()
        return FirstPushes(self.wait) if isinstance(self.wait, int) else AllMembers()

    def outer_options(self, workers: int) -> Mapping[str, Any] | None:
        """Returns the options of the SGD that is the outer step on a server; None where it is no SGD."""
        if not isinstance(self.outer, Elastic):
            return self.outer.sgd()
        # beta of the mean is alpha of each.
        return {"lr": self.outer.beta / (workers if self.wait == "none" else 1)}


def state_on_server(model: ModelSpec, optimizer: Callable[..., Any]) -> MeanState:
    """Returns the state of the workers' optimizers, on a server, which has none of their parameters."""
    zeros = ((spec, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in model.parameters)
    named = {spec.name: nn.Parameter(tensor, requires_grad=spec.trainable) for spec, tensor in zeros}
    return mean_state(named, build(optimizer, named.items()), optimizer)


class OuterOptimizer(torch.optim.Optimizer):
    """Makes outer steps on servers that are no SGD's; a parameter's gradient is how far the mean has moved from it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"outer": MeanStep()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            outer: OuterStep = group["outer"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean, kept, anchored = (
                    parameter - parameter.grad,
                    self.state[parameter],
                    isinstance(outer, AnchoredStep),
                )
                for index in range(anchored, outer.copies_kept):
                    kept.setdefault(f"outer-{index}", torch.zeros_like(parameter) if index else parameter.clone())
                first = [parameter] if anchored else []
                outer.step([*first, *(kept[key] for key in sorted(kept))], mean, [parameter], 1)


def outer_optimizer(
    states: Container[str], outer: OuterStep, options: Mapping[str, Any] | None, named: Iterable[tuple[str, Tensor]]
) -> torch.optim.Optimizer:
    """Returns an optimizer that makes the outer step with parameters, and the mean of `states`."""
    every = list(named)
    whole, mean = ({"outer": outer}, {"outer": MeanStep()}) if options is None else (options, MeanStep().sgd())
    groups = [
        {"params": [tensor for name, tensor in every if (name in states) is is_state], **settings}
        for is_state, settings in ((False, whole), (True, mean))
    ]
    kind = OuterOptimizer if options is None else torch.optim.SGD
    return kind([group for group in groups if group["params"]])


class WorkerView(Protocol):
    """What the exchange needs of a worker's context; the run begins with round `first`."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def group(self) -> ProcessGroup: ...
    @property
    def first(self) -> int: ...


class ServedAveragingExchange(ServedExchange):
    """Takes local steps, and averages with the other workers at the end of every lease, which is `period` rounds long.

    If the optimizers' state is not averaged, a checkpoint holds that of the leader, and all go on with it; the state of
    a worker that is lost is lost with it, and its replacement begins with none. If `leads`, this worker loads the
    initial parameters into the servers.
    """

    keeps_writes = True

    def __init__(
        self,
        config: ServedAveragingConfig,
        plan: Plan,
        center: CenterVariable,
        layouts: Sequence[ShardLayout],
        worker: WorkerView,
        replica_group: ReplicaGroup,
        local: UpdatingExchange,
        leads: bool,
    ) -> None:
        self._period = PeriodController(config.period, config.post_local, worker.group)
        waits = config.wait != "none"
        stretch, parts = self._period.stretch, len(plan.shares)
        leases = ServerDataLeases(center.client, replica_group.group, leads, parts, stretch, center, rests=waits)
        super().__init__(leases, layouts, worker.model, worker.group, replica_group)
        self._center = center
        self._outer = config.outer
        # By the keys of the servers' optimizer, those of checkpoints, which set the outer step's state apart.
        sgd = config.outer.sgd() is not None or isinstance(config.outer, Elastic)
        kept = {f"outer-{index}": f"{OUTER}-{index}" for index in range(config.outer.copies_kept)}
        self._saved_as = {"momentum_buffer": f"{OUTER}-1"} if sgd else kept
        self._alpha = config.outer.beta / plan.workers if isinstance(config.outer, Elastic) else 0.0
        self._waits = waits
        self._drops = config.drops
        self._patience_s = config.wait if isinstance(config.wait, float) else math.inf
        self._averages_state = config.average_state
        self._inner = local
        self._local = LocalOptimizer(local, len(worker.model.trainable), worker.first)
        self._names = {parameter.name for parameter in worker.model.parameters}
        self._weight = 0.0
        self._shares: list[float] = []
        self._began_s, self._lease_s, self._fastest_s = 0.0, 0.0, math.inf

    def begin(self, round_: int) -> None:
        self._round = round_
        self._began_s = perf_counter()
        if not self._shares:
            self._lease_s = self._began_s
        self._inner.begin(round_)

    def _exchange(self, step: LeasedStep, finite: bool) -> tuple[StepDecision, bool]:
        decision = self._inner.synchronize(finite)
        if decision.apply:
            self._local.step(self._round)
            self._weight += step.weight
        self._shares.append(step.share)
        self._fastest_s = min(self._fastest_s, perf_counter() - self._began_s)
        late = False
        if step.last:
            late = self._average(step.lease)
        elif self._drops and self.client.is_behind:
            late = self._give_up(step.lease)
        return replace(decision, bad_losses=(self._group.rank,)) if decision.bad_losses else decision, late

    def swap_weights(self, averaged: bool) -> None:
        super().swap_weights(averaged)
        self._center.take()

    def state(self) -> tuple[StatePiece, ...]:
        of_parameters = (piece for piece in super().state() if piece.parameter in self._names)
        outer = (replace(piece, key=self._saved_as.get(piece.key, piece.key)) for piece in of_parameters)
        return (*outer, *(self._inner.state() if self._group.rank == 0 else ()))

    def settings(self) -> dict[str, Any]:
        return {**self._local.settings(self.leases.synced_round), "averaging": self._period.settings()}

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = list(pieces)
        theirs = {saved: key for key, saved in self._saved_as.items()}
        outer = [replace(piece, key=theirs[piece.key]) for piece in every if piece.key in theirs]
        super().load([*outer, *(piece for piece in every if piece.key == AVERAGE)])
        self._inner.load([piece for piece in every if piece.key != AVERAGE], settings)
        self._period.load(settings)
        # The averaged state begins with this worker's.
        self._center.gather()
        self.load_values(self._center.local, only_state=True)

    def memory(self) -> tuple[int, int]:
        parameter_bytes, state_bytes = self._inner.memory()
        return 2 * parameter_bytes, state_bytes

    def _average(self, lease: int) -> bool:
        """Pushes how far this worker has moved, and goes on from the center; returns whether it came too late."""
        if self._fastest_s > self._patience_s:
            raise UsageError(
                f"wait={self._patience_s:g} s is shorter than one step, which takes {self._fastest_s:.3g} s: a worker "
                "that is a step behind would never be part of an average; wait longer, or use wait='all'"
            )
        weight, shares, self._weight, self._shares = self._weight, self._shares, 0.0, []
        center, leases = self._center, self.leases
        began_s = perf_counter()
        if not self._waits:
            self.client.pull()
        distances = center.distances()
        if self._alpha:
            center.approach(self._alpha)
        weight = weight if self._outer.weighted else float(weight > 0)
        reason = self.client.push(
            distances, lease, weight, sum(shares) / len(shares),
            pull=self._waits, steps=len(shares), patience_s=self._patience_s,
        )  # fmt: skip
        broken = reason == Reason.NOT_FINITE
        if broken and not self._averages_state:
            # A state that has led to such parameters is dropped with them.
            self._inner.load(())
        center.take(all_of_it=broken or not self._alpha)
        if reason != Reason.LATE and self._waits:
            ended_s, norm = perf_counter(), center.norm
            drift = self.client.apart / norm if norm else 0.0
            seen = Measured(len(shares), began_s - self._lease_s, ended_s - began_s, drift)
            left_out = (self._group.members[self._group.rank],) if broken else ()
            leases.sync_result = self._period.note(seen, leases.span, self.client.versions[0][0], left_out)
        return reason == Reason.LATE

    def _give_up(self, lease: int) -> bool:
        """Returns the rest of a lease: the average has moved on, and a push against an old one would be dropped.

        Returns whether the servers say so, too.
        """
        nothing = [[None] * len(places) for places in self._center.local]
        share, self._weight, self._shares = self._shares[0], 0.0, []
        # Servers stop waiting for a worker that was late; this push makes them wait for it again.
        reason = self.client.push(nothing, lease, 0.0, share, pull=True, patience_s=self._patience_s)
        self._center.take(all_of_it=not self._alpha)
        return reason == Reason.LATE
