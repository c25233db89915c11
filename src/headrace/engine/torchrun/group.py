"""The processes that a launcher has started, as one of them sees them, which does its part with them."""

from __future__ import annotations

from collections.abc import Callable

from headrace.collectives.base import ProcessGroup
from headrace.collectives.elastic import ElasticGroup, elastic_on_page, first_members
from headrace.collectives.multi_host import MultiHostGroup
from headrace.collectives.views.group import ViewGroup
from headrace.collectives.views.hosts import HostViews
from headrace.engine.torchrun.elastic_workers.barrier import await_others, group_by_store
from headrace.engine.torchrun.elastic_workers.leader import ViewLeader
from headrace.engine.torchrun.elastic_workers.views import join_views
from headrace.engine.torchrun.failover import LaunchedFailover, MemberStanding, expendable_ranks
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.engine.torchrun.peers import LivenessWatch
from headrace.engine.torchrun.store import launched_store
from headrace.errors import LeftBehind, PeerLost, PeersApart
from headrace.policies.views import Member
from headrace.shared_memory.control_page import ControlPage
from headrace.worker.main import work
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import serve


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
