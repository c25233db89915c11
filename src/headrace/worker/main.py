"""What one worker does from its order to its end, wherever it runs."""

from __future__ import annotations

import copy
import functools
import os
import resource
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.checkpoint import CheckpointFolder
from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data import CpuBudget, Loader, as_pipeline
from headrace.errors import HeadraceError, PeerLost
from headrace.machine import cores
from headrace.parameter_server.replication.failover import primary_address
from headrace.policies.threads import threads_per_worker
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Failed, Notice, WorkerEnded, WorkerStarted
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan, Role
from headrace.strategies.strategy import ServerDirectory, WorkerContext
from headrace.training.compute import Compute, parameters_and_buffers
from headrace.training.exchange import Replica
from headrace.training.whole_model import Objective
from headrace.worker.data_assignment import DataAssignment, assign_data
from headrace.worker.evaluation import Evaluation
from headrace.worker.events import EventWriter
from headrace.worker.input_reporter import InputReporter
from headrace.worker.loaded_checkpoint import LoadedCheckpoint, making_sense, seed_random
from headrace.worker.run_spec import ResumePoint, RunSpec
from headrace.worker.worker import Worker, train

_LOOK_EVERY_S = 0.001
_HEADRACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))


def work(
    order: RunSpec,
    rank: int,
    group: ProcessGroup,
    page: ControlPage,
    building: AbstractContextManager[Any] | None = None,
) -> None:
    """Builds the replica, runs the loop, and leaves the trained model in the run's directory (rank 0).

    Any error is written down as a `Failed` event before it is raised.

    Args:
        order: the run.
        rank: this worker's.
        group: the workers.
        page: the run's signals.
        building: held while the model is built from the seed, where workers share one generator.
    """
    journal = EventWriter(order.run_dir, rank, order.started)
    worker: Worker | None = None
    closing = ExitStack()
    try:
        role, incarnation = order.plan.role(rank), page.ranks[rank].restarts
        stored = _stored(order.resume) if order.resume else None
        with building or nullcontext():
            module = build_module(order.job)
        if stored:
            with making_sense(stored.path):
                stored.load_module(module)
        loader, feeding = _fed(order, role, group, journal)
        context = _parts(order, role, group, module, page, loader, closing)
        replica = order.strategy.replica(order.plan, rank, context)
        if replica.portions:
            closing.callback(replica.portions.close)
        worker = _worker(order, role, replica, loader, group, page, journal)
        _seed(order, rank, incarnation)
        if stored:
            worker.resume(stored)
            del stored
        if replica.portions:
            replica.portions.begin()
        journal.write(WorkerStarted(rank, journal.now(), role.host, os.getpid(), role.device, role.threads))
        with feeding.until_end(loader.stages):
            (order.train or train)(worker)
        meets = worker.leave()
        if meets:
            _end_together(page, rank, worker, group)
            group.together(lambda: _leave_model(order, rank, group, replica.compute))
        journal.write(_ended(rank, worker, replica, group, journal, context))
        if meets:
            group.together(lambda: _part(replica, group))
    except PeerLost:
        raise
    except BaseException as error:
        journal.write(_failed(rank, worker, journal, error))
        raise
    finally:
        journal.flush()
        closing.close()
        journal.close()


def _failed(rank: int, worker: Worker | None, journal: EventWriter, error: BaseException) -> Failed:
    step = max(0, worker.round) if worker else 0
    # An error of ours says it all; what user code has raised below it is the user's to see.
    origin = error.__cause__ if isinstance(error, HeadraceError) else error
    shown = user_traceback(origin) if origin else ""
    code = error.exit_code if isinstance(error, HeadraceError) else 1
    return Failed(rank, journal.now(), step, f"{type(error).__name__}: {error}", shown, code)


def _leave_model(order: RunSpec, rank: int, group: ProcessGroup, compute: Compute) -> None:
    plan, roles = order.plan, order.plan.roles
    tensors = {name: tensor.cpu() for name, tensor in compute.whole_tensors(plan.leads(group.rank))}
    first = group.rank == 0
    if not group.one_memory:
        first = rank == min(role.rank for role in roles if role.host == roles[rank].host)
    if not group.one_memory or plan.replicas < plan.workers:
        tensors = dict(_gathered(order.model, compute.module, tensors, group, first))
    if first:
        _save(compute.module, tensors, order, rank)
    # Under a launcher every rank goes on with the saved model.
    group.barrier()


