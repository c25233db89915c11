"""Whether a process reaches another one from which nothing comes, though its signs of life come by rank 0.

A process that computes for long answers no message, and the kernel of its host still answers a connection. Where that
does not answer either, and the heartbeat of the process goes on, the two live and do not reach each other:

    rank 1 ── ╳ ── rank 2        rank 1 asks the host of rank 2: no answer
         └─ rank 0 ─┘            rank 0 tells rank 1 the heartbeat of rank 2: it grows
"""

from __future__ import annotations

import errno
import math
import select
import socket
from time import monotonic
from urllib.parse import urlsplit

from headrace.parameter_server.replication.failover import nearest, process_number
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.plan import Plan

_ANSWER_S = 1.3
"""A first packet that is lost is sent again after a second."""

_BEFORE_S = 1.5
"""How long before a run's timeout the first question is asked, so that the error comes in time."""

_LEAST_S, _FAILED_AGAIN_S, _AGAIN_S = 0.5, 0.1, 1.0
_LIVES = 2
"""Heartbeats since the first question by which a process lives."""


class _Question:
    """A connection to "tcp://host:port" that is being made; nothing is sent over it, and nothing blocks."""

    def __init__(self, address: str) -> None:
        place = urlsplit(address)
        host = str(place.hostname)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._asked = monotonic()
        self._error = self._socket.connect_ex((host, place.port or 0))

    def answered(self) -> bool | None:
        """Returns whether the host has answered, also by refusing; None while it may still do so."""
        if self._error == errno.EINPROGRESS:
            # Not select, which is limited to 1,024 descriptors.
            answer = select.poll()
            answer.register(self._socket, select.POLLOUT)
            if not answer.poll(0):
                return None if monotonic() - self._asked < _ANSWER_S else False
            self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return self._error in (0, errno.ECONNREFUSED)

    def close(self) -> None:
        self._socket.close()


class LinkProbe:
    """Asks the host of one rank's process while nothing comes from it, from shortly before `timeout_s` on."""

    def __init__(self, page: ControlPage, timeout_s: float) -> None:
        self._page = page
        self._first_s = max(_LEAST_S, timeout_s - _BEFORE_S)
        self._again = -math.inf
        self._question: _Question | None = None
        self._since: tuple[int, int] | None = None

    def is_cut(self, rank: int, address: str, silent_s: float) -> bool:
        """Returns whether the process at a rank lives and cannot be reached; an address on this host always can."""
        if silent_s < self._first_s or monotonic() < self._again or not address.startswith("tcp://"):
            return False
        process, heartbeat = process_number(self._page, rank), self._page.ranks[rank].heartbeat
        if self._since is None or self._since[0] != process:
            self.close()
            self._since = process, heartbeat.count
        self._question = self._question or _Question(address)
        answered = self._question.answered()
        if answered is None:
            return False
        self.close()
        if answered:
            self._since, self._again = None, monotonic() + _AGAIN_S
            return False
        self._again = monotonic() + _FAILED_AGAIN_S
        return heartbeat.count >= self._since[1] + _LIVES

    def close(self) -> None:
        """Ends the question that is open."""
        if self._question:
            self._question.close()
            self._question = None


class PeerWatch:
    """Notices, in a server or its backup at a rank, that the two do not reach each other; `process` is this one."""

    def __init__(self, page: ControlPage, plan: Plan, server: int, process: int, timeout_s: float) -> None:
        self._page, self._plan, self._server, self._process = page, plan, server, process
        self._timeout_s = timeout_s
        self._probe = LinkProbe(page, timeout_s)
        self._seen = (0, -1)
        self._since = monotonic()
        self._is_cut = False

    def is_cut(self, heard: int) -> bool:
        """Returns whether it is so; `heard` counts what has come from the other one."""
        epoch, primary, backup = self._page.ranks[self._server].server_view.read()
        other = backup if self._process == primary else primary
        if self._seen != (heard, epoch):
            self._seen, self._since, self._is_cut = (heard, epoch), monotonic(), False
            self._probe.close()
            self._probe = LinkProbe(self._page, self._timeout_s)
        if not epoch or backup < 0 or self._process not in (primary, backup):
            return False
        rank, local = (process % len(self._page.ranks) for process in (other, self._process))
        address = nearest(self._page.ranks[rank].address.read(), self._plan, rank, local)
        if address and not self._is_cut:
            self._is_cut = self._probe.is_cut(rank, address, monotonic() - self._since)
        return self._is_cut
