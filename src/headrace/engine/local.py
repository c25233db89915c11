"""Workers as processes of this host, watched until they have ended.

Importing this module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.engine.nursery import Nursery
from headrace.engine.order import Engine, Order, Progress
from headrace.engine.vitals import Vitals
from headrace.errors import PeerLost, UsageError, WorkerFailed
from headrace.spec.event import Failed, decode

if TYPE_CHECKING:
    from headrace.comm.control import ControlPage

__all__ = ["LocalEngine"]

_LOOK_EVERY_S = 0.05
_GRACE_S = 0.5
_KILL_S = 2.0
_LOG_CHARACTERS = 4000


class LocalEngine(Engine):
    """Forks the workers from a process that imports torch while the engine's owner does other things.

    Use as a context, or `close` it; several runs may follow each other on one engine.
    """

    def __init__(self) -> None:
        self._nursery = Nursery()
        self._busy = threading.Lock()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._nursery.close()

    def run(self, order: Order, progress: Callable[[Progress], None]) -> str:
        if not self._busy.acquire(blocking=False):
            raise UsageError("this engine runs something already; wait for its end, or give each run an engine")
        try:
            return self._run(order, progress)
        finally:
            self._busy.release()

    def _run(self, order: Order, progress: Callable[[Progress], None]) -> str:
        # Not before, because they import torch.
        from headrace.comm.control import ControlPage
        from headrace.comm.segment import Segment
        from headrace.engine.interrupts import orderly_interrupts

        ranks = len(order.plan.roles)
        segment = Segment.create(ControlPage.nbytes(ranks), "control")
        page = ControlPage(segment, ranks)
        watched_end, lifeline = os.pipe()
        try:
            with orderly_interrupts(page) as interrupts:
                self._spawn(order, segment.descriptor, watched_end)
                _Watch(order, page, self._nursery, progress).follow()
            return interrupts.status(page)
        finally:
            for descriptor in (watched_end, lifeline):
                os.close(descriptor)
            segment.close()

    def _spawn(self, order: Order, control: int, watched_end: int) -> None:
        from headrace.engine.process import log_path
        from headrace.engine.shipping import pack

        code, memory, length = pack(order)
        log_path(order.run_dir, 0).parent.mkdir(parents=True, exist_ok=True)
        pipes = []
        for role in order.plan.roles:
            read_end, write_end = os.pipe()
            message = {
                "ranks": len(order.plan.roles),
                "threads": role.threads,
                "directory": os.getcwd(),
                "path": sys.path,
                "log": str(log_path(order.run_dir, role.rank)),
                "data_bytes": length,
            }
            # The lock is not read there; it holds the run's directory until the last worker has ended.
            further = [descriptor for descriptor in (memory, order.attempt.lock) if descriptor >= 0]
            self._nursery.spawn(role.rank, message, [control, watched_end, read_end, *further])
            os.close(read_end)
            pipes.append(write_end)
        if memory >= 0:
            os.close(memory)
        for pipe in pipes:
            # One thread each: a worker that dies before it has read must not hold up the others.
            threading.Thread(target=_pour, args=(pipe, code), daemon=True).start()


class _Watch:
    """Follows the processes of one run.

    Args:
        order: the run.
        page: its signals.
        nursery: that started the processes.
        progress: told how far they are.
    """

    def __init__(self, order: Order, page: ControlPage, nursery: Nursery, progress: Callable[[Progress], None]) -> None:
        self._order = order
        self._page = page
        self._nursery = nursery
        self._progress = progress
        self._running = {role.rank for role in order.plan.roles}
        self._vitals: dict[int, Vitals] = {}

    def follow(self) -> None:
        """Returns when all have ended; raises for the first that failed."""
        try:
            while self._running:
                try:
                    self._look()
                except KeyboardInterrupt:
                    if self._page.stop:
                        raise
                    self._page.stop = 1
        finally:
            self._kill()

    def _look(self) -> None:
        ended = self._collect()
        failed = [rank for rank, code in ended.items() if code != 0 or not self._said_goodbye(rank)]
        if failed:
            self._fail(failed[0], ended)
        self._nursery.check(self._order.timeout_s)
        page = self._page
        examples = sum(beat[2] for beat in page.beats)
        self._progress(Progress(page.beats[0][1], page.losses[0][0], examples))
        for rank in self._running:
            self._check_frozen(rank)

    def _check_frozen(self, rank: int) -> None:
        beat = self._page.beats[rank]
        vitals = self._vitals.get(rank)
        if vitals is None or vitals.pid != beat[3]:
            # Until it has begun its id is 0, and then it must begin within the same time.
            vitals = self._vitals[rank] = Vitals(beat[3])
        silent_s = vitals.silent_s(beat[0])
        if silent_s > self._order.timeout_s:
            self._abort(rank)
            cause = f"gave no sign of life for {silent_s:.1f} s (stopped, or its disk hangs)"
            raise PeerLost(rank, self._host(rank), cause)

    def _fail(self, rank: int, codes: dict[int, int]) -> None:
        code = codes[rank]
        self._abort(rank)
        if code < 0:
            raise PeerLost(rank, self._host(rank), f"killed by signal {-code} ({signal.Signals(-code).name})")
        # Others may have failed at the same time, and it is the first one's error that explains.
        deadline = monotonic() + _GRACE_S
        while self._running and monotonic() < deadline:
            codes |= self._collect()
        failures = [failure for peer in codes for failure in self._failures(peer)]
        if failures:
            first = min(failures, key=lambda failure: failure.time_s)
            raise WorkerFailed(first.rank, self._host(first.rank), first.cause, first.traceback, first.exit_code)
        cause = f"exit code {code} without an error of its own (os._exit?); the end of its log follows"
        raise WorkerFailed(rank, self._host(rank), cause, self._end_of_log(rank))

    def _abort(self, rank: int) -> None:
        if not self._page.abort:
            self._page.abort = rank + 1

    def _kill(self) -> None:
        if not self._running or not self._nursery.is_alive():
            return
        self._nursery.kill(sorted(self._running))
        deadline = monotonic() + _KILL_S
        while self._running and monotonic() < deadline:
            self._collect()
        if self._running:
            # It does not answer, so it is ended itself, and the system ends what it has forked.
            self._nursery.close()

    def _collect(self) -> dict[int, int]:
        ended = dict(self._nursery.ended(_LOOK_EVERY_S))
        self._running.difference_update(ended)
        return ended

    def _failures(self, rank: int) -> list[Failed]:
        events = [decode(line) for line in self._lines(rank) if line.startswith('{"kind":"failed"')]
        return [event for event in events if isinstance(event, Failed) and event.time_s >= self._order.attempt.began_s]

    def _said_goodbye(self, rank: int) -> bool:
        """Whether a rank that ended without an error had done its work; os._exit(0) in user code has no error."""
        ends = ('{"kind":"worker_ended"', '{"kind":"server_ended"')
        return any(line.startswith(ends) for line in self._lines(rank)[-1:])

    def _end_of_log(self, rank: int) -> str:
        from headrace.engine.process import log_path

        return log_path(self._order.run_dir, rank).read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]

    def _lines(self, rank: int) -> list[str]:
        from headrace.engine.journal import events_path

        path = events_path(self._order.run_dir, rank)
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def _host(self, rank: int) -> str:
        return self._order.plan.roles[rank].host


def _pour(pipe: int, code: bytes) -> None:
    try:
        with os.fdopen(pipe, "wb") as stream:
            stream.write(code)
    except BrokenPipeError:
        pass  # the worker has died, which whoever watches it will see
