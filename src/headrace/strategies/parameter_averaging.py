"""Parameter averaging: every worker takes local steps, and from time to time all average their parameters.

    compute, update                        synchronize, every `period` rounds
    a step of the job's own optimizer      average parameters, weighted by the examples of each worker since
    every round, on each worker's share    the last time; the outer step makes the next parameters of the mean

    worker 0   ░step░░step░░step░░step░ ┌──────┐ ░step░░step░░step░░step░ ┌──────┐
                                        │ mean │                          │ mean │
    worker 1   ░step░░step░░step░░step░ └──────┘ ░step░░step░░step░░step░ └──────┘

Names of the same with other numbers: local SGD (Stich, 2019), post-local SGD (Lin et al., 2020), EASGD (Zhang et al.,
2015), DiLoCo (Douillard et al., 2023).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from headrace.aggregation.robust import WorkerMean
from headrace.aggregation.table import require_workers, worker_mean
from headrace.averaging.averager import (
    AveragingConfig,
    ParameterAverager,
    place_in_average,
    require_alike,
)
from headrace.averaging.elastic import AveragedState
from headrace.averaging.local_steps import LocalStepsExchange
from headrace.averaging.outer_steps import MeanStep, OuterStep, outer_step
from headrace.averaging.proximal import ProximalTerm
from headrace.averaging.through_servers import (
    ServedAveragingConfig,
    ServedAveragingExchange,
    outer_optimizer,
    state_on_server,
)
from headrace.averaging.worker_average import CollectiveAverage, SharedMemoryAverage, WorkerAverage, extra_state
from headrace.errors import UnknownName, UsageError
from headrace.modules import frozen_until
from headrace.parameter_server.client.center import CenterVariable, OptimizerMirror
from headrace.parameter_server.client.data_leases import leases_between
from headrace.parameter_server.connecting import brings_parameters, build_server, connect
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.planning import layout_of, places_of
from headrace.parameter_server.replication.failover import server_of
from headrace.parameter_server.server.optimizer import RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.policies.behaviour import Behaviour, ParameterMean, ServerTerms
from headrace.policies.period import AutoPeriod, first_stretch
from headrace.policies.roles import data_parallel_plan, elastic_plan
from headrace.policies.segments import everywhere
from headrace.policies.staleness import Admission, Combination, Unbounded
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec, OptimizerNeeds
from headrace.spec.options import Options
from headrace.spec.plan import Plan, ProcessCounts
from headrace.strategies.broadcast import broadcast
from headrace.strategies.checks import check_count, check_elastic, refuse_modes
from headrace.strategies.context import ModelProbe, WorkerContext, summing_of
from headrace.strategies.one_device import LocalExchange
from headrace.strategies.refusals import Refusal, local_steps, moving_average
from headrace.strategies.served import ServedStrategy, ServerContext, agreement
from headrace.strategies.strategy import describe_options
from headrace.training.exchange import Replica
from headrace.training.gradients import FlatLayout
from headrace.training.synchronization import mean_state
from headrace.transport.codec import CODECS, sent_share

_RARELY = 8
"""From so many rounds between synchronizations on, it pays to copy the parameters there and back."""


@dataclass(frozen=True)
class ParameterAveraging(ServedStrategy):
    """Averages parameters instead of gradients.

    Attributes:
        workers: how many; None for the launcher's processes or the machine's accelerators.
        period: rounds between two synchronizations; "auto", or an `AutoPeriod` with bounds of one's own, adapts it.
        outer: what a synchronization does with the mean: None takes it as it is, "nesterov(lr=0.7)" or
            `Nesterov(lr=0.7)` is DiLoCo's, "elastic" or `Elastic()` EASGD's.
        average_optimizer_state: average the optimizers' state, too; else each worker keeps its own.
        post_local: rounds at the beginning after each of which workers synchronize; then, every `period` rounds.
        codec: how outer gradients travel: "plain", "bf16", or "int8" with error feedback.
        pull_codec: how the average travels to workers, via "server".
        via: "all_reduce" among the workers, or "server", where workers may come and go.
        wait: whom an average waits for: "all", or so many workers, or so many seconds after the first has come (a
            float): a worker that comes later is left out, and goes on from the average. "none" is asynchronous EASGD.
        servers: how many hold shards, via "server".
        backups: of each server: with 1, nothing is lost with a server, and the run goes on.
        transport: to them: "shared_memory" within a host, or "tcp", also there; between hosts TCP, encrypted.
        min_workers, max_workers: as in `Mirrored`, via "all_reduce". The others do the rounds since the last
            synchronization again.
        reset_optimizer_state: each worker's optimizer begins anew after a synchronization, via "all_reduce".
        proximal: FedProx's mu: so much of the squared distance from the last average is added to each worker's loss,
            via "all_reduce".
        mean: what the mean is: None for that weighted by examples, "trimmed_mean" or a `WorkerMean` for another.

    Raises:
        UsageError: an option has a value that it cannot have.

    Examples:
        >>> run = hr.fit(job, hr.ParameterAveraging(workers=2, period=2))
        >>> run.plan.workers, run.summary.steps
        (2, 4)
    """

    workers: int | None = None
    period: int | str | AutoPeriod = 16
    outer: str | OuterStep | None = None
    average_optimizer_state: bool = False
    post_local: int = 0
    codec: str = "plain"
    pull_codec: str = "plain"
    via: str = "all_reduce"
    wait: str | int | float = "all"
    servers: int = 1
    backups: int = 0
    transport: str = "shared_memory"
    min_workers: int | None = None
    max_workers: int | None = None
    reset_optimizer_state: bool = False
    proximal: float = 0.0
    mean: str | WorkerMean | None = None

    name = "parameter_averaging"
    equals_one_device = False
    collectives = True
    lock_step = False
    mixes_devices = True

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_elastic(self.workers, self.min_workers, self.max_workers)
        adapts = isinstance(self.period, AutoPeriod) or self.period == "auto"
        if not adapts and (not isinstance(self.period, int) or isinstance(self.period, bool) or self.period < 1):
            raise UsageError(
                "period must be a whole number of rounds of at least 1, 'auto' or hr.AutoPeriod(...), got "
                f"{self.period!r}"
            )
        outer_step(self.outer)
        for option in ("average_optimizer_state", "reset_optimizer_state"):
            if not isinstance(getattr(self, option), bool):
                raise UsageError(f"{option} must be True or False, got {getattr(self, option)!r}")
        self._check_stretches()
        if not isinstance(self.post_local, int) or isinstance(self.post_local, bool) or self.post_local < 0:
            raise UsageError(f"post_local must be a whole number of rounds of at least 0, got {self.post_local!r}")
        for codec in (self.codec, self.pull_codec):
            if codec not in CODECS:
                raise UnknownName("codec", codec, CODECS)
        rule = worker_mean(self.mean)
        if self.codec != "plain" and rule is not None:
            raise UsageError(
                f"mean={self.mean!r} is made of the workers' parameters as they are, and codec={self.codec!r} rounds "
                "them; use codec='plain'"
            )
        if self.mean is not None and self.wait == "none":
            raise UsageError(
                f"mean={self.mean!r} is of several workers, and wait='none' has one at a time; use wait='all'"
            )
        if self.via == "server":
            check_count("servers", self.servers)
            if self.min_workers is not None:
                raise UsageError(
                    f"min_workers={self.min_workers} is of workers that average among themselves, and via='server' "
                    "lets them come and go as it is; leave min_workers out, or use via='all_reduce'"
                )
            _ = self._service
            return
        if self.via != "all_reduce":
            raise UnknownName("way", self.via, ("all_reduce", "server"))
        if self.pull_codec != "plain":
            raise UsageError(
                f"pull_codec={self.pull_codec!r} is of what workers pull from servers, and via='all_reduce' has none; "
                "use codec, or via='server'"
            )
        if self.wait != "all":
            raise UsageError(
                f"wait={self.wait!r} goes on without workers that are late, and via='all_reduce' needs every worker; "
                "use wait='all', or via='server'"
            )

    def _check_stretches(self) -> None:
        """Checks what becomes of optimizers between synchronizations, and of the way from the last one."""
        if self.average_optimizer_state and self.reset_optimizer_state:
            raise UsageError(
                "average_optimizer_state=True has workers go on with the mean of their state, and "
                "reset_optimizer_state=True with none; choose one"
            )
        number = isinstance(self.proximal, int | float) and not isinstance(self.proximal, bool)
        if not number or not 0 <= self.proximal < math.inf:
            raise UsageError(f"proximal must be a number of at least 0, got {self.proximal!r}")
        if self.proximal and not outer_step(self.outer).agrees:
            raise UsageError(
                f"proximal={self.proximal:g} is of the distance from where all workers began, and with {self.outer!r} "
                "each begins from its own parameters; leave proximal out, or use another outer step"
            )
        if self.via == "server" and (self.reset_optimizer_state or self.proximal):
            name = "proximal" if self.proximal else "reset_optimizer_state"
            raise UsageError(
                f"{name}={getattr(self, name)!r} is of workers that average by all-reduce; use via='all_reduce'"
            )

    def inspect_model(self, model: ModelSpec, probe: ModelProbe) -> ModelSpec:
        if self.proximal and (until := frozen_until(probe.module)):
            raise UsageError(
                f"proximal={self.proximal:g} gives every parameter a gradient, and {next(iter(until))!r} is frozen "
                f"before epoch {max(until.values())}; leave until_epoch or proximal out"
            )
        return super().inspect_model(model, probe)

    @property
    def _service(self) -> ServedAveragingConfig:
        return ServedAveragingConfig(
            self._target, outer_step(self.outer), self.wait, self.servers, self.backups, self.transport,
            self.post_local, self.average_optimizer_state,
        )  # fmt: skip

    @property
    def _apart(self) -> bool:
        return isinstance(self.period, int) and self.period >= _RARELY

    @property
    def _target(self) -> int | AutoPeriod:
        return AutoPeriod() if isinstance(self.period, str) else self.period

    def processes(self) -> ProcessCounts:
        counts = super().processes()
        return counts if self.via == "server" else ProcessCounts(counts.workers)

    def refusals(self) -> tuple[Refusal, ...]:
        # Servers have one average, and keep a moving average of it.
        average = (moving_average(self.name),) if self.via == "all_reduce" else ()
        return (*local_steps(self.name, f"every {self.period} rounds (period)"), *average)

    def plan(self, model: ModelSpec, cluster: Cluster) -> Plan:
        refuse_modes(self.name, model)
        if self.via == "server":
            # The outer step treats every element alone, whatever the job's optimizer does.
            cut = replace(model, sliceable=True, optimizer=OptimizerNeeds())
            # Beside its parameters and gradients, a worker has a copy of the average, and what lies on its way.
            plan = self.plan_with_servers(cut, cluster, copies=4)
            self._service.require_workers(plan.workers)
            require_workers(worker_mean(self.mean), plan.workers)
            return plan
        # Each worker: its copy, what autograd makes, a copy during evaluations, and where copies are averaged; all
        # together: what is kept.
        copies = (3 + self._apart + bool(self.proximal), outer_step(self.outer).copies_kept)
        if self.min_workers is not None:
            # Each worker has all that is kept, and what it was at the last synchronization.
            copies = (4 + bool(self.proximal) + 2 * copies[1], 0)
        plan = data_parallel_plan(
            self.name, describe_options(self), self.workers, model, cluster, copies=copies, spread=True
        )
        require_workers(worker_mean(self.mean), self.min_workers or plan.workers)
        return elastic_plan(plan, self.min_workers, self.max_workers, cluster)

    def behave(self, workers: int) -> Behaviour:
        sent, through = sent_share(self.codec), None
        if self.via == "server":
            through = ServerTerms(
                self.policies(workers), self.servers, local=True, fixed=self.wait == "all", optimizes=False,
                pushed=sent, pulled=sent_share(self.pull_codec),
                patience_s=self.wait if isinstance(self.wait, float) else math.inf,
            )  # fmt: skip
        not_rehearsed = ""
        if through:
            not_rehearsed = "its workers average through servers while others go on; use via='all_reduce'"
        elif not isinstance(self.period, int):
            not_rehearsed = (
                "its period follows what workers measure, and nothing is measured here; give a number of rounds"
            )
        return Behaviour(ParameterMean(self._target, self.post_local, sent, through), not_rehearsed=not_rehearsed)

    def refuses_channels_last(self) -> str:
        return "" if self.via != "server" else super().refuses_channels_last()

    def replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        if self.via == "server":
            return self._served_replica(plan, rank, context)
        if self.codec != "plain" and summing_of(context)[0] is None:
            raise UsageError(
                f"codec={self.codec!r} saves bytes on a wire, and workers of one host average in memory that they "
                "share, where nothing travels; use codec='plain'"
            )
        require_alike(context.module, context.model, rank)
        broadcast(context.module, context.device_group() or context.group)
        outer = outer_step(self.outer)
        config = AveragingConfig(
            self._target, outer, self.average_optimizer_state, self.post_local, self.reset_optimizer_state
        )
        group, module, model = context.group, context.module, context.model
        average = place_in_average(
            module, model, group, lambda layout: self._average(layout, context, outer, self._apart)
        )
        first = rank * (context.inside.group.world if context.inside else 1)
        local = LocalExchange(plan.segments, context, first)
        plain = replace(self, codec="plain")
        extra = extra_state(
            module,
            local.updater.optimizer,
            context.optimizer,
            self.average_optimizer_state,
            lambda layout: plain._average(layout, context, MeanStep()),
        )
        averager = ParameterAverager(config, average, extra, local.updater, group, context.first)
        compute = context.whole_model(local_shares=len(plan.shares))
        elastic = None if group.fixed else AveragedState(local, averager, outer.agrees)
        named = {each.name: module.get_parameter(each.name) for each in model.trainable}
        near = ProximalTerm(self.proximal, named, lambda: averager.stretch.synced) if self.proximal else None
        return Replica(compute, LocalStepsExchange(local, averager, near), sync=averager, elastic=elastic)

    def server(self, plan: Plan, rank: int, context: ServerContext, *, by_share: bool = False) -> Server:
        """Builds a server; `by_share` moves the average by the share of its rounds that the contributing workers had.

        Then an example moves the average equally however many workers have contributed.
        """
        config = self._service
        rank = server_of(plan, rank)
        state = state_on_server(context.model, context.optimizer) if config.average_state else None
        layout = layout_of(plan, context.model, rank, state)
        # Schedules are the inner optimizer's, the moving average is that of the average.
        clock = RoundClock(Options(ema_decay=context.options.ema_decay), context.rounds_per_epoch, context.first)
        beside = state.specs if state else []
        optimizer = functools.partial(
            outer_optimizer, {each.name for each in beside}, config.outer, config.outer_options(plan.workers)
        )
        shard_optimizer = ShardOptimizer(
            layout, optimizer, [*context.model.parameters, *beside], clock, full=not by_share
        )
        combination = config.combination(first=rank == plan.servers[0])
        until, span = first_stretch(config.period, config.post_local, context.first, context.until)
        # If an average waits for all, workers go in lockstep, and every run is the same.
        fixed, last = self.wait == "all", context.first + leases_between(context.first, until, span)
        table = LeaseTable(len(plan.shares), last, context.first, fixed, workers=range(plan.workers))
        rule = worker_mean(self.mean)
        shard_optimizer.mean = rule.mean if rule else None
        leases, policies = (table, context.first, until, span), (Unbounded(), combination)
        return build_server(
            plan, rank, layout, shard_optimizer, policies, leases, self.transport, context.process, measures=True
        )

    def policies(self, workers: int) -> tuple[Admission, Combination]:
        """Returns which workers may proceed via "server", and which pushes make an average."""
        return Unbounded(), self._service.combination(first=True)

    def _served_replica(self, plan: Plan, rank: int, context: WorkerContext) -> Replica:
        config = self._service
        require_alike(context.module, context.model, rank)
        local = LocalExchange(
            everywhere(context.model.parameters),
            # The servers keep the moving average, which is one of averages.
            replace(context, options=replace(context.options, ema_decay=None)),
        )
        named = dict(context.module.named_parameters())
        state = mean_state(named, local.updater.optimizer, context.optimizer) if config.average_state else None
        beside = OptimizerMirror(state)
        layouts = [layout_of(plan, context.model, server, state) for server in plan.servers]
        own = [places_of(layout, context.module, beside.named) for layout in layouts]
        copy = [[torch.empty_like(place, device="cpu") for place in places] for places in own]
        servers = context.servers()
        client = connect(
            servers, layouts, copy, context.group.check, context.closing, together=True, in_turn=config.in_turn
        )
        center = CenterVariable(client, layouts, own, copy, beside, keeps=not config.outer.agrees)
        exchange = ServedAveragingExchange(
            config, plan, center, layouts, context, agreement(context), local, brings_parameters(client, rank)
        )
        exchange.load_values(center.local)
        return Replica(context.whole_model(local_shares=len(plan.shares)), exchange, exchange.leases)

    def _average(
        self, layout: FlatLayout, context: WorkerContext, outer: OuterStep, apart: bool = False
    ) -> WorkerAverage:
        average: WorkerAverage
        if summing_of(context)[0] is None and context.group.fixed:
            average = SharedMemoryAverage(layout, context.group, outer, apart, context.device)
        else:
            # Else memory of lost workers would be lost with them.
            everyone = context.device_group() or context.group
            average = CollectiveAverage(layout, everyone, context.device, outer, self.codec)
        rule = worker_mean(self.mean)
        average.mean = rule.mean if rule else None
        return average
