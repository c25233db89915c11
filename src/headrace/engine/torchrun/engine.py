"""This process is one worker of those that a launcher has started: torchrun, SLURM, MPI, `headrace launch`.

The launcher describes it in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import torch

from headrace.collectives.base import HostMap, ProcessGroup
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.devices import HOST, kind_of
from headrace.engine.base import LEFT, Engine, RunProgress, followed, orderly_interrupts
from headrace.engine.schedulers.alive import show_alive
from headrace.engine.torchrun.address import own_address, start_timeout_s
from headrace.engine.torchrun.elastic_workers.leader_file import STORE
from headrace.engine.torchrun.elastic_workers.returning import come_back
from headrace.engine.torchrun.failover import BACK_S
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.engine.torchrun.peers import LivenessWatch
from headrace.engine.torchrun.refusal import begun
from headrace.engine.torchrun.store import comes_back, gather, launched_store
from headrace.errors import LeftBehind, PeerLost, UsageError
from headrace.machine.identity import host_name
from headrace.machine.resources import cores, most_threads
from headrace.policies.roles import threads_per_worker
from headrace.policies.views import Member
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment
from headrace.spec.plan import Plan, device_kinds, exchanges_in_host_memory, spans_hosts
from headrace.worker.run_spec import RunSpec

_BEAT_EVERY_S = 0.25

_groups = itertools.count()
"""The same processes may form several groups; each has keys of its own in the store."""


class LaunchedEngine(Engine):
    """Runs one worker, in this process, which has joined the others in `group`.

    It computes with so many threads; None for the cores of this host, divided by its processes.
    """

    def __init__(self, group: LaunchedGroup, threads: int | None = None) -> None:
        self.group = group
        self._threads = threads

    def run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        group = self.group
        _settle_interface(spec.plan)
        torch.set_num_threads(self._threads or threads_per_worker(cores(), group.mates, most_threads()))
        page = group.page
        # Another rank may take the place of rank 0.
        shows = followed(page, progress) if group.rank == 0 or spec.plan.min_workers else nullcontext()
        with orderly_interrupts(page) as interrupts, shows:
            try:
                group.work(spec)
            except LeftBehind:
                # The others go on.
                raise
            except BaseException as error:
                # This process may go on, and then the others cannot see its end.
                group.abort(error)
                if isinstance(error, PeerLost) and (part := spec.plan.part_of(error.rank)):
                    raise PeerLost(error.rank, error.host, error.cause, part) from error.__cause__
                raise
        if group.has_left:
            return LEFT
        # Now all have written their last events.
        group.agree("ended")
        progress(RunProgress.read(page))
        return interrupts.status(page)

    def close(self) -> None:
        self.group.close()


def _settle_interface(plan: Plan) -> None:
    """Lets devices connect to other hosts by the interface by which processes do, and says where they do not."""
    if not spans_hosts(plan) or exchanges_in_host_memory(plan) or device_kinds(plan) == (HOST,):
        return
    # Here, because processes of one host, and those on CPUs, need none of it.
    from headrace.engine.network.interfaces import settle_interface

    if said := settle_interface(kind_of(device_kinds(plan)[0]), own_address()):
        sys.stderr.write(f"headrace: {said}\n")


def join_group(timeout_s: float, encrypt: bool = True, relays: bool = False) -> LaunchedGroup:
    """Waits until all processes are there, or the others take this one back.

    After `timeout_s` without a sign of life a process counts as lost. With `relays`, processes of one host do as
    those of several: any of them may be lost, and started again.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix, deadline = f"headrace/{next(_groups)}", monotonic() + start_timeout_s()
    incarnation, passed_s = 0, 0.0
    if world > 1 and comes_back():
        wait = partial(threading.Event().wait, _BEAT_EVERY_S)
        incarnation, passed_s = come_back(launched_store(), prefix, rank, timeout_s + BACK_S, wait)
    hosts = gather(host_name()) if world > 1 else [host_name()]
    if hosts[rank] != host_name():
        raise UsageError(
            f"rank {rank} was on {hosts[rank]} and cannot come back on {host_name()}; start it where it was"
        )
    one = len(set(hosts)) == 1 and not relays
    page = ControlPage(_segment(rank, world, shared=world > 1 and one), world)
    # Whatever the store tells later: one that comes back must not train by itself from the begin.
    page.ranks[rank].restarts = incarnation
    page.ranks[rank].heartbeat.pid = os.getpid()
    me = (rank, incarnation)
    home = None if one else HostMap(tuple(hosts), own_address(), encrypt, timeout_s)
    relay = None if one else _relay(prefix, page, me)
    watch = LivenessWatch(page, me, hosts, timeout_s, deadline, relay)
    if home is None:
        host: ProcessGroup = _on_one_host(page, rank, watch)
    else:
        host = _on_several_hosts(Watch(page, watch.check, watch.accuse, timeout_s), me, home)
        host.store = partial(device_store, prefix)
    group = LaunchedGroup(me, hosts, host, page, prefix, watch, relay, passed_s)
    begun.set()
    show_alive()
    try:
        host.barrier()
    except BaseException:
        # A process whose heartbeat goes on counts as alive.
        group.close()
        raise
    return group


def device_store(prefix: str) -> Any:
    """Returns a store of torch.distributed in that of the launcher's processes; who takes it closes it."""
    # Here, because it imports torch.distributed, which CPUs do without.
    from headrace.collectives.accelerators.run_store import RunStore

    return RunStore(launched_store().clone(), f"{prefix}/devices/", start_timeout_s())


def _segment(rank: int, world: int, shared: bool) -> SharedSegment:
    """Returns the memory of the control page: this process's own, or rank 0's, which the others open."""
    own = SharedSegment.create(ControlPage.nbytes(world), "control") if rank == 0 or not shared else None
    if not shared:
        assert own
        return own
    offers = gather(json.dumps([os.getpid(), own.descriptor, own.nbytes] if own else []))
    return own or SharedSegment.open(*json.loads(offers[0]))


def _relay(prefix: str, page: ControlPage, me: Member) -> HeartbeatRelay:
    store, first = launched_store().clone(), iter([True])
    # Without its rank 0, a run's members tell each other their marks, and the store has old ones.
    follow = (lambda _: bool(next(first, False))) if STORE in os.environ else (lambda _: True)
    return HeartbeatRelay(store, prefix, page, *me, follow)


def _on_one_host(page: ControlPage, rank: int, watch: LivenessWatch) -> ProcessGroup:
    heartbeat = page.ranks[rank].heartbeat

    def beat() -> None:
        while not watch.over.wait(_BEAT_EVERY_S):
            heartbeat.count += 1

    threading.Thread(target=beat, name="headrace-beat", daemon=True).start()
    return SharedMemoryGroup(page, rank, watch.check)


def _on_several_hosts(watch: Watch, me: Member, home: HostMap) -> ProcessGroup:
    rank, incarnation = me
    if not incarnation:
        return MultiHostGroup(watch, rank, home, gather)
    # The others' connections are to its predecessor, and it needs none; but they have gathered their addresses.
    gather("")
    return MultiHostGroup(watch, 0, replace(home, hosts=(home.hosts[rank],)), lambda text: [text], [rank])