def _gathered(
    model: ModelSpec, module: nn.Module, own: Mapping[str, Tensor], group: ProcessGroup, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields what any rank has of the model, on those that keep it."""
    specs = {spec.name: spec for spec in (*model.parameters, *model.buffers)}
    for name, _ in parameters_and_buffers(module):
        spec = specs[name.partition("/")[2]]
        whole = torch.zeros(spec.bytes, dtype=torch.uint8)
        if name in own:
            whole.copy_(own[name].contiguous().view(-1).view(torch.uint8))
        # Bytes, because adding zeros to numbers would lose the sign of a zero.
        group.all_reduce(whole)
        if keep:
            yield name, whole.view(getattr(torch, spec.dtype)).view(spec.shape)


def _part(replica: Replica, group: ProcessGroup) -> None:
    if replica.portions:
        # Whoever still asks must be answered.
        group.barrier()
        # Those who hold the same part of the model have the same servers.
        if (replica.compute.mates or group).rank == 0:
            replica.portions.end()
        # Not before, because another one does it if the first is lost.
        group.barrier()


def _end_together(page: ControlPage, rank: int, worker: Worker, group: ProcessGroup) -> None:
    """Waits until every rank's loop has ended: what follows are meetings of those who have nothing else to do."""
    page.ranks[rank].heartbeat.finished = worker.round + 2
    for member in group.members:
        while not (page.ranks[member].heartbeat.finished or group.is_gone(member)):
            group.check()
            time.sleep(_LOOK_EVERY_S)
    worker.finish()


def _seed(order: RunSpec, rank: int, incarnation: int) -> None:
    resume = order.resume
    if incarnation == 0 and (resume is None or resume.same):
        seed_random((order.job.seed << 16) + 1 + rank)
    else:
        # No rank's own state fits, and that of the run's begin has been drawn from already.
        step = resume.done if resume else 0
        seed_random(hash((order.job.seed, rank, step, incarnation)) % 2**63)


def _stored(resume: ResumePoint) -> LoadedCheckpoint:
    return LoadedCheckpoint(CheckpointFolder(resume.folder).open(resume.step))


def build_module(job: Job) -> nn.Module:
    """Builds the job's model from its seed, or copies the one that it is."""
    torch.manual_seed(job.seed)
    return copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model()


def objective_of(job: Job, weighed: bool = False) -> Objective:
    """Returns what the job's model is trained on."""
    loss = job.task.loss if job.task else job.loss
    assert loss is not None  # Job holds that it has one of them
    return Objective(loss, job.inputs, job.target, weighed)


def _parts(
    order: RunSpec,
    role: Role,
    group: ProcessGroup,
    module: nn.Module,
    page: ControlPage,
    loader: Loader,
    closing: ExitStack,
) -> WorkerContext:
    connect: Callable[[], Collective] | None = None
    if order.plan.partition:
        # So that an error can say what of the model a rank has whose loop has ended.
        group.ends.names = [f"rank {rank} ({order.plan.part_of(rank)})" for rank in range(group.world)]
    if role.device != "cpu":
        torch.cuda.set_device(role.device)
        module.to(role.device)
        connect = (
            (lambda: ThreadCollective(ThreadGroup(1), 0)) if group.world == 1 else _connector(order, role, group.world)
        )
    elif not group.one_memory:
        connect = _itself(group)
    first = order.resume.done if order.resume else 0
    return WorkerContext(
        module=module,
        model=order.model,
        objective=objective_of(order.job, order.weighed),
        optimizer=order.job.optimizer,
        options=order.job.options,
        group=group,
        connect=connect,
        rounds_per_epoch=loader.rounds_per_epoch,
        full_batch=loader.full_batch,
        first=first,
        closing=closing,
        servers=ServerDirectory(
            ranks=order.plan.servers,
            worker=role.rank,
            addresses=lambda: tuple(_address(page, order.plan, server, group) for server in order.plan.servers),
            find=lambda index: _find(page, order.plan, index),
            incarnation=page.ranks[role.rank].restarts,
        ),
        sample=lambda: _sample(order.job),
    )


def _address(page: ControlPage, plan: Plan, server: int, group: ProcessGroup) -> str:
    while not (address := primary_address(page, plan, server)):
        group.check()
        time.sleep(_LOOK_EVERY_S)
    return address


def _find(page: ControlPage, plan: Plan, index: int) -> str:
    address = primary_address(page, plan, plan.servers[index])
    if not address:
        raise ConnectionError("nobody is in its place yet")
    return address


def _sample(job: Job) -> Any:
    pipeline, _ = as_pipeline(job.data)
    loader = Loader(pipeline, job.seed, min(2, len(pipeline)), (1,), 0, ordered=True)
    return next(share.batch for share in loader.sweep(alone=True) if share.examples)


def _itself(group: ProcessGroup) -> Callable[[], Collective]:
    return lambda: group


def _connector(order: RunSpec, role: Role, world: int) -> Callable[[], Collective]:
    def connect() -> Collective:
        # Here, because importing torch.distributed costs what a CPU run need not pay.
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from headrace.collectives.torch_distributed import TorchDistributed

        store = FileStore(str(order.run_dir / "rendezvous"), world)
        return TorchDistributed(store, role.rank, world, role.device, order.timeout_s)

    return connect


def _fed(order: RunSpec, role: Role, group: ProcessGroup, journal: EventWriter) -> tuple[Loader, InputReporter]:
    feeding = InputReporter(role.rank, journal)
    job, plan = order.job, order.plan
    at = assign_data(as_pipeline(job.data)[0], plan, role, group)
    cpu_budget = replace(
        _cpu_budget(plan, role), say=lambda line: journal.write(Notice(role.rank, journal.now(), line))
    )
    batch = job.global_batch_size
    return Loader(at.pipeline, job.seed, batch, at.shares, at.rank, cpu_budget=cpu_budget, tell=feeding.tell), feeding


def _worker(
    order: RunSpec,
    role: Role,
    replica: Replica,
    loader: Loader,
    group: ProcessGroup,
    page: ControlPage,
    journal: EventWriter,
) -> Worker:
    job, plan = order.job, order.plan
    cpu_budget = _cpu_budget(plan, role)
    for line in replica.compute.notes:
        journal.write(Notice(role.rank, journal.now(), line))
    evaluation = None
    if job.eval_data is not None:
        eval_pipeline, _ = as_pipeline(job.eval_data)

        def swept(rank: int, world: int) -> Loader:
            each = plan.workers // plan.replicas
            context = (1,) * (world // each)
            # Of leased portions anybody may come and go; evaluation is everybody's who is there.
            at = (
                DataAssignment(eval_pipeline, context, rank // each)
                if plan.servers
                else assign_data(eval_pipeline, plan, role, group)
            )
            batch = job.options.eval_batch_size
            size = batch * len(context) if batch else max(job.global_batch_size, len(context))
            return Loader(at.pipeline, job.seed, size, at.shares, at.rank, ordered=True, cpu_budget=cpu_budget)

        evaluation = Evaluation(job, replica, functools.cache(swept), group)
    return Worker(order, role.rank, replica, loader, evaluation, group, page, journal)


def _cpu_budget(plan: Plan, role: Role) -> CpuBudget:
    """Returns what a worker may read its data with: its part of the host's cores."""
    mates = sum(other.host == role.host and other.kind == "worker" for other in plan.roles)
    return CpuBudget(threads_per_worker(cores(), mates), role.threads if role.device == "cpu" else 1)


def _save(module: nn.Module, saved: Mapping[str, Tensor], order: RunSpec, rank: int) -> None:
    from safetensors.torch import save_file

    # A tensor may have several names in the module's state, and has one in a checkpoint.
    first = {id(parameter): f"parameter/{name}" for name, parameter in module.named_parameters()}
    first |= {id(buffer): f"buffer/{name}" for name, buffer in module.named_buffers()}
    state = module.state_dict(keep_vars=True)
    own = {name: saved.get(first.get(id(tensor), ""), tensor) for name, tensor in state.items()}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()}
    # Its own, because several hosts may have one file system.
    part = order.run_dir / f"model.safetensors.part-{rank}"
    save_file(tensors, part)
    part.rename(order.run_dir / "model.safetensors")


def _ended(
    rank: int, worker: Worker, replica: Replica, group: ProcessGroup, journal: EventWriter, context: WorkerContext
) -> WorkerEnded:
    parameter_bytes, optimizer_bytes = replica.exchange.memory()
    wire = context.wire if "wire" in context.__dict__ else None
    moved = (
        group.all_moved_bytes
        + replica.compute.moved_bytes
        + (replica.portions.moved_bytes if replica.portions else 0)
        + (wire.moved_bytes if wire and wire is not group else 0)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return WorkerEnded(rank, journal.now(), worker.round + 1, moved, peak, parameter_bytes, optimizer_bytes)


def user_traceback(error: BaseException) -> str:
    """Returns the traceback from the first frame of the user's code on; where there is none, of a library's."""
    frames = []
    frame = error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    theirs = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith(_HEADRACE)]
    users = [frame for frame in theirs if not frame.tb_frame.f_code.co_filename.startswith(_LIBRARIES)]
    first = next(iter(users or theirs or frames), None)
    return "".join(traceback.format_exception(type(error), error, first))
