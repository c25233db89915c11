"""One worker from its run spec to its end, as a process or a thread."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.forms import extra_states, pack, unpack
from headrace.checkpoint.model_file import save_in_parts
from headrace.checkpoint.trained_model import save_model
from headrace.collectives.base import ProcessGroup, gather_texts, moved_bytes_of
from headrace.devices import HOST
from headrace.errors import PeerLost, UnfitMachine, UsageError
from headrace.machine.limits import out_of_memory
from headrace.machine.resources import peak_resident_bytes, resident_bytes
from headrace.modules import is_dense, not_sent, parameters_and_buffers, stateful_modules
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Notice, RowsHeld, RowsRead, WorkerEnded, WorkerStarted
from headrace.spec.model import ModelSpec
from headrace.spec.plan import Plan, Role, device_kinds
from headrace.training.compute import Compute
from headrace.training.embeddings.layer import local_stats, rows_of_layers, sparse_layers
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.shared_buffers.synced import average_by_weight
from headrace.training.synchronization import DataLeases, PeriodicSync
from headrace.trees import as_bytes
from headrace.worker.attributes import SameBuild
from headrace.worker.control import RunControl
from headrace.worker.events import EventWriter, InputReporter
from headrace.worker.guards.caller import take_settings
from headrace.worker.guards.failure import failure_of
from headrace.worker.guards.witness import require_same_results
from headrace.worker.loops.base import Loop
from headrace.worker.loops.rounds import LockstepLoop, PeriodicLoop
from headrace.worker.run_spec import RunSpec, model_path
from headrace.worker.session import (
    DeviceGroup,
    WorkerSession,
    build_evaluation,
    build_loader,
    build_module,
    build_replica,
    stored_values,
)
from headrace.worker.state import LoadedCheckpoint, making_sense, seed_worker
from headrace.worker.worker import Worker, train

_LOOK_EVERY_S = 0.001


def work(
    run: RunSpec,
    rank: int,
    group: ProcessGroup,
    page: ControlPage,
    building: AbstractContextManager[Any] | None = None,
) -> None:
    """Builds the replica, runs the loop, and writes the trained model to the run's directory (rank 0).

    Any error is written as a `Failed` event before it is raised. `building` is held while the model is built from the
    seed, and while the generators are seeded, where workers share them.
    """
    events = EventWriter(run.run_dir, rank, run.started)
    session: WorkerSession | None = None
    closing = ExitStack()
    runtime_bytes = resident_bytes()
    try:
        take_settings(run.caller)
        role, restarts = run.plan.role(rank), page.ranks[rank].restarts
        stored = LoadedCheckpoint(CheckpointFolder(run.resume.folder).open(run.resume.step)) if run.resume else None
        with building or nullcontext():
            module = build_module(run.job)
        _begin_as(run, module, stored, reads=not (run.strategy.begins_alike and group.fixed and rank))
        session, reporter = group.together(lambda: _build(run, role, group, page, module, events, closing))
        compute, control = session.replica.compute, RunControl(session, closing)
        loop = _loop_of(session, control)
        with building or nullcontext():
            # One that still builds its model draws from the generator that this seeds.
            _seed(run, rank, restarts)
        if stored:
            control.resume(stored)
            del stored
        closing.enter_context(loop)
        worker = Worker(session, control, loop)
        events.write(WorkerStarted(rank, events.now(), role.host, os.getpid(), role.device, role.threads))
        with reporter.until_end(session.loader.counters), _parts_explained(session):
            (run.train or train)(worker)
            control.places.regain()
        stays = loop.leave()
        if stays:
            _wait_for_all(session)
            _finish(session, control, loop)
            group.together(lambda: leave_model(run, rank, group, compute))
        _tell_rows(session)
        events.write_last(_ended(session, loop.moved_bytes, runtime_bytes), page.ranks[rank].last_event)
        if stays:
            group.together(loop.end)
    except PeerLost:
        raise
    except BaseException as error:
        better = _explained(error, run, rank, session)
        step = max(0, session.progress.round) if session else 0
        events.write_last(failure_of(rank, events.now(), step, better), page.ranks[rank].last_event)
        raise better from (error.__cause__ if better is error else error)
    finally:
        events.flush()
        closing.close()
        events.close()


def _explained(error: BaseException, run: RunSpec, rank: int, session: WorkerSession | None) -> BaseException:
    """Returns a better error where memory ran out, or a device has failed; else the same."""
    role = run.plan.role(rank)
    cause = error.__cause__ if isinstance(error, UnfitMachine) else error
    if cause is not None and out_of_memory(cause):
        # Here, because few runs need it.
        from headrace.worker.guards.memory import explained as with_amounts

        better = with_amounts(error, run, role, session)
        # For the event, which is written first.
        better.__cause__ = cause
        return better
    if role.device == HOST:
        return error
    from headrace.machine.accelerators import explained_by_device

    name = f"{role.device} ({role.identity})" if role.identity else role.device
    return explained_by_device(error, name, f"rank {role.rank} on {role.host}")


def _begin_as(run: RunSpec, module: nn.Module, stored: LoadedCheckpoint | None, reads: bool) -> None:
    """Gives a model that was built from the seed the values of a checkpoint or of files, if there is one.

    Where this worker gets the first one's parameters, it `reads` of files only what these are without.
    """
    require_same_results(run, module)
    if stored:
        with making_sense(stored.path):
            stored.load_module(module)
    elif not run.strategy.reads_parts and (weights := stored_values(run, module)):
        weights.read(module, None if reads else not_sent(module, run.plan))


@contextmanager
def _parts_explained(session: WorkerSession) -> Iterator[None]:
    """Says what torch does not: why a device has failed, and what cannot be done to the part that this rank has."""
    try:
        yield
    except Exception as error:
        if explained := session.devices.explained(error) or session.replica.compute.explained(error):
            raise explained from error
        raise


def _build(
    run: RunSpec,
    role: Role,
    group: ProcessGroup,
    page: ControlPage,
    module: nn.Module,
    events: EventWriter,
    closing: ExitStack,
) -> tuple[WorkerSession, InputReporter]:
    """Builds the replica and the data of a worker."""
    loader, reporter = build_loader(run, role, group, events)
    devices = DeviceGroup(run, role, group, page)
    closing.callback(devices.close)
    with _recomputing(module, run.job.options.again):
        replica = build_replica(run, role, page, module, loader, devices, closing, events)
    if run.job.options.offloads:
        from headrace.training.recompute.offloaded import OffloadedForward

        OffloadedForward(module)
    for line in (*replica.compute.notes, *_unlike_devices(run.plan, role, group)):
        events.write(Notice(role.rank, events.now(), line))
    evaluation = build_evaluation(run, role, replica, group)
    session = WorkerSession(run, role.rank, replica, loader, evaluation, group, page, events, devices)
    _require_same_changes(session)
    return session, reporter


def _recomputing(module: nn.Module, choice: str | Sequence[str] | None) -> AbstractContextManager[object]:
    """Has blocks run again in backward, as they are when a strategy has rewritten the model."""
    if choice is None:
        return nullcontext()
    from headrace.training.recompute.blocks import recomputing

    return recomputing(module, choice)


def _unlike_devices(plan: Plan, role: Role, group: ProcessGroup) -> Iterator[str]:
    """Yields on rank 0 what is to be said where workers' accelerators are not alike; all call it together."""
    if plan.workers == 1 or not plan.assigns_data or device_kinds(plan) == (HOST,):
        return
    # Here, because runs on CPUs need none of it.
    from headrace.machine.accelerators import device_title, unlike

    titles = gather_texts(group, "" if role.device == HOST else device_title(role.device))
    if role.rank == 0 and (said := unlike(titles, plan.balances)):
        yield said


