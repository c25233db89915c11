"""Workers as processes of this host, watched until they have ended.

Importing this module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from types import TracebackType

from headrace.engine.base import Engine, RunProgress
from headrace.engine.local.fork_server import ForkServer
from headrace.engine.local.fork_server_start import fork_fork_server, start_fork_server
from headrace.engine.local.launcher import ProcessLauncher
from headrace.engine.local.monitor import Monitor
from headrace.errors import UsageError
from headrace.worker.run_spec import RunSpec

_SPARE = 16
"""So many workers may join a run."""


class LocalEngine(Engine):
    """Forks the workers from a process that imports torch while the engine's owner does other things.

    Use as a context, or `close` it; several runs may follow each other on one engine.

    Args:
        forks: whether that process is a fork of this one, which has done nothing yet, and imports torch for both.
    """

    def __init__(self, forks: bool = False) -> None:
        self._nursery = ForkServer(fork_fork_server if forks else start_fork_server)
        self._busy = threading.Lock()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._nursery.close()

    def run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        if not self._busy.acquire(blocking=False):
            raise UsageError("this engine runs something already; wait for its end, or give each run an engine")
        try:
            return self._run(order, progress)
        finally:
            self._busy.release()

    def _run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        # Not before, because they import torch.
        from headrace.engine.interrupts import orderly_interrupts
        from headrace.shared_memory.control_page import ControlPage
        from headrace.shared_memory.segment import SharedSegment

        if self._nursery.is_lost():
            # It went down with an earlier run, which has been told.
            self._nursery.close()
            self._nursery = ForkServer()
        seats = len(order.plan.roles) + (_SPARE if order.strategy.elastic else 0)
        segment = SharedSegment.create(ControlPage.nbytes(seats), "control")
        page = ControlPage(segment, seats)
        watched_end, lifeline = os.pipe()
        try:
            with (
                orderly_interrupts(page) as interrupts,
                closing(ProcessLauncher(order, self._nursery, segment.descriptor, seats, watched_end)) as crew,
            ):
                for role in order.plan.roles:
                    crew.start(role)
                Monitor(order, page, self._nursery, crew, progress).follow()
            return interrupts.status(page)
        finally:
            for descriptor in (watched_end, lifeline):
                os.close(descriptor)
            segment.close()
