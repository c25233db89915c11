"""What one worker of a run consists of, and how it is built: model, data, the other workers, evaluation."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from headrace.collectives.base import Collective, ProcessGroup, moved_bytes_of
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.data.loading.reader import CpuBudget
from headrace.data.pipeline.order import Hosts
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.devices import use
from headrace.errors import UsageError
from headrace.machine.resources import cores
from headrace.modules import move, names_of_sets, own_copy, parts_of, set_train_modes
from headrace.policies.roles import threads_per_worker
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Notice
from headrace.spec.job import Job, Share
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plan import Plan, Role, exchanges_in_host_memory, name_of, sums_lie_in_host_memory
from headrace.strategies.context import BatchInfo, WorkerContext
from headrace.training.embeddings.constructing import deferred_tables, put_tables
from headrace.training.exchange import Replica, UpdatingExchange
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import use_channels_last
from headrace.worker.evaluations.loss import LOSS, loss_in, with_loss
from headrace.worker.events import EventWriter, InputReporter
from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from headrace.parameter_server.replication.directory import ServerDirectory
    from headrace.weights.reading import StoredValues
    from headrace.worker.accelerators.connected import ConnectedDevices
    from headrace.worker.evaluations.evaluation import Evaluation


class DeviceGroup:
    """Connects the collective for the devices' own tensors when it is first called; None where memory is shared."""

    def __init__(self, run: RunSpec, role: Role, group: ProcessGroup, page: ControlPage) -> None:
        self.group = group
        self._run, self._role, self._page = run, role, page
        self._connected: Collective | None = None
        self._made: ConnectedDevices | None = None

    def __call__(self) -> Collective | None:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    @property
    def moved_bytes(self) -> int:
        """Bytes that this collective has moved; the group counts its own."""
        connected = self._connected
        return moved_bytes_of(connected) if connected is not None and connected is not self.group else 0

    def renew(self) -> None:
        """Ends what is under way with members that were; those that are connect when it is needed."""
        if self._made:
            self._made.renew()

    def close(self) -> None:
        """Leaves the collective; where this worker has failed, without the others, which may not come."""
        if self._made:
            self._made.close(failed=sys.exc_info()[0] is not None)

    def explained(self, error: Exception) -> Exception | None:
        """Returns why a collective has failed, of which the error of a device tells nothing; None if none has."""
        return self._made.problem if self._made else None

    def _connect(self) -> Collective | None:
        run, role, group = self._run, self._role, self.group
        if role.device == "cpu":
            return None if group.one_memory else group
        if exchanges_in_host_memory(run.plan):
            from headrace.collectives.accelerators.through_host import ThroughHost

            return ThroughHost(group, sums_lie_in_host_memory(run.plan))
        if group.world == 1 and group.fixed:
            return ThreadCollective(ThreadGroup(1), 0)
        # Here, because importing torch.distributed costs what a CPU run need not pay.
        from headrace.worker.accelerators.connected import ConnectedDevices

        self._made = ConnectedDevices(run, role, group, self._page)
        return self._made.connect()


@dataclass
class Progress:
    """How far a worker is.

    `round` is the current one, from 0; directly after a resume the last one done. `begun` is the last that was begun.
    `waited_s` are the seconds that the worker waited for the data of its share.
    """

    rounds: int
    round: int = -1
    begun: int = -1
    share: Share = field(default_factory=lambda: Share(None, 0, 0, 0))
    waited_s: float = 0.0
    examples: int = 0

    @property
    def done(self) -> int:
        """Rounds that are done when the current one is."""
        return self.round + 1


@dataclass(frozen=True)
class WorkerSession:
    """One worker of a run; `evaluation` is None where the job has no evaluation data."""

    run: RunSpec
    rank: int
    replica: Replica
    loader: Loader
    evaluation: Evaluation | None
    group: ProcessGroup
    page: ControlPage
    events: EventWriter
    devices: DeviceGroup
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        resume, rounds = self.run.resume, self.run.rounds(self.loader.rounds_per_epoch)
        object.__setattr__(self, "progress", Progress(rounds, resume.done - 1 if resume else -1))

    @property
    def is_replacement(self) -> bool:
        """Whether this worker's process has replaced one that was lost."""
        return bool(self.page.ranks[self.rank].restarts)

    @property
    def mates(self) -> ProcessGroup:
        """The workers that hold the same part of the model as this one."""
        return self.replica.compute.mates or self.group