def _loop_of(session: WorkerSession, control: RunControl) -> Loop:
    match session.replica.sync:
        case DataLeases() as leases:
            from headrace.worker.loops.leased import LeasedLoop

            return LeasedLoop(session, control, leases)
        case PeriodicSync() as sync:
            return PeriodicLoop(session, control, sync)
        case None:
            return LockstepLoop(session, control)


def _require_same_changes(session: WorkerSession) -> None:
    """Raises a UsageError where a worker in a lost one's place does not know what user code has changed."""
    count = session.page.ranks[session.rank].heartbeat.changed
    if session.is_replacement and session.replica.elastic is None and count:
        raise UsageError(
            f"rank {session.rank} was lost, and the process in its place runs the loop from its begin: it does not "
            f"know that user code has frozen parameters, or changed the mode of modules, since ({count} of them); use "
            "hr.frozen(model, pattern, until_epoch=...), or resume from a checkpoint, which holds both"
        )


def _seed(run: RunSpec, rank: int, restarts: int) -> None:
    resume = run.resume
    begins = restarts == 0 and (resume is None or resume.same)
    # Else no rank's saved state fits, and the run has drawn numbers from its first state already.
    seed_worker(run.job.seed, rank, 0 if begins or not resume else resume.done, restarts)


def _wait_for_all(session: WorkerSession) -> None:
    """Blocks until every worker's loop has ended."""
    page, group = session.page, session.group
    page.ranks[session.rank].heartbeat.finished = session.progress.round + 2
    if not group.fixed:
        # What marks of lost processes say is not known to all.
        group.together(group.barrier)
        return
    for member in group.members:
        while not (page.ranks[member].heartbeat.finished or group.is_gone(member)):
            group.check()
            time.sleep(_LOOK_EVERY_S)


