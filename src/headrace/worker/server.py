"""One server process from its run spec to its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import TypeVar

from msgspec import structs

from headrace.data.given import as_pipeline
from headrace.data.pipeline.order import Rounds
from headrace.errors import CorruptCheckpoint, PeerLost
from headrace.machine.resources import peak_resident_bytes, resident_bytes
from headrace.parameter_server.planning import ServerProcess
from headrace.parameter_server.replication.failover import primary_address, process_number, server_of
from headrace.parameter_server.replication.links import PeerWatch
from headrace.parameter_server.replication.machine import View
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.server.snapshots import Snapshots, SnapshotSet, read
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Notice, RowsHeld, ServerEnded, ServerStarted, ServerStats, SnapshotTaken
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plan import Plan
from headrace.strategies.served import ServedStrategy, ServerContext
from headrace.worker.events import EventWriter
from headrace.worker.guards.caller import take_settings
from headrace.worker.guards.failure import failure_of
from headrace.worker.loops.leased import next_sync_point
from headrace.worker.run_spec import SNAPSHOTS, ResumePoint, RunSpec

T = TypeVar("T")

_TELL_EVERY_S = 1.0


def serve(
    run: RunSpec, rank: int, page: ControlPage, check: Callable[[], None], address: str = "", moved: bool = False
) -> None:
    """Serves a rank's shards until the workers have ended; `check` raises if a process of the run was lost.

    `address` is where other hosts reach this one; "" where the run is on one host. The others reach one that `moved`
    from the plan's host as from another host. Any error is written as a `Failed` event before it is raised.
    """
    events = EventWriter(run.run_dir, rank, run.started)
    server, snapshots, runtime_bytes = None, None, resident_bytes()
    try:
        take_settings(run.caller)
        process = process_number(page, rank)
        assert isinstance(run.strategy, ServedStrategy)
        server = run.strategy.server(run.plan, rank, replace(context_of(run), process=ServerProcess(process, address)))
        owner = server_of(run.plan, rank)
        place = run.plan.servers.index(owner)
        if run.resume and run.resume.snapshots:
            _go_on(server, run.resume, run.resume.snapshots, place)
        if run.snapshots_every_s is not None:
            taking = Snapshots(run.run_dir / SNAPSHOTS, place, run.snapshots_every_s)
            snapshots = _Snapshotting(taking, server, events, rank)
        page.ranks[rank].address.publish(server.address.split()[-1] if moved else server.address)
        parameter_bytes, _ = server.memory()
        shards = sum(segment.owner == owner for segment in run.plan.segments)
        events.write(ServerStarted(rank, events.now(), run.plan.role(rank).host, os.getpid(), shards, parameter_bytes))
        told, excluded = monotonic(), [0] * len(page.ranks)
        peer = PeerWatch(page, run.plan, owner, process, run.timeout_s)

        def look() -> None:
            nonlocal told
            check()
            if address:
                _exclude_lost(server, page, run.plan, excluded)
            if snapshots:
                snapshots.look()
            if server.replicated:
                _follow_view(server.replicated, page, run.plan, rank, process)
                page.ranks[rank].heartbeat.promotable_epoch = server.replicated.ready
                if server.replicated.severed or peer.is_cut(server.replicated.heard):
                    _suspect_peer(page, rank, owner, process)
            if monotonic() - told > _TELL_EVERY_S:
                told = monotonic()
                _tell(server, rank, events, run.plan)

        server.serve(look)
        _tell(server, rank, events, run.plan)
        held = (peak_resident_bytes(), *server.memory(), runtime_bytes)
        events.write_last(ServerEnded(rank, events.now(), server.moved_bytes, *held), page.ranks[rank].last_event)
    except PeerLost:
        raise
    except BaseException as error:
        events.write_last(failure_of(rank, events.now(), 0, error), page.ranks[rank].last_event)
        raise
    finally:
        if snapshots is not None:
            snapshots.close()
        if server is not None:
            server.close()
        events.close()


class _Snapshotting:
    """Takes a server's snapshots when they are due, and writes an event for each."""

    def __init__(self, snapshots: Snapshots, server: Server, events: EventWriter, rank: int) -> None:
        self._snapshots = snapshots
        self._server = server
        self._events = events
        self._rank = rank
        self._taken = 0
        self._error: OSError | None = None

    def look(self) -> None:
        found = self._snapshots
        found.look(self._server.snapshot)
        if found.taken > self._taken:
            self._taken = found.taken
            self._events.write(SnapshotTaken(self._rank, self._events.now(), found.bytes, found.pause_s))
        if found.error is not self._error:
            self._error = found.error
            if found.error is not None:
                text = f"no snapshot of the server on rank {self._rank}: {found.error.strerror or found.error} in "
                text += f"{found.folder}; training goes on, and the snapshots before it are untouched"
                self._events.write(Notice(self._rank, self._events.now(), text))

    def close(self) -> None:
        self._snapshots.close()


