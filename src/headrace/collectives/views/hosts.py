"""A group of workers of several hosts that may be lost, cut off and join while the others go on.

    view 1: 0, 1, 2   ─ step ─ hold ─ commit ─ step ✗ 1 is lost    agree ─ view 2: 0, 2 ─ step again ─ hold ─ commit
                        collectives of the view    │ MemberLost    of two halves at most one goes on

Between hosts some members may have passed a barrier that others have not. So what all do together ends with `commit`,
which either all have done or none, whatever is lost in between: see `policies/membership.py`. A round that all approve
needs no barrier for that: the members `vote` with the sum in which they would tell each other that all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from headrace.collectives.base import HostMap
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.collectives.views.group import Views
from headrace.collectives.views.membership import MembershipThread
from headrace.errors import PeerLost, UnfitMachine
from headrace.policies.views import Member, MemberView
from headrace.shared_memory.barrier import MemberLost
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks


class HostViews(Views):
    """One member's way from view to view, among processes that a launcher has started.

    Args:
        view: the first one; one of this process alone, where it is to `join` a run that goes on.
        home: returns the hosts of some ranks, in order.
        at_least: with fewer members the run ends.

    Attributes:
        seen: all that have been members.
        let_leave: asks members to leave the others between two rounds.
        in_order: whether this process needs the others no more, and ends.
    """

    now: MultiHostGroup
    votes = True

    def __init__(
        self,
        membership: MembershipThread,
        page: ControlPage,
        me: Member,
        view: MemberView,
        home: Callable[[Sequence[int]], HostMap],
        at_least: int,
        timeout_s: float,
    ) -> None:
        self.ends = FinishedRanks([record.heartbeat for record in page.ranks])
        self._membership = membership
        self._page = page
        self.me = me
        self._home = home
        self._at_least = at_least
        self._timeout_s = timeout_s
        self.view = view
        self.seen = set(view.members)
        self._joins = bool(me[1])
        self._voted = False
        self.let_leave = membership.ask_to_leave
        self.in_order = False
        if self._joins:
            self._form(lambda text: [text])
        else:
            try:
                self._form(self._tell)
            except MemberLost:
                self.renew()

    def join(self) -> None:
        self._joins = False
        self.view = MemberView(-1, (self.me,))
        self.renew()

    def announce(self, done: int) -> None:
        """Nothing is said before a round: who asks to join is taken in between two."""

    def is_due(self, done: int) -> bool:
        if self.view.members[0] == self.me:
            self._membership.take_in()
        return self._membership.is_to_leave or self._is_changing()

    def renew(self, admits: bool = False) -> None:
        leaves = admits and self._membership.is_to_leave
        # Where it admits, the members may have changed already while they did something together.
        if admits and not leaves and not self._is_changing():
            return
        while True:
            before = self.view
            self.view = self._membership.next_view(before.number, leaves)
            # A new set, because another thread may read the old one.
            self.seen = self.seen | set(self.view.members)
            if self.me in self.view.left:
                self.has_left = True
                return
            if len(self.view.members) < self._at_least:
                self._end(before)
            try:
                self.now.abandoned = True
                self.now.close()
                self._form(self._tell)
                return
            except MemberLost:
                continue
            except UnfitMachine as problem:
                lost = self.explain(problem)
                if not isinstance(lost, MemberLost):
                    raise

    def commit(self, approves: bool | None = None) -> bool:
        if approves is not None:
            self._voted = self._vote(approves)
            return self._voted
        if self._joins or self._voted:
            self._voted = False
            return True
        number = self.view.number
        step = self._membership.hold(number)
        try:
            self.now.barrier()
            passed = True
        except MemberLost:
            # The others may know that all hold it.
            passed = False
        if not self._membership.commit(number, step, passed):
            raise MemberLost(self.view.members[0][0])
        return True

    def _vote(self, approves: bool) -> bool:
        number, step = self.view.number, -1
        if approves:
            # What the others must know of this member is then that it approves, and nothing else.
            step = self._membership.hold(number, silently=True)
        try:
            (against,) = self.now.sum([float(not approves)])
            passed = not against
        except MemberLost:
            if not approves:
                raise
            against, passed = 0.0, False
        if against and not approves:
            return False
        done = self._membership.commit(number, step, passed, refused=bool(against))
        if done is False:
            raise MemberLost(self.view.members[0][0])
        return bool(done)

    def settle(self) -> None:
        if self.me in self.view.fresh:
            self._membership.receive_state()
        self.view = replace(self.view, fresh=())

    def is_gone(self, member: int) -> bool:
        incarnation = dict(self.view.members).get(member, -1)
        return incarnation < 0 or (member, incarnation) in self._membership.suspects | self._membership.closed

    def check(self) -> None:
        self._membership.check()

    def _check_members(self) -> None:
        # Also where the members are about to change.
        if not self._joins:
            self._membership.check(self.view.number)

    def _is_changing(self) -> bool:
        try:
            self._check_members()
        except MemberLost:
            return True
        return False

    def close(self, after: Member | None = None) -> None:
        """Releases memory and connections; where `after` is given, when that member has done so or is lost."""
        # First, because a connection that ends before looks like a loss.
        self._membership.close(self.in_order, after)
        self.now.abandoned = not self.in_order
        self.now.close()

    def _form(self, tell: Callable[[str], Sequence[str]]) -> None:
        ranks = [rank for rank, _ in self.view.members]
        watch = Watch(self._page, self._check_members, self._accuse, self._timeout_s)
        own = self.view.members.index(self.me)
        self.now = MultiHostGroup(watch, own, self._home(ranks), tell, ranks, self.ends.among(ranks))

    def _tell(self, text: str) -> list[str]:
        return self._membership.tell(self.view.number, text)

    def _accuse(self, error: Exception, suspect: int) -> NoReturn:
        incarnation = dict(self.view.members)[suspect]
        self._membership.suspect((suspect, incarnation))
        raise MemberLost(suspect)

    def _end(self, before: MemberView) -> NoReturn:
        left = len(self.view.members)
        lost = [rank for rank, _ in before.members if rank not in dict(self.view.members)]
        host = self._home(lost[:1]).hosts[0] if lost else ""
        cause = f"{left} of the workers {'is' if left == 1 else 'are'} left, and min_workers={self._at_least}"
        raise PeerLost(lost[0] if lost else self.me[0], host, cause)