def _finish(session: WorkerSession, control: RunControl, loop: Loop) -> None:
    """Saves a last time, and puts the trained model into the module: averaged weights and statistics."""
    group, replica = session.group, session.replica
    loop.finish()
    control.save_last()
    weight = control.statistics_weight
    group.together(lambda: average_by_weight(averaged_buffers(replica.compute.module), session.mates, weight))
    group.together(replica.adopt_trained_weights)
    if session.run.swaps_weights:
        group.together(replica.exchange.adopt_averaged_weights)
    group.together(lambda: control.guard.compare(evaluates=True))
    group.together(control.verbs.compare_rounds)
    # Before the model is left, which has what they change.
    control.callbacks.ended()


def _ended(session: WorkerSession, moved_bytes: int, runtime_bytes: int) -> WorkerEnded:
    rank, group, replica, events = session.rank, session.group, session.replica, session.events
    moved = moved_bytes_of(group) + replica.compute.moved_bytes + moved_bytes + session.devices.moved_bytes
    held = replica.exchange.memory()
    return WorkerEnded(rank, events.now(), session.progress.done, moved, peak_resident_bytes(), *held, runtime_bytes)


def _tell_rows(session: WorkerSession) -> None:
    """Writes what there is to say of the rows of tables."""
    rank, events, replica = session.rank, session.events, session.replica
    if tables := local_stats(replica.compute.module) if rank == 0 else ():
        events.write(RowsHeld(rank, events.now(), rank, tables))
    if reads := replica.exchange.row_reads():
        read = RowsRead(rank, events.now(), reads)
        events.write(read)
        if rank == 0 and read.line:
            events.write(Notice(rank, events.now(), read.line))


def leave_model(run: RunSpec, rank: int, group: ProcessGroup, compute: Compute) -> None:
    """Writes the whole model to the run's directory, once a host; all workers call it."""
    if not _left_in_parts(run, group, compute):
        _leave_gathered(run, rank, group, compute)
    if isinstance(run.job.model, SameBuild) and _first_of_host(run, rank, group):
        run.job.model.save(run.run_dir)
    # Under a launcher every rank continues with the saved model.
    group.barrier()


def _left_in_parts(run: RunSpec, group: ProcessGroup, compute: Compute) -> bool:
    """Writes the model where each rank has a part of it; those of a host see one file."""
    plan = run.plan
    if plan.replaces or not (compute.divided or plan.replicas < plan.workers):
        return False
    extra = dict(_gathered_extra(compute, group))
    if group.rank == 0:
        extra |= rows_of_layers(sparse_layers(compute.module))
    tensors = compute.whole_tensors(plan.leads(group.rank))
    first = group.members.index(_host_leader(run, group.members[group.rank], group))
    return save_in_parts(compute.module, run.model, tensors, extra, model_path(run.run_dir), group, first)


