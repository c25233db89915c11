"""This process is one worker among those that somebody else has started: torchrun, SLURM, MPI, `headrace launch`.

They say who it is in the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

from headrace.comm.control import ControlPage
from headrace.comm.elastic import Elastic
from headrace.comm.segment import Segment
from headrace.comm.shared_memory import SharedMemory
from headrace.engine.interrupts import orderly_interrupts
from headrace.engine.machine import cores
from headrace.engine.order import Engine, Order, Progress
from headrace.engine.server import serve
from headrace.engine.vitals import Vitals
from headrace.engine.work import work
from headrace.errors import InfeasiblePlan, PeerLost, UsageError
from headrace.policies.threads import threads_per_worker

__all__ = ["Group", "LaunchedEngine", "launched_ranks"]

_MEET_S = 120.0
_BEAT_EVERY_S = 0.25

_groups = itertools.count()
"""A process may meet the same others again; every time needs words of its own in the store."""


def launched_ranks() -> int | None:
    """Returns how many processes the launcher has started, None if there is no launcher.

    Raises:
        UsageError: it says so in part only.
    """
    given = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    if len(given) < 4:
        missing = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - set(given)
        raise UsageError(f"the launcher set {', '.join(given)} but not {', '.join(sorted(missing))}")
    return int(os.environ["WORLD_SIZE"])


class Group:
    """The processes of one launcher on one host, with shared memory between them.

    Args:
        timeout_s: after this time without a sign of life a process counts as lost.

    Attributes:
        rank, world: as the launcher says.
        page: the group's signals.
        host: its collective.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._timeout_s = timeout_s
        self._hosts = [socket.gethostname()] * self.world
        self._vitals: dict[int, Vitals] = {}
        self._store: Any = None
        self._words = f"headrace/{next(_groups)}"
        self._agreed = 0
        self._deadline = monotonic() + _MEET_S
        if self.world == 1:
            self._segment = Segment.create(ControlPage.nbytes(1), "control")
        else:
            self._segment = self._meet()
        self.page = ControlPage(self._segment, self.world)
        self._over = threading.Event()
        self._start_beating()
        self.host = SharedMemory(self.page, self.rank, self._check)
        self.host.barrier()

    def work(self, order: Order) -> None:
        """Does this rank's part of a run."""
        plan = order.plan
        if plan.roles[self.rank].kind == "server":
            serve(order, self.rank, self.page, self._check)
        elif not plan.servers:
            work(order, self.rank, self.host, self.page)
        else:
            members = [(worker, 0) for worker in range(plan.workers)]
            work(order, self.rank, Elastic(self.page, self.rank, members, self._check), self.page)

    def close(self) -> None:
        """Leaves the group."""
        self._over.set()
        self.host.close()
        self._segment.close()

    def agree(self, text: str) -> str:
        """Returns rank 0's text, on every rank."""
        if self._store is None:
            return text
        self._agreed += 1
        key = f"{self._words}/agreed/{self._agreed}"
        if self.rank == 0:
            self._store.set(key, text)
        agreed: str = self._store.get(key).decode()
        # The store lives with rank 0, which must not end before the others have read.
        self.host.barrier()
        return agreed

    def _meet(self) -> Segment:
        """Rank 0 makes the page and says where; the others open it."""
        store, _ = _store(self.rank, self.world)
        store.set(f"{self._words}/host/{self.rank}", socket.gethostname())
        self._hosts = [store.get(f"{self._words}/host/{rank}").decode() for rank in range(self.world)]
        if len(set(self._hosts)) > 1:
            raise InfeasiblePlan(
                f"the launcher's {self.world} processes are on {len(set(self._hosts))} hosts "
                f"({', '.join(sorted(set(self._hosts)))}) and this strategy works on one"
            )
        if self.rank == 0:
            segment = Segment.create(ControlPage.nbytes(self.world), "control")
            store.set(f"{self._words}/page", json.dumps([os.getpid(), segment.descriptor, segment.nbytes]))
        else:
            segment = Segment.open(*json.loads(store.get(f"{self._words}/page")))
        self._store = store
        return segment

    def _start_beating(self) -> None:
        beat = self.page.beats[self.rank]
        beat[3] = os.getpid()

        def follow() -> None:
            while not self._over.wait(_BEAT_EVERY_S):
                beat[0] += 1

        threading.Thread(target=follow, name="headrace-beat", daemon=True).start()

    def _check(self) -> None:
        """Looks at the others, because nobody watches them for us."""
        if self.page.abort:
            rank = self.page.abort - 1
            raise PeerLost(rank, self._hosts[rank], "its part of the run has failed; its own output says why")
        for rank, beat in enumerate(self.page.beats):
            if rank == self.rank:
                continue
            if beat[3] == 0:
                if monotonic() > self._deadline:
                    raise PeerLost(rank, self._hosts[rank], f"had not begun after {_MEET_S:.0f} s")
                continue
            vitals = self._vitals.setdefault(rank, Vitals(beat[3]))
            if vitals.is_gone():
                raise PeerLost(rank, self._hosts[rank], f"process {beat[3]} has ended")
            silent_s = vitals.silent_s(beat[0])
            if silent_s > self._timeout_s:
                raise PeerLost(rank, self._hosts[rank], f"gave no sign of life for {silent_s:.1f} s")


@functools.cache
def _store(rank: int, world: int) -> tuple[Any, Any]:
    # Here, because a process without a launcher need not import it.
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_MEET_S)
    kept = None
    listener = _listener() if rank == 0 else None
    if listener is not None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Of several masters in a process, those that follow join the first.
        kept = TCPStore(
            host,
            port,
            None,
            True,
            timeout,
            False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    return store, kept


def _listener() -> socket.socket | None:
    """Returns a socket that listens where the launcher has said and nowhere else: torch's own listens everywhere."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None  # torchrun's agent holds the store
    try:
        family, _, _, _, address = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError:
        return None  # this process holds the port already, or has the address by another name: torch finds out


class LaunchedEngine(Engine):
    """Runs one worker, in this process.

    Args:
        timeout_s: after this time without a sign of life a process counts as lost.

    Attributes:
        rank: as the launcher says.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = Group(timeout_s)
        self.rank = self._group.rank

    def agree(self, text: str) -> str:
        """Returns rank 0's text, on every rank."""
        return self._group.agree(text)

    def run(self, order: Order, progress: Callable[[Progress], None]) -> str:
        group = self._group
        torch.set_num_threads(threads_per_worker(cores(), group.world))
        page = group.page
        with orderly_interrupts(page) as interrupts:
            try:
                group.work(order)
            except BaseException as error:
                # This process may live on, so that the others could not see it in its end.
                page.abort = page.abort or 1 + (error.rank if isinstance(error, PeerLost) else group.rank)
                raise
        progress(Progress(page.beats[group.rank][1], page.losses[group.rank][0], page.beats[group.rank][2]))
        return interrupts.status(page)

    def close(self) -> None:
        self._group.close()
