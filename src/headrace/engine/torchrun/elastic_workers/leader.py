"""What the first member of a view does for all: it answers requests, and takes rank 0's place where that is lost.

rank 0   serves the store ✗
rank 1   first of the view:  a store of its own ─ leader.json ─ lets others come back ─ writes what is lost
rank 2   goes on; does the same when rank 1 is lost
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from headrace.collectives.views.hosts import HostViews
from headrace.engine.local.scaling import ListedWorker, ScaleRequests, changed_workers
from headrace.engine.schedulers.environment import LAUNCHER as LAUNCHER_VARIABLE
from headrace.engine.torchrun.elastic_workers.leader_file import STORE, TRAINS, forget_leader, tell_leader
from headrace.engine.torchrun.failover import LaunchedFailover, MemberStanding
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.engine.torchrun.key_value import StoreClient
from headrace.engine.torchrun.store_server import StoreServer
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import Notice
from headrace.transport.zeromq import any_port
from headrace.worker.events import write_for_launcher
from headrace.worker.run_spec import RunSpec

_LOOK_EVERY_S = 0.2
_TELL_EVERY_S = 1.0


@dataclass(frozen=True)
class StorePlace:
    """What a member needs to serve a store: the address of its host, the secret, what the first store held."""

    address: str
    secret: bytes
    values: Mapping[bytes, bytes]


class ViewLeader:
    """A thread of each worker, which acts while the worker is the first member of the view.

    Args:
        prefix: of the group's keys in the store.
        first_store: the address of rank 0's store.
        own: where this member listens for messages.
        relay: tells this member's marks to the others.

    Attributes:
        leads: whether this member has taken the place of rank 0, which was lost.
        store_address: of the store that it then serves; "" for none.
    """

    def __init__(
        self,
        spec: RunSpec,
        page: ControlPage,
        views: HostViews,
        prefix: str,
        first_store: str,
        own: str,
        relay: HeartbeatRelay | None,
        place: StorePlace | None,
    ) -> None:
        self.leads, self.store_address = False, ""
        self._spec, self._page, self._views, self._prefix = spec, page, views, prefix
        self._own, self._relay, self._place = own, relay, place
        self._first_store, self._beat = first_store, 0
        # Where Ray has started the workers, the process that follows them answers.
        answers = os.environ.get(LAUNCHER_VARIABLE) != "ray"
        self._requests = ScaleRequests(spec.run_dir, begins=views.me == (0, 0)) if answers else None
        self._asked: set[tuple[int, int]] = set()
        self._server: StoreServer | None = None
        self._following: HeartbeatRelay | None = None
        self._over = threading.Event()
        if place and views.me == (0, 0):
            # Before the first round: a process that is started again soon must know that the run goes on.
            tell_leader(spec.run_dir, first_store, 0)
        self._thread = threading.Thread(target=self._follow, name="headrace-leader", daemon=True)
        self._thread.start()

    def standing(self, rank: int) -> MemberStanding:
        """Returns what a rank's present process is to the members."""
        member, view = (rank, self._page.ranks[rank].restarts), self._views.view
        if member in view.members:
            return MemberStanding.MEMBER
        if member in view.left:
            return MemberStanding.LEFT
        return MemberStanding.LOST if member in self._views.seen else MemberStanding.UNKNOWN

    def close(self) -> None:
        """Ends the thread, and the store if this member serves one."""
        self._over.set()
        self._thread.join()
        if self._is_first() and self._views.in_order:
            forget_leader(self._spec.run_dir)
        if self._following:
            self._following.close()
        if self._server:
            self._server.close()

    def _is_first(self) -> bool:
        return self._views.view.members[0] == self._views.me

    def _follow(self) -> None:
        rank, told = self._views.me[0], monotonic()
        while not self._over.wait(_LOOK_EVERY_S):
            if not self._is_first() or self._views.view.number < 0:
                continue
            if not self.leads and self._views.me != (0, 0):
                self._succeed()
            address = self.store_address or self._first_store
            if self._place and monotonic() - told > _TELL_EVERY_S:
                told, self._beat = monotonic(), self._beat + 1
                tell_leader(self._spec.run_dir, address, rank, self._beat)
            if self._requests:
                self._requests.look(self._change, self._states)

    def _succeed(self) -> None:
        """Takes rank 0's place."""
        rank, does = self._views.me[0], "it shows the run"
        if self._place and self._relay:
            self._serve(self._place, self._relay)
            does += ", and lets others join"
        text = f"rank {rank} on {self._spec.plan.role(rank).host} leads from now on: {does}"
        write_for_launcher(self._spec, Notice, text)
        if self.store_address:
            tell_leader(self._spec.run_dir, self.store_address, rank)
        self.leads = True

    def _serve(self, place: StorePlace, relay: HeartbeatRelay) -> None:
        """Serves a store, from what the first one held, and decides about those that are lost or come back."""
        rank, incarnation = self._views.me
        self._server = StoreServer(any_port(place.address), place.secret, values=place.values)
        for member, now in self._views.seen:
            record = self._page.ranks[member]
            record.restarts = max(record.restarts, now)
        store = StoreClient(self._server.address, place.secret, self._spec.timeout_s)
        store.add(TRAINS, 1)
        store.set(f"{self._prefix}/leader", json.dumps([rank, incarnation, self._own]))
        relay.leads = True

        def follows(other: int) -> bool:
            # The members' marks come from themselves.
            return self.standing(other) != MemberStanding.MEMBER

        self._following = HeartbeatRelay(store, self._prefix, self._page, rank, incarnation, follows, serves=True)
        workers = set(range(self._spec.plan.workers)) - {rank}
        controller = LaunchedFailover(self._spec, self._page, self._following, self.standing, workers)
        self._following.decide_by(controller.look, often=False)
        self.store_address = self._server.address

    def _states(self) -> list[ListedWorker]:
        members, plan = dict(self._views.view.members), self._spec.plan
        found = []
        for rank in range(plan.workers):
            process = members.get(rank, self._page.ranks[rank].restarts)
            state = "trains" if rank in members else "is gone"
            leaves = rank in members and (rank, process) in self._asked
            found.append(ListedWorker(rank, plan.role(rank).host, process, "leaves" if leaves else state))
        return found

    def _change(self, count: int) -> str:
        """Asks workers to leave, or says how others join."""
        members = dict(self._views.view.members)
        stay = sorted(rank for rank, process in members.items() if (rank, process) not in self._asked)
        gone = [rank for rank in range(self._spec.plan.workers) if rank not in members]
        most = f"{self._spec.plan.workers}, as many as its launcher has started"
        ranks, text = changed_workers(count, stay, gone, self._spec.plan.min_workers, most)
        if count > 0:
            return "\n".join([_HOW_TO_JOIN, *map(self._command, ranks)])
        leaving = [(rank, members[rank]) for rank in ranks]
        self._asked.update(leaving)
        self._views.let_leave(leaving)
        return text

    def _command(self, rank: int) -> str:
        """Returns what to type to start a process of a rank; the secret is for the user to give."""
        variables = {
            "RANK": str(rank),
            "HEADRACE_HOST": self._spec.plan.role(rank).host,
            LAUNCHER_VARIABLE: "shell",
            **{name: os.environ[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
        }
        if self._server:
            variables[STORE] = self._server.address
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        return f"cd {shlex.quote(os.getcwd())} && {given} {shlex.join(sys.orig_argv)}"


_HOW_TO_JOIN = (
    "start each of these with the run's secret in its environment (HEADRACE_SECRET or HEADRACE_SECRET_FILE), on its "
    "host, or on any other one where that host is lost:"
)
