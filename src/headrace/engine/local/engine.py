"""Workers as processes of this host, watched until they have ended.

Importing this module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.engine.base import Engine, RunProgress
from headrace.engine.local.fork_server import ForkServer, fork_fork_server, start_fork_server
from headrace.engine.local.monitor import Monitor
from headrace.engine.signals import orderly_interrupts
from headrace.errors import HeadraceError, UsageError
from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    # For the type alone: it imports torch.
    from headrace.spec.plan import Role

_SPARE = 16
"""So many workers may join a run."""


class LocalEngine(Engine):
    """Forks the workers from a process that imports torch while the engine's owner does other things.

    Use as a context, or `close` it; several runs may follow each other on one engine.

    Args:
        forks: whether that process is a fork of this one, which has done nothing yet, and imports torch for both.
    """

    def __init__(self, forks: bool = False) -> None:
        self._inherited = _inherited()
        self._fork_server = ForkServer(fork_fork_server if forks else start_fork_server)
        self._closed = False
        self._busy = threading.Lock()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self._fork_server.close()

    def is_current(self) -> bool:
        """Tells whether the fork server lives, and a new one would inherit the same from this process."""
        return self._fork_server.is_alive() and self._inherited == _inherited()

    def run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        if not self._busy.acquire(blocking=False):
            raise UsageError("this engine runs something already; wait for its end, or give each run an engine")
        try:
            return self._run(order, progress)
        finally:
            self._busy.release()

    def _run(self, order: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        # Not before, because they import torch.
        from headrace.shared_memory.control_page import ControlPage
        from headrace.shared_memory.segment import SharedSegment

        if not self._closed and not self._fork_server.is_alive():
            # It ended in an earlier run, whose caller was told.
            self._fork_server.close()
            self._fork_server = ForkServer()
        ranks = len(order.plan.roles) + (_SPARE if order.plan.elastic else 0)
        segment = SharedSegment.create(ControlPage.nbytes(ranks), "control")
        page = ControlPage(segment, ranks)
        watched_end, lifeline = os.pipe()
        try:
            with (
                orderly_interrupts(page) as interrupts,
                closing(ProcessLauncher(order, self._fork_server, segment.descriptor, ranks, watched_end)) as launcher,
            ):
                for role in order.plan.roles:
                    launcher.start(role)
                Monitor(order, page, self._fork_server, launcher.start, progress).follow()
            return interrupts.status(page)
        finally:
            for descriptor in (watched_end, lifeline):
                os.close(descriptor)
            segment.close()


_idle: list[LocalEngine] = []
"""The engine that this process keeps between two calls of `fit`: at most one, and none while it is in use."""

_idle_lock = threading.Lock()


@contextmanager
def kept_engine() -> Iterator[LocalEngine]:
    """Lends the engine that this process keeps until its end, because a new one imports torch for two seconds.

    Where the kept one is in use by another thread, has ended, or was started with another environment, it is a new one.
    """
    with _idle_lock:
        engine = _idle.pop() if _idle else None
    if engine and not engine.is_current():
        engine.close()
        engine = None
    engine = engine or LocalEngine()
    try:
        yield engine
    except HeadraceError:
        _keep(engine)
        raise
    except BaseException:
        # Its workers may be in any state.
        engine.close()
        raise
    _keep(engine)


def close_kept_engine() -> None:
    """Ends the fork server that this process keeps, if it keeps one."""
    with _idle_lock:
        engines = _idle[:]
        _idle.clear()
    for engine in engines:
        engine.close()


atexit.register(close_kept_engine)


def _keep(engine: LocalEngine) -> None:
    with _idle_lock:
        full = bool(_idle)
        if not full:
            _idle.append(engine)
    if full:
        engine.close()


def _inherited() -> tuple[dict[str, str], set[int]]:
    """Returns what a fork server has from this process for good; folder and module path go with each worker."""
    return dict(os.environ), os.sched_getaffinity(0)


class ProcessLauncher:
    """Starts the processes of one run, and others in the place of those that were lost."""

    def __init__(self, order: RunSpec, fork_server: ForkServer, control: int, ranks: int, lifeline: int) -> None:
        # Not before, because they import torch.
        from headrace.engine.local.process import log_path
        from headrace.engine.shipping import pack

        self._order = order
        self._log_path = log_path
        self._fork_server = fork_server
        self._descriptors = [control, lifeline]
        self._ranks = ranks
        self._code, self._memory, self._length = pack(order)
        log_path(order.run_dir, 0).parent.mkdir(parents=True, exist_ok=True)

    def start(self, role: Role) -> None:
        """Starts a process; the control page says how many there were in its place before."""
        read_end, write_end = os.pipe()
        message = {
            "ranks": self._ranks,
            "threads": role.threads,
            "directory": os.getcwd(),
            "path": sys.path,
            "log": str(self._log_path(self._order.run_dir, role.rank)),
            "data_bytes": self._length,
        }
        # The worker does not read the lock; the run's directory stays locked until the last worker has ended.
        further = [descriptor for descriptor in (self._memory, self._order.attempt.lock) if descriptor >= 0]
        try:
            self._fork_server.spawn(role.rank, message, [*self._descriptors, read_end, *further])
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        # A thread for each process: a worker that dies before it has read must not hold up the others.
        threading.Thread(target=_send, args=(write_end, self._code), daemon=True).start()

    def close(self) -> None:
        """Closes the memory that new processes would be given."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _send(pipe: int, code: bytes) -> None:
    # Where the pipe is broken the worker has died, which the monitor sees.
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as stream:
        stream.write(code)
