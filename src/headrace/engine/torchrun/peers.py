"""How one of a launcher's processes sees whether the others live: no monitor watches them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from time import monotonic
from typing import NoReturn

from headrace.collectives.watchdog.boards import missed
from headrace.engine.base import LivenessProbe
from headrace.engine.torchrun.address import start_timeout_s
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.errors import PeerLost, PeersApart, Replaced
from headrace.policies.views import Member
from headrace.shared_memory.control_page import ControlPage

_BROKEN_S = 2.0
"""How long a process may be silent when some connection has broken."""

_PARTED_S = 1.0
"""How long when that was a connection to it."""

_ON_THE_WAY_S = 0.75
"""How long what a process told before its end may take to come here."""

_LIVES = 2
"""Heartbeats after that by which a process lives."""

_LOOK_EVERY_S = 0.05


class LivenessWatch:
    """Looks at the heartbeats in the control page; after `timeout_s` without one a process counts as lost.

    `hosts` are by rank. `relay` brings the heartbeats of other hosts, None where all share the page. Processes that
    have not begun by `deadline`, on the monotonic clock, are lost.

    Attributes:
        expendable: ranks without which the run goes on.
        over: ends all waiting.
    """

    def __init__(
        self,
        page: ControlPage,
        me: Member,
        hosts: Sequence[str],
        timeout_s: float,
        deadline: float,
        relay: HeartbeatRelay | None,
    ) -> None:
        self.expendable: Collection[int] = ()
        self.over = threading.Event()
        self._page, (self._rank, self._incarnation) = page, me
        self._hosts, self._timeout_s, self._deadline, self._relay = hosts, timeout_s, deadline, relay
        self._probes: dict[int, LivenessProbe] = {}

    def check(self) -> None:
        """Raises where the run has failed, a process is lost, or another one has the place of this one."""
        self._look(self._timeout_s)

    def check_failed(self) -> None:
        """Raises where a process has said that the run has failed."""
        page = self._page
        if not page.abort:
            return
        rank = page.abort - 1
        if page.apart:
            said = "as the first of them has noticed"
            raise PeersApart(self._named(rank), self._named(page.apart - 1), said)
        raise PeerLost(rank, self._hosts[rank], "its part of the run has failed; its own output says why")

    def accuse(self, error: Exception, suspect: int) -> NoReturn:
        """Finds the rank that is lost after a connection between hosts has broken: the one without a heartbeat.

        Raises PeersApart where that is none: the heartbeats of the process at the other end go on.
        """
        heartbeat, began = self._page.ranks[suspect].heartbeat, monotonic()
        lives_at: int | None = None
        while monotonic() < began + self._timeout_s + _BROKEN_S:
            self._look(min(self._timeout_s, _BROKEN_S))
            silent_s = self._look_at(suspect)
            if silent_s > _PARTED_S:
                cause = f"its connection has broken, and it gave no sign of life for {silent_s:.1f} s"
                raise self._lost(suspect, cause)
            if lives_at is None and monotonic() > began + _ON_THE_WAY_S:
                lives_at = heartbeat.count + _LIVES
            if lives_at is not None and heartbeat.count >= lives_at:
                break
            self.over.wait(_LOOK_EVERY_S)
        raise PeersApart(self._named(self._rank), self._named(suspect), str(error)) from error

    def _named(self, rank: int) -> tuple[int, str]:
        return rank, self._hosts[rank]

    def _look(self, timeout_s: float) -> None:
        self.check_failed()
        self._check_relay(timeout_s)
        if self._page.ranks[self._rank].restarts > self._incarnation:
            raise Replaced(self._rank, self._page.ranks[self._rank].restarts)
        watched = set(range(len(self._hosts))).difference(self.expendable, (self._rank,))
        silent_s = {rank: self._look_at(rank) for rank in watched}
        rank = max(silent_s, key=lambda each: silent_s[each], default=self._rank)
        if silent_s.get(rank, 0.0) > timeout_s:
            raise self._lost(rank, f"gave no sign of life for {silent_s[rank]:.1f} s")

    def _check_relay(self, timeout_s: float) -> None:
        if not self._relay:
            return
        unheard_s = monotonic() - self._relay.told_s
        if self._relay.broken or unheard_s > timeout_s:
            self._relay.broken = self._relay.broken or f"no answer for {unheard_s:.1f} s"
            cause = (
                f"the launcher's store on its host cannot be reached by rank {self._rank} on "
                f"{self._hosts[self._rank]}: {self._relay.broken}; if that host lives, look for a firewall or a "
                "broken link between the two"
            )
            raise PeerLost(0, self._hosts[0], cause)

    def _lost(self, rank: int, cause: str) -> PeerLost:
        return PeerLost(rank, self._hosts[rank], cause + missed([each.board for each in self._page.ranks], rank))

    def _await_last_marks(self) -> None:
        """Blocks until this process has what a process that has just ended sent last, which may blame another one."""
        gone_s = monotonic()
        while self._relay and self._relay.asked_s < gone_s and not self.over.is_set():
            self._check_relay(self._timeout_s)
            self.over.wait(_LOOK_EVERY_S)
        self.check_failed()

    def _look_at(self, rank: int) -> float:
        """Returns for how long a rank has given no sign of life."""
        heartbeat = self._page.ranks[rank].heartbeat
        if heartbeat.pid == 0:
            if monotonic() > self._deadline:
                raise PeerLost(rank, self._hosts[rank], f"had not begun after {start_timeout_s():.0f} s")
            return 0.0
        here = self._hosts[rank] == self._hosts[self._rank]
        # Of a process on another host only the heartbeat is known.
        probe = self._probes.setdefault(rank, LivenessProbe(heartbeat.pid if here else 0))
        if here and probe.is_gone():
            self._await_last_marks()
            raise self._lost(rank, f"process {heartbeat.pid} has ended")
        if self._relay and rank in self._relay.severed - self._relay.left:
            # What it told last, which may blame another one, came before that.
            self.check_failed()
            raise self._lost(rank, f"process {heartbeat.pid} has ended, or its connection to the launcher's store has")
        unheard_s = monotonic() - self._relay.told_s if self._relay and not here else 0.0
        # While the store does not answer, the heartbeats of all others stop, too.
        return probe.silent_s(heartbeat.count) - (unheard_s if unheard_s <= self._timeout_s else 0.0)
