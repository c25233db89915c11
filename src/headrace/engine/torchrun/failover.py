"""Decides, on rank 0, which servers of a launcher's processes are lost, where these are on several hosts."""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from urllib.parse import urlsplit

from headrace.engine.base import LivenessProbe
from headrace.errors import PeerLost
from headrace.parameter_server.replication.failover import FailoverController, replaceable_ranks
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import LAUNCHER, Lost, Notice
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import RunSpec

_PROBE_S = 0.2


class LaunchedFailover:
    """Promotes backups of lost servers; nothing replaces the processes that are lost.

    A process that was killed refuses connections, which is tried as soon as another process suspects it. One whose host
    is cut off gives no sign of life for the run's `timeout_s`.
    """

    def __init__(self, spec: RunSpec, page: ControlPage) -> None:
        self._spec, self._page = spec, page
        self._controller = FailoverController(spec.plan, page)
        self._watched = {rank: LivenessProbe(0) for rank in replaceable_ranks(spec.plan)}
        self._suspicions = [0] * len(page.ranks)
        for rank in self._watched:
            self._controller.up(rank)

    def look(self) -> None:
        """Decides by what the page tells; sets its `abort` where the run cannot go on."""
        page = self._page
        if any(page.ranks[rank].heartbeat.finished for rank in range(self._spec.plan.workers)):
            # Servers end after the workers.
            return
        self._controller.look()
        suspects = self._take_suspects()
        for rank, probe in list(self._watched.items()):
            silent_s = probe.silent_s(page.ranks[rank].heartbeat.count)
            if page.ranks[rank].heartbeat.pid == 0:
                continue
            if silent_s > self._spec.timeout_s:
                self._lose(rank, f"gave no sign of life for {silent_s:.1f} s")
            elif rank in suspects and _refuses(page.ranks[rank].address.read()):
                self._lose(rank, "its process has ended")

    def _take_suspects(self) -> set[int]:
        """Returns the ranks that others suspect since the last call."""
        suspicions = [record.suspicion for record in self._page.ranks]
        known, self._suspicions = self._suspicions, [each.count for each in suspicions]
        return {each.rank for each, before in zip(suspicions, known, strict=True) if each.count > before}

    def _lose(self, rank: int, cause: str) -> None:
        del self._watched[rank]
        record = self._page.ranks[rank]
        with closing(EventWriter(self._spec.run_dir, LAUNCHER, self._spec.started)) as events:
            try:
                self._controller.down(rank, cause)
            except PeerLost as error:
                # The page has room for the rank alone.
                events.write(Notice(LAUNCHER, events.now(), str(error)))
                self._page.abort = self._page.abort or rank + 1
                return
            record.restarts += 1
            events.write(Lost(LAUNCHER, events.now(), rank, record.restarts - 1, cause, replaced=False))


def _refuses(address: str) -> bool:
    """Returns whether no process listens at a server's address, on a host that answers."""
    place = urlsplit(address.split()[-1])
    with suppress(TimeoutError, OSError):
        try:
            socket.create_connection((str(place.hostname), place.port or 0), _PROBE_S).close()
        except ConnectionRefusedError:
            return True
    return False