def seed_torch(seed: int) -> None:
    """Seeds torch's generators of all devices.

    For each kind of accelerator that has not begun, `torch.manual_seed` formats the stack, some milliseconds; a build
    of torch without accelerators has one generator.
    """
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def make_module(job: Job) -> nn.Module:
    """Makes the job's model from its seed, or copies the one that it is; rows of its sparse embeddings come later.

    Python's and numpy's generators are seeded meanwhile, too, and then are as they were.
    """
    seed_torch(job.seed)
    if isinstance(job.model, nn.Module):
        return with_loss(put_tables(own_copy(job.model), job.seed), job.loss)
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(job.seed)
    np.random.seed(job.seed)
    try:
        with deferred_tables() as put:
            module = job.model()
            return with_loss(put(module, job.seed), job.loss) if isinstance(module, nn.Module) else module
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def build_module(job: Job) -> nn.Module:
    """Makes the model in the modes that it is trained in."""
    module = make_module(job)
    set_train_modes(module)
    return module


def objective_of(job: Job, module: nn.Module, weighed: bool = False) -> Objective:
    """Returns the loss of the job's model, which may be a part of it, and what it takes."""
    loss = job.task.loss if job.task else loss_in(module, job.loss)
    assert callable(loss)  # Job holds that it has one of them
    return Objective(loss, job.inputs, job.target, weighed)


def objectives_of(job: Job, module: nn.Module, weighed: bool = False) -> tuple[Objective, ...]:
    """Returns the loss, or one for each set of parameters that is trained in turns."""
    if not job.sets:
        return (objective_of(job, module, weighed),)
    return tuple(replace(objective_of(alone(job, name), module, weighed), model=module) for name in job.sets)


def alone(job: Job, name: str) -> Job:
    """Returns the job of one set of parameters: its turns are the rounds of a job in which the others are frozen."""
    own = job.sets[name]
    assert isinstance(job.loss, Mapping)
    return replace(job, optimizer=own.optimizer, loss=job.loss[name], options=own.options(job.options))


def stored_values(run: RunSpec, module: nn.Module) -> StoredValues | None:
    """Returns where the values are with which a whole model begins; None for those of the seed, or a checkpoint."""
    if run.job.weights is None or run.resume:
        return None
    from headrace.spec.weights import Weights
    from headrace.weights.fitting import find_weights

    return find_weights(Weights.of(run.job.weights), module, f"{LOSS}.")


def build_context(
    run: RunSpec,
    role: Role,
    page: ControlPage,
    module: nn.Module,
    loader: Loader,
    devices: DeviceGroup,
    closing: ExitStack,
    events: EventWriter,
) -> WorkerContext:
    """Returns what the strategy builds a replica from; `closing` closes what the strategy opens."""
    group = devices.group
    group.ends.names = [name_of(run.plan, rank) for rank in range(len(group.ends.names))]
    context = WorkerContext(
        module=module,
        model=run.model,
        objective=objective_of(run.job, module, run.weighed),
        optimizer=one_optimizer(run.job.optimizer, run.strategy.name),
        options=run.job.options,
        group=group,
        device_group=devices,
        rounds_per_epoch=loader.rounds_per_epoch,
        batches=BatchInfo(loader.full_batch, run.job.seed),
        first=run.resume.done if run.resume else 0,
        closing=closing,
        servers=lambda: _servers(run, role, page, group),
        sample=lambda: sample_of(run.job),
        user_code=frozenset(name for name, there in (("loop", run.train), ("callbacks", run.callbacks)) if there),
        weights=stored_values(run, module) if run.strategy.reads_parts else None,
        log=lambda name, value, round_: events.log({name: value}, round_ + 1),
    )
    if run.job.options.again is not None:
        context.require_own_generators()
    return context


def _servers(run: RunSpec, role: Role, page: ControlPage, group: ProcessGroup) -> ServerDirectory:
    # Only strategies with servers load that room.
    from headrace.parameter_server.replication.directory import find_servers

    return find_servers(run.plan, role.rank, page, group, run.timeout_s)


def build_replica(
    run: RunSpec,
    role: Role,
    page: ControlPage,
    module: nn.Module,
    loader: Loader,
    devices: DeviceGroup,
    closing: ExitStack,
    events: EventWriter,
) -> Replica:
    """Returns what the strategy builds: one replica, or one for each set of parameters, which take turns."""
    order, strategy = run.job.turns, run.strategy
    # Before the model is divided, so that what the parts do not have is there, too.
    if role.device != "cpu":
        use(role.device, role.identity)
        _move(run, module, role.device)
    if run.job.options.memory_format == "channels_last":
        use_channels_last(module)
    if order is None:
        context = build_context(run, role, page, module, loader, devices, closing, events)
        return strategy.replica(run.plan, role.rank, context)
    from headrace.training.turns import TurnsCompute, TurnsExchange, TurnsState

    parts = parts_of(module, names_of_sets(module, run.job.sets))
    holders = {name: part for part, own in parts.items() for name, _ in own.named_parameters()}
    replicas = {}
    for name, part in parts.items():
        own = run.of_set(alone(run.job, name), {each for each, holder in holders.items() if holder == name})
        context = build_context(own, role, page, part, loader, devices, closing, events)
        context = replace(context, objective=replace(context.objective, model=module))
        replicas[name] = strategy.replica(own.plan, role.rank, context)
    exchanges = {}
    for name, each in replicas.items():
        # Of a strategy with `turns`, whose workers go in lockstep.
        assert isinstance(each.exchange, UpdatingExchange)
        assert each.sync is None
        exchanges[name] = each.exchange
    states = {name: each.elastic for name, each in replicas.items() if each.elastic}
    return Replica(
        TurnsCompute({name: each.compute for name, each in replicas.items()}, order),
        TurnsExchange(exchanges, holders, order),
        elastic=TurnsState(states, holders) if states else None,
    )