def _first_of_host(run: RunSpec, rank: int, group: ProcessGroup) -> bool:
    return group.rank == 0 if group.one_memory else rank == _host_leader(run, rank, group)


def _host_leader(run: RunSpec, rank: int, group: ProcessGroup) -> int:
    """Returns the first rank of this one's host; of the run, where all share memory."""
    roles, members = run.plan.roles, group.members
    return members[0] if group.one_memory else min(each for each in members if roles[each].host == roles[rank].host)


def _leave_gathered(run: RunSpec, rank: int, group: ProcessGroup, compute: Compute) -> None:
    plan, roles = run.plan, run.plan.roles
    extra = extra_states(compute.module, compute.has_state_of)
    # Where servers hold one model, every worker has fetched it.
    has_all = plan.replaces or plan.leads(group.rank)
    tensors = {name: tensor.cpu() for name, tensor in compute.whole_tensors(has_all)}
    first = _first_of_host(run, rank, group)
    if plan.replaces and not group.one_memory:
        buffers = {name: tensor for name, tensor in tensors.items() if name.startswith("buffer/")}
        tensors |= _sum_of_bytes(pack(buffers) if group.rank == 0 else b"", group)
        extra = dict(_gathered_extra(compute, group))
    elif not group.one_memory or compute.divided or plan.replicas < plan.workers:
        tensors = dict(gathered_tensors(run.model, compute.module, tensors, group, first))
        extra = dict(_gathered_extra(compute, group))
    if first:
        extra |= rows_of_layers(sparse_layers(compute.module))
        remedy = "resume=True (--resume) goes on from the last checkpoint" if run.checkpoints else "train again"
        save_model(compute.module, tensors, extra, model_path(run.run_dir), (rank, roles[rank].host), remedy)


def gathered_tensors(
    model: ModelSpec, module: nn.Module, own: Mapping[str, Tensor], group: ProcessGroup, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the model that some rank holds, on the ranks that keep it."""
    specs = {spec.name: spec for spec in (*model.parameters, *model.buffers)}
    for name, local in parameters_and_buffers(module):
        if not is_dense(local):
            # Only its holder knows how many elements it has.
            content = pack({name: own[name]}) if name in own else b""
            gathered = _sum_of_bytes(content, group)
            if keep:
                yield from gathered.items()
            continue
        spec = specs[name.partition("/")[2]]
        whole = torch.zeros(spec.bytes, dtype=torch.uint8)
        if name in own:
            whole.copy_(as_bytes(own[name].contiguous()))
        # As bytes, because adding zeros to numbers would lose the sign of a zero.
        group.all_reduce(whole)
        if keep:
            yield name, whole.view(getattr(torch, spec.dtype)).view(spec.shape)


def _gathered_extra(compute: Compute, group: ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Yields the extra state of every module, of the first rank that has it; all ranks get it."""
    names = [name for name, _ in stateful_modules(compute.module)]
    if not names:
        return
    has = torch.zeros(group.world, len(names), dtype=torch.int32)
    has[group.rank] = torch.tensor([compute.has_state_of(name) for name in names])
    group.all_reduce(has)
    first = {name: int(rank) for name, rank in zip(names, has.argmax(0).tolist(), strict=True)}
    own = extra_states(compute.module, lambda name: first[name] == group.rank)
    for rank in range(group.world):
        if rank in first.values():
            yield from _sum_of_bytes(pack(own) if rank == group.rank else b"", group).items()


def _sum_of_bytes(content: bytes, group: ProcessGroup) -> dict[str, Tensor]:
    """Returns what one rank has packed, on all of them."""
    (size,) = group.sum([float(len(content))])
    packed = torch.zeros(int(size), dtype=torch.uint8)
    if content:
        packed.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    group.all_reduce(packed)
    return unpack(packed.numpy().tobytes())