def _tell(server: Server, rank: int, events: EventWriter, plan: Plan) -> None:
    """Writes a server's counts, and the pushes that it has applied."""
    events.write(_by_rank(server.counters.event(rank, events.now()), plan))
    tables = server.counters.tables()
    # A backup that follows has the same rows, and the same moves.
    leads = not server.replicated or server.replicated.leads
    if tables and leads:
        events.write(RowsHeld(rank, events.now(), server_of(plan, rank), tables))
    applied = server.counters.order(rank, events.now())
    if applied is not None:
        events.write(applied)
    for make in server.counters.events if leads else ():
        events.write(make(server_of(plan, rank), events.now()))
    server.counters.events.clear()


def _by_rank(served: ServerStats, plan: Plan) -> ServerStats:
    """Returns the counts by rank: where several ranks hold a replica, a server knows the replica as one worker."""
    ranks, stage = plan.workers // plan.replicas, plan.role(served.rank).stage

    def named(counts: Mapping[str, T]) -> dict[str, T]:
        return {name if int(name) < 0 else str(int(name) * ranks + stage): each for name, each in counts.items()}

    return (
        structs.replace(served, staleness=named(served.staleness), waited_s=named(served.waited_s))
        if ranks > 1
        else served
    )


def _go_on(server: Server, resume: ResumePoint, found: SnapshotSet, place: int) -> None:
    folder, name = resume.snapshots_folder, found.names[place]
    try:
        server.restore(read(folder, name), found.clocks)
    except ValueError as error:
        raise CorruptCheckpoint(folder / name, str(error)) from error


def _exclude_lost(server: Server, page: ControlPage, plan: Plan, excluded: list[int]) -> None:
    """Tells a server which workers were declared lost since the last call, as their connections may be open still.

    A backup tells it when it is promoted.
    """
    if server.replicated and not server.replicated.leads:
        return
    for worker in range(plan.workers):
        if page.ranks[worker].restarts > excluded[worker]:
            excluded[worker] = page.ranks[worker].restarts
            server.lose(worker, excluded[worker])


def _follow_view(replicated: ReplicatedTransport, page: ControlPage, plan: Plan, rank: int, process: int) -> None:
    server = server_of(plan, rank)
    epoch, primary, backup = page.ranks[server].server_view.read()
    address = primary_address(page, plan, server, rank) if epoch else ""
    # A backup needs the address of its primary.
    if epoch and (process != backup or address):
        replicated.view(View(epoch, primary, None if backup < 0 else backup), address)


def _suspect_peer(page: ControlPage, rank: int, server: int, process: int) -> None:
    """Tells that the connection between the server and its backup, of which this is one, has ended."""
    epoch, primary, backup = page.ranks[server].server_view.read()
    if epoch:
        page.ranks[rank].suspicion.raise_against((backup if process == primary else primary) % len(page.ranks))


def context_of(run: RunSpec) -> ServerContext:
    """Returns what a strategy makes a server from."""
    job = run.job
    pipeline, _ = as_pipeline(job.data)
    rounds = Rounds(len(pipeline), pipeline.hosts, job.global_batch_size, pipeline.batching.drop_last)
    rounds_per_epoch = len(rounds)
    first = run.resume.done if run.resume else 0
    return ServerContext(
        model=run.model,
        optimizer=one_optimizer(job.optimizer, run.strategy.name),
        options=job.options,
        rounds_per_epoch=rounds_per_epoch,
        first=first,
        until=next_sync_point(run, rounds_per_epoch, first),
    )
