"""The processes that a launcher has started: how each finds the others, sees whether they live, and does its part."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import NoReturn

from headrace.collectives.base import HostMap, ProcessGroup
from headrace.collectives.elastic import ElasticGroup, elastic_on_page
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.collectives.views.group import ViewGroup
from headrace.collectives.views.hosts import HostViews
from headrace.engine.base import LivenessProbe
from headrace.engine.schedulers.alive import show_alive
from headrace.engine.torchrun.address import own_address, start_timeout_s
from headrace.engine.torchrun.elastic_workers.barrier import await_others, group_by_store, member_name
from headrace.engine.torchrun.elastic_workers.leader import ViewLeader
from headrace.engine.torchrun.elastic_workers.leader_file import STORE
from headrace.engine.torchrun.elastic_workers.returning import admit, come_back
from headrace.engine.torchrun.elastic_workers.views import join_views
from headrace.engine.torchrun.failover import BACK_S, LaunchedFailover, MemberStanding, expendable_ranks
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.engine.torchrun.refusal import begun
from headrace.engine.torchrun.store import comes_back, gather, launched_store
from headrace.errors import LeftBehind, PeerLost, PeersApart, Replaced, UsageError
from headrace.machine.identity import host_name
from headrace.policies.views import Member
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment
from headrace.worker.main import work
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import serve

_BEAT_EVERY_S = 0.25
_BROKEN_S = 2.0
"""How long a process may be silent when some connection has broken."""

_PARTED_S = 1.0
"""How long when that was a connection to it."""

_ON_THE_WAY_S = 0.75
"""How long what a process told before its end may take to come here."""

_LIVES = 2
"""Heartbeats after that by which a process lives."""

_LOOK_EVERY_S = 0.05

_groups = itertools.count()
"""The same processes may form several groups; each has keys of its own in the store."""


class LaunchedGroup:
    """The processes of one launcher: with shared memory between those of one host, else with collectives over TCP.

    The control page is shared by all; where there are several hosts, each process has one with copies of the others'
    marks. After `timeout_s` without a sign of life a process counts as lost. With `relays`, processes of one host do as
    those of several: any of them may be lost, and started again.

    Attributes:
        views: of workers that go on when others are lost, while they train; None for others.
        view_leader: acts for them where this one is the first.
    """

    def __init__(self, timeout_s: float, encrypt: bool = True, relays: bool = False) -> None:
        self._encrypt = encrypt
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._timeout_s = timeout_s
        self._prefix = f"headrace/{next(_groups)}"
        self._agreed = 0
        self._probes: dict[int, LivenessProbe] = {}
        self._over = threading.Event()
        self._relay: HeartbeatRelay | None = None
        self._expendable: frozenset[int] = frozenset()
        self._elastic: ElasticGroup | None = None
        self._remaining: list[Member] | None = None
        self.view_leader: ViewLeader | None = None
        self.views: HostViews | None = None
        self.has_left = False
        self._deadline = monotonic() + start_timeout_s()
        self.incarnation, self.passed_s = self._come_back() if self.world > 1 and comes_back() else (0, 0.0)
        self.hosts = gather(host_name()) if self.world > 1 else [host_name()]
        if self.hosts[self.rank] != host_name():
            raise UsageError(
                f"rank {self.rank} was on {self.hosts[self.rank]} and cannot come back on {host_name()}; start it "
                "where it was"
            )
        one = len(set(self.hosts)) == 1 and not relays
        alone = self.world == 1 or not one
        self._segment = SharedSegment.create(ControlPage.nbytes(self.world), "control") if alone else self._meet()
        self.page = ControlPage(self._segment, self.world)
        # Whatever the store tells later: one that comes back must not train by itself from the begin.
        self.page.ranks[self.rank].restarts = self.incarnation
        self.page.ranks[self.rank].heartbeat.pid = os.getpid()
        self.host = self._together() if one else self._apart()
        begun.set()
        show_alive()
        try:
            self.host.barrier()
        except BaseException:
            # A process whose heartbeat goes on counts as alive.
            self.close()
            raise

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
        if self._relay:
            self._expendable = expendable_ranks(plan)
        if self._expendable:
            self._decide(spec)
        workers: ProcessGroup = self.host
        if plan.replaces and computes:
            # One that comes back is alone until the next synchronization.
            own = [(self.rank, self.incarnation)]
            members = own if self.incarnation else [(worker, 0) for worker in range(plan.workers)]
            workers = self._elastic = (
                group_by_store(
                    launched_store(), self._prefix, self.page, self.rank, self.hosts[0], members, self._check
                )
                if self._relay
                else elastic_on_page(self.page, self.rank, members, self._check)
            )
        elif plan.workers < len(plan.roles) and not plan.replaces and not self.incarnation:
            # Only processes of the same kind synchronize with each other.
            workers = self.host.subgroup([role.rank for role in plan.roles if role.computes == computes])
        if computes:
            work(spec, self.rank, workers, self.page)
        else:
            moved, home = plan.role(self.rank).host != self.hosts[self.rank], self.host.home
            serve(spec, self.rank, self.page, self._check, home.address if home else "", moved)
            # It waits for workers whose loops have ended, and which come a little later.
            self.page.ranks[self.rank].heartbeat.finished = 1

    def _decide(
        self, spec: RunSpec, standing: Callable[[int], MemberStanding] = lambda _: MemberStanding.UNKNOWN
    ) -> None:
        """Begins to decide on rank 0 which processes are lost, where there are several hosts."""
        if self._relay and (self.rank, self.incarnation) == (0, 0):
            controller = LaunchedFailover(
                spec, self.page, self._relay, self._exclude, partial(self._admit, spec), standing
            )
            # Elastic workers notice by themselves that another one is lost.
            self._relay.decide_by(controller.look, often=spec.plan.min_workers == 0)

    def _work_in_views(self, spec: RunSpec) -> None:
        """Does this worker's part of a run that goes on without lost ones; notes which are left."""
        self._expendable, me = expendable_ranks(spec.plan), (self.rank, self.incarnation)
        views, self.view_leader = join_views(
            spec, me, self._prefix, self.hosts, self.page, self._relay, self._encrypt, self._check_failed
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

    def _check_failed(self) -> None:
        if self.page.abort:
            rank = self.page.abort - 1
            if self.page.apart:
                said = "as the first of them has noticed"
                raise PeersApart(self._named(rank), self._named(self.page.apart - 1), said)
            raise PeerLost(rank, self.hosts[rank], "its part of the run has failed; its own output says why")

    def _come_back(self) -> tuple[int, float]:
        within_s, wait = self._timeout_s + BACK_S, partial(self._over.wait, _BEAT_EVERY_S)
        return come_back(launched_store(), self._prefix, self.rank, within_s, wait)

    def _admit(self, spec: RunSpec, rank: int, incarnation: int) -> bool:
        assert self._relay
        return admit(launched_store(), self._prefix, rank, incarnation, monotonic() - spec.started)

    def _exclude(self, rank: int, incarnation: int) -> None:
        assert self._relay
        self._relay.store.lose(member_name(self._prefix, rank, incarnation))

    def close(self) -> None:
        """Leaves the group."""
        self._over.set()
        self._close_views()
        if self._relay:
            self._relay.close()
        if self._elastic:
            self._elastic.close()
        if self.page.abort and isinstance(self.host, MultiHostGroup):
            self.host.abandoned = True
        self.host.close()
        self._segment.close()

    def abort(self, error: BaseException) -> None:
        """Lets the run end, because of this process or of one that is lost, or that it does not reach."""
        if self.page.abort:
            return
        if isinstance(error, PeersApart):
            self.page.apart = 1 + error.rank
        self.page.abort = 1 + (error.rank if isinstance(error, PeerLost) else self.rank)

    def agree(self, text: str) -> str:
        """Returns rank 0's text; its own if rank 0 was lost and the run went on, when the rank that leads is done."""
        ranks = range(self.world) if self._remaining is None else [rank for rank, _ in self._remaining]
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
            await_others(launched_store(), key, self.rank, awaited, self._is_gone, self._check)
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
        told = self.host.sum([float(opinion and rank == self.rank) for rank in range(self.world)])
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

    def _meet(self) -> SharedSegment:
        """Rank 0 makes the page; the others open it."""
        own = SharedSegment.create(ControlPage.nbytes(self.world), "control") if self.rank == 0 else None
        places = gather(json.dumps([os.getpid(), own.descriptor, own.nbytes] if own else []))
        return own or SharedSegment.open(*json.loads(places[0]))

    def _together(self) -> ProcessGroup:
        heartbeat = self.page.ranks[self.rank].heartbeat

        def follow() -> None:
            while not self._over.wait(_BEAT_EVERY_S):
                heartbeat.count += 1

        threading.Thread(target=follow, name="headrace-beat", daemon=True).start()
        return SharedMemoryGroup(self.page, self.rank, self._check)

    def _apart(self) -> ProcessGroup:
        address = own_address()
        store, first = launched_store().clone(), iter([True])
        # Without its rank 0, a run's members tell each other their marks, and the store has old ones.
        follow = (lambda _: bool(next(first, False))) if STORE in os.environ else (lambda _: True)
        self._relay = HeartbeatRelay(store, self._prefix, self.page, self.rank, self.incarnation, follow)
        watch = Watch(self.page, self._check, self._accuse, self._timeout_s)
        if self.incarnation:
            # The others' connections are to its predecessor, and it needs none; but they have gathered their addresses.
            gather("")
            home = HostMap((self.hosts[self.rank],), address, self._encrypt, self._timeout_s)
            return MultiHostGroup(watch, 0, home, lambda text: [text], [self.rank])
        home = HostMap(tuple(self.hosts), address, self._encrypt, self._timeout_s)
        return MultiHostGroup(watch, self.rank, home, gather)

    def _check(self) -> None:
        """Checks the other ranks' heartbeats, because no monitor watches them."""
        self._look(self._timeout_s)

    def _accuse(self, error: Exception, suspect: int) -> NoReturn:
        """Finds the rank that is lost after a connection between hosts has broken: the one without a heartbeat.

        Raises PeersApart where that is none: the heartbeats of the process at the other end go on.
        """
        heartbeat, began = self.page.ranks[suspect].heartbeat, monotonic()
        lives_at: int | None = None
        while monotonic() < began + self._timeout_s + _BROKEN_S:
            self._look(min(self._timeout_s, _BROKEN_S))
            silent_s = self._look_at(suspect)
            if silent_s > _PARTED_S:
                cause = f"its connection has broken, and it gave no sign of life for {silent_s:.1f} s"
                raise PeerLost(suspect, self.hosts[suspect], cause)
            if lives_at is None and monotonic() > began + _ON_THE_WAY_S:
                lives_at = heartbeat.count + _LIVES
            if lives_at is not None and heartbeat.count >= lives_at:
                break
            self._over.wait(_LOOK_EVERY_S)
        raise PeersApart(self._named(self.rank), self._named(suspect), str(error)) from error

    def _named(self, rank: int) -> tuple[int, str]:
        return rank, self.hosts[rank]

    def _look(self, timeout_s: float) -> None:
        self._check_failed()
        self._check_relay(timeout_s)
        if self.page.ranks[self.rank].restarts > self.incarnation:
            raise Replaced(self.rank, self.page.ranks[self.rank].restarts)
        watched = set(range(self.world)).difference(self._expendable, (self.rank,))
        silent_s = {rank: self._look_at(rank) for rank in watched}
        rank = max(silent_s, key=lambda each: silent_s[each], default=self.rank)
        if silent_s.get(rank, 0.0) > timeout_s:
            raise PeerLost(rank, self.hosts[rank], f"gave no sign of life for {silent_s[rank]:.1f} s")

    def _check_relay(self, timeout_s: float) -> None:
        if not self._relay:
            return
        unheard_s = monotonic() - self._relay.told_s
        if self._relay.broken or unheard_s > timeout_s:
            self._relay.broken = self._relay.broken or f"no answer for {unheard_s:.1f} s"
            cause = (
                f"the launcher's store on its host cannot be reached by rank {self.rank} on "
                f"{self.hosts[self.rank]}: {self._relay.broken}; if that host lives, look for a firewall or a "
                "broken link between the two"
            )
            raise PeerLost(0, self.hosts[0], cause)

    def _await_last_marks(self) -> None:
        """Blocks until this process has what a process that has just ended sent last, which may blame another one."""
        gone_s = monotonic()
        while self._relay and self._relay.asked_s < gone_s and not self._over.is_set():
            self._check_relay(self._timeout_s)
            self._over.wait(_LOOK_EVERY_S)
        self._check_failed()

    def _look_at(self, rank: int) -> float:
        """Returns for how long a rank has given no sign of life."""
        heartbeat = self.page.ranks[rank].heartbeat
        if heartbeat.pid == 0:
            if monotonic() > self._deadline:
                raise PeerLost(rank, self.hosts[rank], f"had not begun after {start_timeout_s():.0f} s")
            return 0.0
        here = self.hosts[rank] == self.hosts[self.rank]
        # Of a process on another host only the heartbeat is known.
        probe = self._probes.setdefault(rank, LivenessProbe(heartbeat.pid if here else 0))
        if here and probe.is_gone():
            self._await_last_marks()
            raise PeerLost(rank, self.hosts[rank], f"process {heartbeat.pid} has ended")
        unheard_s = monotonic() - self._relay.told_s if self._relay and not here else 0.0
        # While the store does not answer, the heartbeats of all others stop, too.
        return probe.silent_s(heartbeat.count) - (unheard_s if unheard_s <= self._timeout_s else 0.0)
