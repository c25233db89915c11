"""The processes that a launcher has started: how each finds the others and does its part."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic

from headrace.collectives.base import HostMap, ProcessGroup
from headrace.collectives.elastic import ElasticGroup, elastic_on_page, first_members
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.collectives.views.group import ViewGroup
from headrace.collectives.views.hosts import HostViews
from headrace.engine.schedulers.alive import show_alive
from headrace.engine.torchrun.address import own_address, start_timeout_s
from headrace.engine.torchrun.elastic_workers.barrier import await_others, group_by_store
from headrace.engine.torchrun.elastic_workers.leader import ViewLeader
from headrace.engine.torchrun.elastic_workers.leader_file import STORE
from headrace.engine.torchrun.elastic_workers.returning import come_back
from headrace.engine.torchrun.elastic_workers.views import join_views
from headrace.engine.torchrun.failover import BACK_S, LaunchedFailover, MemberStanding, expendable_ranks
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.engine.torchrun.peers import LivenessWatch
from headrace.engine.torchrun.refusal import begun
from headrace.engine.torchrun.store import comes_back, gather, launched_store
from headrace.errors import LeftBehind, PeerLost, PeersApart, UsageError
from headrace.machine.identity import host_name
from headrace.policies.views import Member
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment
from headrace.worker.main import work
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import serve

_BEAT_EVERY_S = 0.25

_groups = itertools.count()
"""The same processes may form several groups; each has keys of its own in the store."""


class LaunchedGroup:
    """The processes of one launcher: with shared memory between those of one host, else with collectives over TCP.

    The control page is shared by all; where there are several hosts, each process has one with copies of the others'
    marks, which its `relay` brings.

    Attributes:
        host: all processes, or of several hosts the same by collectives over TCP.
        hosts: by rank.
        incarnation: which of its rank's processes this one is.
        passed_s: the run's age when this process came back to it.
        views: of workers that go on when others are lost, while they train; None for others.
        view_leader: acts for them where this one is the first.
    """

    def __init__(
        self,
        me: Member,
        hosts: list[str],
        host: ProcessGroup,
        page: ControlPage,
        prefix: str,
        watch: LivenessWatch,
        relay: HeartbeatRelay | None,
        passed_s: float,
    ) -> None:
        self.rank, self.incarnation = me
        self.hosts, self.host, self.page, self.passed_s = hosts, host, page, passed_s
        self.has_left = False
        self.views: HostViews | None = None
        self.view_leader: ViewLeader | None = None
        # Of the group's keys in the store.
        self._prefix = prefix
        self._watch, self._relay = watch, relay
        self._agreed = 0
        self._elastic: ElasticGroup | None = None
        self._remaining: list[Member] | None = None

    @classmethod
    def join(cls, timeout_s: float, encrypt: bool = True, relays: bool = False) -> LaunchedGroup:
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
        group = cls(me, hosts, host, page, prefix, watch, relay, passed_s)
        begun.set()
        show_alive()
        try:
            host.barrier()
        except BaseException:
            # A process whose heartbeat goes on counts as alive.
            group.close()
            raise
        return group

    @property
    def leads(self) -> bool:
        """Whether this rank has taken the place of rank 0, which was lost."""
        if self._remaining is None:
            return self.view_leader is not None and self.view_leader.leads
        # Also where rank 0 was lost at the very end.
        return self._remaining[0] == (self.rank, self.incarnation) != (0, 0)

    @property
    def mates(self) -> int:
        """Number of processes on this host."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def leader(self) -> int:
        """The first rank of this host."""
        return self.hosts.index(self.hosts[self.rank])

    def work(self, spec: RunSpec) -> None:
        """Does this rank's part of a run."""
        plan, computes = spec.plan, spec.plan.roles[self.rank].computes
        if plan.min_workers:
            self._work_in_views(spec)
            return
        if self._relay and (expendable := expendable_ranks(plan)):
            self._watch.expendable = expendable
            self._decide(spec)
        workers: ProcessGroup = self.host
        if plan.replaces and computes:
            members, check = first_members((self.rank, self.incarnation), plan.workers), self._watch.check
            workers = self._elastic = (
                group_by_store(launched_store(), self._prefix, self.page, self.rank, self.hosts[0], members, check)
                if self._relay
                else elastic_on_page(self.page, self.rank, members, check)
            )
        elif plan.workers < len(plan.roles) and not plan.replaces and not self.incarnation:
            # Only processes of the same kind synchronize with each other.
            workers = self.host.subgroup([role.rank for role in plan.roles if role.computes == computes])
        if computes:
            work(spec, self.rank, workers, self.page)
        else:
            moved, home = plan.role(self.rank).host != self.hosts[self.rank], self.host.home
            serve(spec, self.rank, self.page, self._watch.check, home.address if home else "", moved)
            # It waits for workers whose loops have ended, and which come a little later.
            self.page.ranks[self.rank].heartbeat.finished = 1

    def _decide(
        self, spec: RunSpec, standing: Callable[[int], MemberStanding] = lambda _: MemberStanding.UNKNOWN
    ) -> None:
        """Begins to decide on rank 0 which processes are lost, where there are several hosts."""
        if self._relay and (self.rank, self.incarnation) == (0, 0):
            controller = LaunchedFailover(spec, self.page, self._relay, standing)
            # Elastic workers notice by themselves that another one is lost.
            self._relay.decide_by(controller.look, often=spec.plan.min_workers == 0)

    def _work_in_views(self, spec: RunSpec) -> None:
        """Does this worker's part of a run that goes on without lost ones; notes which are left."""
        self._watch.expendable, me = expendable_ranks(spec.plan), (self.rank, self.incarnation)
        encrypt, check_run = self.host.home is None or self.host.home.encrypt, self._watch.check_failed
        views, self.view_leader = join_views(
            spec, me, self._prefix, self.hosts, self.page, self._relay, encrypt, check_run
        )
        self.views = views
        self._decide(spec, self.view_leader.standing)
        try:
            work(spec, self.rank, ViewGroup(views), self.page)
            views.in_order, self.has_left = True, views.has_left
        except LeftBehind:
            raise
        except BaseException as error:
            # Before the others take the end of this process for a loss.
            self.abort(error)
            raise
        finally:
            self._remaining = list(views.view.members)
            self.view_leader.close()
            if not views.in_order:
                self._close_views()

    def _close_views(self, after: Member | None = None) -> None:
        if self.views:
            self.views.close(after)
            self.views = None

    def close(self) -> None:
        """Leaves the group."""
        self._watch.over.set()
        self._close_views()
        if self._relay:
            self._relay.close()
        if self._elastic:
            self._elastic.close()
        if self.page.abort and isinstance(self.host, MultiHostGroup):
            self.host.abandoned = True
        self.host.close()
        self.page.segment.close()

    def abort(self, error: BaseException) -> None:
        """Lets the run end, because of this process or of one that is lost, or that it does not reach."""
        if self.page.abort:
            return
        if isinstance(error, PeersApart):
            self.page.apart = 1 + error.rank
        self.page.abort = 1 + (error.rank if isinstance(error, PeerLost) else self.rank)

    def agree(self, text: str) -> str:
        """Returns rank 0's text; its own if rank 0 was lost and the run went on, when the rank that leads is done."""
        ranks = range(len(self.hosts)) if self._remaining is None else [rank for rank, _ in self._remaining]
        if self._remaining is not None and (0, 0) not in self._remaining:
            if self._remaining[0] != (self.rank, self.incarnation):
                # That one closes when it has written the run's last event.
                self._close_views(after=self._remaining[0])
            return text
        if len(ranks) == 1:
            return text
        self._agreed += 1
        agreed = self._say(f"agreed/{self._agreed}", text, 0)
        # The store ends with rank 0, which must not end before the others have read.
        if self._relay is None and self._remaining is None:
            self.host.barrier()
        else:
            awaited = ranks if (self.rank, self.incarnation) == (0, 0) else ()
            key = f"{self._prefix}/read/{self._agreed}"
            await_others(launched_store(), key, self.rank, awaited, self._is_gone, self._watch.check)
        return agreed

    def _is_gone(self, rank: int) -> bool:
        record = self.page.ranks[rank]
        has_left = self._relay is not None and rank in self._relay.left
        lost = record.restarts > 0 and not record.heartbeat.pid
        return lost or has_left or (self.views is not None and self.views.is_gone(rank))

    def agree_on_host(self, text: str) -> str:
        """Returns the text of this host's first rank, on every rank of the host; each calls it once."""
        return self._say(f"at-home/{self.leader}", text, self.leader)

    def ranks_where(self, opinion: bool) -> list[int]:
        """Returns the ranks whose opinion is true; one that comes back is not asked, and gets none."""
        if self.incarnation:
            return []
        told = self.host.sum([float(opinion and rank == self.rank) for rank in range(len(self.hosts))])
        return [rank for rank, number in enumerate(told) if number]

    def _say(self, what: str, text: str, speaker: int) -> str:
        store, key = launched_store(), f"{self._prefix}/{what}"
        if self.rank == speaker and not self.incarnation:
            store.set(key, text)
        try:
            told: str = store.get(key).decode()
        except (ConnectionError, TimeoutError) as error:
            raise PeerLost(speaker, self.hosts[speaker], f"it has not answered: {error}") from error
        return told


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
