"""A group of workers of one host that share memory, and that may be lost, join and leave while it goes on.

    view 1: 0, 1, 2   ─ ■ ── ■ ──── ■ ✗ 1 is lost     view 2: 0, 2   ─ ■ ── ■ ─┐   view 3: 0, 2, 1
                     barriers of a page of the view │ all meet │               │ all meet │  1 has come back
                                                    └──────────┘               └──────────┘

In a view the members communicate as fixed ones do. When one is lost, each of the others has a `MemberLost` at the same
barrier. Then they meet in the control page, where the first of them decides who joins and who leaves, and make the next
view, on a page of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic, sleep

from headrace.collectives.elastic import elastic_on_page
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.collectives.views.group import Views
from headrace.errors import PeerLost, RunFailed, UnfitMachine
from headrace.machine.identity import host_name
from headrace.policies.views import Member, MemberView
from headrace.shared_memory.barrier import MemberLost
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks
from headrace.shared_memory.segment import SharedSegment

_LOOK_EVERY_S = 0.001
_CHANGES_EVERY_S = 0.02


class PageViews(Views):
    """One member's way from view to view, among processes that share a control page.

    Args:
        members: of the first view; this process alone, where it is to `join` a run that goes on.
        at_least: so many members a view needs between two rounds; the first waits for processes that join.
        start_timeout_s: how long it waits; then the run ends.
    """

    def __init__(
        self,
        page: ControlPage,
        place: int,
        members: Sequence[Member],
        check: Callable[[], None],
        at_least: int = 1,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        self._check = check
        self.ends = FinishedRanks([record.heartbeat for record in page.ranks])
        self._look_at = 0.0
        self._page = page
        self._place = place
        self._at_least = at_least
        self.me = (place, page.ranks[place].restarts)
        self._meeting = elastic_on_page(page, place, members, check)
        self._seen = {rank for rank, _ in members}
        self.view = MemberView(0, (self.me,))
        self._enter(SharedSegment.create(ControlPage.nbytes(1), "view"))
        if len(members) > 1:
            self.view = MemberView(0, tuple(members))
            self.renew()

    def join(self) -> None:
        self._page.ranks[self._place].membership.ready = self.me[1] + 1
        while not self._is_invited():
            self._check()
            sleep(_LOOK_EVERY_S)
        try:
            self._form()
        except MemberLost:
            self.renew()

    def announce(self, done: int) -> None:
        # Looked at rarely, because it is asked in every round.
        if monotonic() < self._look_at:
            return
        self._look_at = monotonic() + _CHANGES_EVERY_S
        if any(self._changes()):
            self._page.change_after = done

    def is_due(self, done: int) -> bool:
        return bool(self._page.change_after == done)

    def renew(self, admits: bool = False) -> None:
        while True:
            try:
                self._agree(admits)
                if not self.has_left:
                    self._form()
                return
            except MemberLost:
                continue

    def settle(self) -> None:
        self.view = replace(self.view, fresh=())
        # The launcher looks whether any process has the state.
        self._page.ranks[self._place].membership.publish(self.view.number, self.view.members, self.now.world)

    def is_gone(self, member: int) -> bool:
        incarnation = dict(self.view.members).get(member, -1)
        return self._page.ranks[member].restarts > incarnation

    def check(self) -> None:
        self._check()

    def _check_members(self) -> None:
        for rank, _ in self.view.members:
            if self.is_gone(rank):
                raise MemberLost(rank)
        self._check()

    def close(self) -> None:
        self.now.close()
        self._segment.close()

    def _changes(self) -> list[float]:
        """Returns for each rank of the run: 1 + the incarnation of its process that joins, -1 if it leaves, else 0."""
        present = dict(self.view.members)
        changes = [0.0] * len(self._page.ranks)
        for rank, record in enumerate(self._page.ranks):
            ready, incarnation = record.membership.ready, record.restarts
            if ready == incarnation + 1 and present.get(rank) != incarnation:
                changes[rank] = float(ready)
            elif rank in present and record.leave:
                changes[rank] = -1.0
        return changes

    def _decide(self, admits: bool) -> list[float]:
        """Lets the first member decide who joins and leaves; it waits until there are enough."""
        meeting = self._meeting
        changes = [0.0] * len(self._page.ranks)
        give_up = monotonic() + self._start_timeout_s
        while admits and meeting.rank == 0:
            changes = self._changes()
            if meeting.world + sum(change > 0 for change in changes) >= self._at_least:
                break
            if monotonic() > give_up:
                raise self._too_few(changes)
            self._check()
            sleep(_LOOK_EVERY_S)
        return meeting.sum(changes)

    def _too_few(self, changes: list[float]) -> RunFailed:
        come = sorted({*self._meeting.members, *(rank for rank, change in enumerate(changes) if change > 0)})
        missing = sorted(self._seen - set(come))
        return RunFailed(
            f"min_workers={self._at_least}, and {len(come)} worker{'s have' if len(come) > 1 else ' has'} come within "
            f"{self._start_timeout_s:g} s: rank "
            f"{', '.join(map(str, come))}; missing: rank {', '.join(map(str, missing))}. What these print says why; "
            "HEADRACE_START_TIMEOUT_S waits longer"
        )

    def _agree(self, admits: bool) -> None:
        """Lets all members who live agree on the next view."""
        changes = self._meeting.together(lambda: self._decide(admits))
        live = set(self._meeting.members)
        before = self.view
        stay = [member for member in before.members if member[0] in live and changes[member[0]] == 0]
        joining = [(rank, int(change) - 1) for rank, change in enumerate(changes) if change > 0]
        fresh = tuple([member for member in stay if member in before.fresh] + joining)
        able = [member for member in stay if member not in fresh]
        self.has_left = changes[self._place] < 0
        if not able:
            raise PeerLost(before.members[0][0], host_name(), "it was the last that had the trained state")
        self.view = MemberView(before.number + 1, (*able, *fresh), fresh=fresh)
        self._seen.update(rank for rank, _ in self.view.members)
        # Each tells it, because any of them may be lost before those that join have read it.
        self._page.ranks[self._place].membership.publish(self.view.number, self.view.members, len(able))
        if not self.has_left:
            self._meeting.regroup(self.view.members, self.view.number)

    def _is_invited(self) -> bool:
        """Takes the newest view that another has told, if this process is in it; returns whether it is."""
        number, members, able = max(record.membership.read() for record in self._page.ranks)
        if self.me not in members:
            return False
        self.view = MemberView(number, tuple(members), fresh=tuple(members[able:]))
        # It may leave later, and does not wait to join then.
        self._page.ranks[self._place].membership.ready = 0
        self._meeting.regroup(members, number)
        return True

    def _form(self) -> None:
        """Makes the view's page, which its first member creates."""
        first, meeting = self.view.members[0][0], self._meeting
        offer, nbytes = self._page.ranks[first].segment_offer, ControlPage.nbytes(len(self.view.members))
        segment, problem = None, None
        if first == self._place:
            segment = SharedSegment.create(nbytes, "view")
            offer.publish(os.getpid(), segment.descriptor, nbytes)
        meeting.barrier()
        try:
            segment = segment or offer.open()
        except UnfitMachine as error:
            problem = error
        # A member that has told that it has come may be lost before the others have opened its memory.
        (failed,) = meeting.sum([float(problem is not None)])
        if segment is None or failed:
            raise self.explain(problem or UnfitMachine("a member could not open the page of the view"))
        self.close()
        self._enter(segment)

    def _enter(self, segment: SharedSegment) -> None:
        members, ranks = self.view.members, [rank for rank, _ in self.view.members]
        self._segment = segment
        self.now = SharedMemoryGroup(
            ControlPage(segment, len(members)),
            ranks.index(self._place),
            self.check,
            self.ends.among(ranks),
            lambda peer: self._page.ranks[members[peer][0]].restarts > members[peer][1],
        )