def _move(run: RunSpec, module: nn.Module, device: str) -> None:
    if not run.strategy.in_parts:
        move(module, device)
        return
    from headrace.training.deferred.parts import set_aside

    with set_aside(module):
        move(module, device)


def build_loader(run: RunSpec, role: Role, group: ProcessGroup, events: EventWriter) -> tuple[Loader, InputReporter]:
    """Returns the loader of a worker's training data, and what writes its events."""
    reporter = InputReporter(role.rank, events)
    job, plan = run.job, run.plan
    data = assign_data(as_pipeline(job.data)[0], plan, role, group)
    budget = replace(_cpu_budget(plan, role), say=lambda line: events.write(Notice(role.rank, events.now(), line)))
    loader = Loader(
        data.pipeline, job.seed, job.global_batch_size, data.shares, data.rank, cpu_budget=budget, tell=reporter.tell
    )
    return loader, reporter


def build_evaluation(run: RunSpec, role: Role, replica: Replica, group: ProcessGroup) -> Evaluation | None:
    """Returns the evaluation; None where the job has no evaluation data."""
    job, plan = run.job, run.plan
    if job.eval_data is None:
        return None
    from headrace.worker.evaluations.evaluation import Evaluation

    budget = _cpu_budget(plan, role)

    def loader(pipeline: InputPipeline, rank: int, world: int) -> Loader:
        each = plan.workers // plan.replicas
        shares = (1,) * (world // each)
        # Where workers may join and leave, the present ones evaluate.
        fixed = plan.assigns_data
        data = assign_data(pipeline, plan, role, group) if fixed else DataAssignment(pipeline, shares, rank // each)
        batch = job.options.eval_batch_size
        size = batch * len(shares) if batch else max(job.global_batch_size, len(shares))
        return Loader(data.pipeline, job.seed, size, data.shares, data.rank, ordered=True, cpu_budget=budget)

    pipelines = {name: as_pipeline(data)[0] for name, data in job.eval_sets.items()}
    loaders = {name: functools.cache(functools.partial(loader, pipeline)) for name, pipeline in pipelines.items()}
    return Evaluation(job, replica, loaders, group, run.swaps_weights)


def sample_of(job: Job) -> Any:
    """Returns a batch of the training data's first two examples."""
    loader = Loader(data := as_pipeline(job.data)[0], job.seed, min(2, len(data)), (1,), 0, ordered=True)
    return next(share.batch for share in loader.sweep(alone=True) if share.examples)


def _cpu_budget(plan: Plan, role: Role) -> CpuBudget:
    """Returns a worker's part of the host's cores, for reading its data."""
    mates = sum(other.host == role.host for other in plan.roles[: plan.workers])
    return CpuBudget(threads_per_worker(cores(), mates), role.threads if role.device == "cpu" else 1)


@dataclass(frozen=True)
class DataAssignment:
    """The data of a worker: its pipeline, and which share of it, among all workers or those of this host."""

    pipeline: InputPipeline
    shares: tuple[int, ...]
    rank: int


def assign_data(pipeline: InputPipeline, plan: Plan, role: Role, group: ProcessGroup) -> DataAssignment:
    """Returns a worker's data; where hosts list examples of their own, all workers call it together.

    Raises:
        UsageError: each worker may get any data, and hosts list examples of their own.
    """
    shares, workers = plan.data_shares, plan.roles[: plan.workers]
    names = list(dict.fromkeys(worker.host for worker in workers))
    if pipeline.hosts is None or len(names) == 1:
        return DataAssignment(pipeline, shares, role.data_rank)
    if not plan.assigns_data:
        raise UsageError(
            f"{plan.strategy} leases any data to any worker, and hr.data.local says that each of {len(names)} hosts "
            "stores another part; give every host all data, or train without servers: mirrored"
        )
    near = [worker for worker in workers if worker.host == role.host]
    mates = sorted({worker.data_rank for worker in near})
    mine = names.index(role.host)
    # One worker of each host tells its count.
    own = [0.0] * len(names)
    own[mine] = float(len(pipeline)) if role.rank == min(worker.rank for worker in near) else 0.0
    counts = tuple(map(int, group.sum(own)))
    known = replace(pipeline, hosts=Hosts(counts, mine))
    return DataAssignment(known, tuple(shares[mate] for mate in mates), mates.index(role.data_rank))
