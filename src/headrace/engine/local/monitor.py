"""Watches the processes of one run for its launcher: which have ended, which are frozen, which are replaced.

    is killed ───────► the run ends                      a server without a backup, a worker in lockstep, a rank that
                  │                                      holds a part of a replica
                  ├──► it is replaced                    a worker that leases its data, or that may be one of
                  │                                      max_workers
                  ├──► the others go on                  workers in lockstep of which min_workers are left
                  └──► its backup continues              a server that has one, and gets a new one
    raises an error ─► the run ends                      because its code would raise it again

Importing this module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from headrace.engine.base import LivenessProbe, RunProgress
from headrace.engine.local.fork_server import NOT_STARTED, ForkServer, describe_end, unsaid
from headrace.engine.local.scaling import ListedWorker, ScaleRequests, changed_workers
from headrace.errors import PeerLost, UnfitMachine, UsageError, WorkerFailed
from headrace.machine import disk
from headrace.machine.disk import disk_fails, is_full, unless
from headrace.machine.limits import explained, too_many_threads
from headrace.spec.events import ENDS_EARLY, LAUNCHER, BackupReady, Failed, Lost, Notice, decode
from headrace.spec.plan import outlives_workers
from headrace.worker.run_spec import RunSpec, events_path, last_line, lines_of_kind, log_path

if TYPE_CHECKING:
    # For the types alone: they import torch.
    from headrace.shared_memory.control_page import ControlPage
    from headrace.spec.plan import Role

_GRACE_S = 0.5
_KILL_S = 2.0
_LOOK_EVERY_S = 0.05
_LOG_CHARACTERS = 4000

_IN_VAIN = 5
"""How often in a row a process may be lost before it has done anything."""


@dataclass
class _Replaceable:
    """The rank of a process without which the run continues.

    Attributes:
        examples: that the rank had done when its last process was started.
        in_vain: processes in a row that have done none; of servers, that did not become ready as backups.
        cause: why the monitor kills its process; "" while it does not.
    """

    examples: int = 0
    in_vain: int = 0
    cause: str = ""


class Monitor:
    """Follows the processes of one run, and has `start` start the replacements of lost ones."""

    def __init__(
        self,
        spec: RunSpec,
        page: ControlPage,
        fork_server: ForkServer,
        start: Callable[[Role], None],
        progress: Callable[[RunProgress], None],
    ) -> None:
        # Not before, because they import torch.
        from headrace.parameter_server.replication.failover import FailoverController
        from headrace.worker.events import EventWriter

        self._spec = spec
        self._page = page
        self._fork_server = fork_server
        self._start = start
        self._progress = progress
        self._events = EventWriter(spec.run_dir, LAUNCHER, spec.started)
        self._running = {role.rank for role in spec.plan.roles}
        self._probes: dict[int, LivenessProbe] = {}
        self._failover = FailoverController(spec.plan, page)
        self._left = set(self._failover.servers)
        self._ended_at = math.inf
        # Only workers without which the others go on: these do what was not done.
        self._workers = set(range(spec.plan.workers) if outlives_workers(spec.plan) else ())
        self._replaces_workers = spec.plan.replaces or spec.plan.max_workers > 0
        self._scale_requests = ScaleRequests(spec.run_dir)
        ranks = (role.rank for role in spec.plan.roles)
        self._replaceable = {rank: _Replaceable() for rank in ranks if rank in self._workers or rank in self._failover}

    def follow(self) -> None:
        """Returns when all have ended; raises for the first that failed."""
        for rank in filter(self._failover.__contains__, self._replaceable):
            self._failover.up(rank)
        try:
            while self._running:
                try:
                    self._look()
                except KeyboardInterrupt:
                    if self._page.stop:
                        raise
                    self._page.stop = 1
            if self._page.stopped_by:
                text = f"{ENDS_EARLY}SIGTERM came to rank {self._page.stopped_by - 1}"
                self._events.write(Notice(LAUNCHER, self._events.now(), text))
        finally:
            self._kill()
            self._events.close()

    def _look(self) -> None:
        ended = self._collect()
        if NOT_STARTED in ended.values():
            raise too_many_threads()
        for rank, code in ended.items():
            if rank not in self._workers and code == 0:
                self._note_end(rank)
            elif self._is_over() and not self._left:
                self._ended_at = min(self._ended_at, monotonic())
            if rank in self._replaceable and self._is_late(rank):
                # Others that still wait for it at a synchronization learn that it is gone.
                self._page.ranks[rank].restarts += 1
                continue
            if code < 0 and rank in self._replaceable:
                self._lose(rank, self._replaceable[rank].cause or self._end_of(rank, code))
            elif code != 0 or not self._is_complete(rank):
                self._fail(rank, ended)
        self._fork_server.check(self._spec.timeout_s)
        self._progress(RunProgress.read(self._page))
        for rank, unguarded_s in self._failover.look().items():
            self._replaceable[rank].in_vain = 0
            self._events.write(BackupReady(LAUNCHER, self._events.now(), rank, unguarded_s))
        for rank in self._running:
            self._check_frozen(rank)
        self._scale_requests.look(self._change_workers, self._states)
        self._end_late()

    def _check_frozen(self, rank: int) -> None:
        heartbeat = self._page.ranks[rank].heartbeat
        probe = self._probes.get(rank)
        if probe is None or probe.pid != heartbeat.pid:
            # Until it has started its id is 0, and it must start within the same time.
            probe = self._probes[rank] = LivenessProbe(heartbeat.pid)
        silent_s = probe.silent_s(heartbeat.count)
        if silent_s <= self._spec.timeout_s:
            return
        cause = f"gave no sign of life for {silent_s:.1f} s (stopped, or its disk hangs)"
        if rank in self._replaceable:
            # It must not wake up when it has been replaced.
            self._replaceable[rank].cause = cause
            self._fork_server.kill([rank])
            return
        raise self._lost(rank, cause)

    def _lose(self, rank: int, cause: str) -> None:
        """Tells the others that a process is gone for good, and starts its replacement."""
        record, place = self._page.ranks[rank], self._replaceable[rank]
        # Also when all is done except that the servers must be told.
        if rank in self._failover and self._failover.server_of(rank) in self._left:
            try:
                self._failover.down(rank, cause)
            except PeerLost:
                self._abort(rank)
                raise
        examples = record.heartbeat.examples
        place.in_vain = 0 if examples > place.examples else place.in_vain + 1
        place.examples, place.cause = examples, ""
        # First, because the others read it.
        record.restarts += 1
        record.heartbeat.pid = 0
        record.address.clear()
        record.last_event.clear()
        record.membership.number = 0
        replaced = not self._is_over() and not record.leave and (self._replaces_workers or rank in self._failover)
        self._events.write(Lost(LAUNCHER, self._events.now(), rank, record.restarts - 1, cause, replaced))
        if place.in_vain == _IN_VAIN:
            raise self._lost(rank, f"{cause}, the {_IN_VAIN}th time in a row before it did anything")
        if self._spec.plan.min_workers and not self._has_state():
            raise self._lost(
                rank, f"{cause}, the last that had the trained state; resume=True goes on from a checkpoint"
            )
        if replaced:
            self._running.add(rank)
            self._start(self._spec.plan.role(rank))
            if rank in self._failover:
                self._failover.up(rank)
            return
        left, least = len(self._running.intersection(self._workers)), self._spec.plan.min_workers
        if left < least and not self._is_over():
            are = "is" if left == 1 else "are"
            raise self._lost(rank, f"{cause}; {left} of the workers {are} left, and min_workers={least}")
        if not left:
            raise self._lost(rank, f"{cause}, the last of the workers")

    def _has_state(self) -> bool:
        """Whether a worker lives that was there from the begin, or has taken the state from another one."""
        records = [self._page.ranks[rank] for rank in self._running & self._workers]
        return any(record.restarts == 0 or record.membership.number for record in records)

    def _change_workers(self, count: int) -> str:
        """Starts so many workers, or below 0 lets some leave; returns what happened, or raises UsageError."""
        records = self._page.ranks
        if not self._spec.plan.elastic or self._is_over():
            what = "comes to its end" if self._is_over() else f"is of {self._spec.plan.strategy} as it was asked for"
            raise UsageError(
                f"no workers can join or leave: this run {what}; they can where no worker waits for another, as under "
                "parameter_server without a bound, or downpour, and with min_workers"
            )
        there = sorted(rank for rank in self._workers & self._running if not records[rank].leave)
        taken = {role.rank for role in self._spec.plan.roles} - self._workers
        free = [rank for rank in range(len(records)) if rank not in taken and rank not in self._running]
        ranks, text = changed_workers(count, there, free, self._spec.plan.min_workers, str(len(records) - len(taken)))
        for rank in ranks:
            if count > 0:
                self._add(rank)
            else:
                records[rank].leave = 1
        self._events.write(Notice(LAUNCHER, self._events.now(), text))
        return text

    def _states(self) -> list[ListedWorker]:
        found = []
        for rank in sorted(self._workers):
            record = self._page.ranks[rank]
            state = "leaves" if record.leave else "trains" if record.heartbeat.pid else "begins"
            state = state if rank in self._running else "is gone"
            found.append(ListedWorker(rank, self._spec.plan.role(rank).host, record.restarts, state))
        return found

    def _add(self, rank: int) -> None:
        record = self._page.ranks[rank]
        # Not the first process of a rank, because those start together.
        record.restarts += 1
        record.leave = record.heartbeat.pid = 0
        self._replaceable[rank] = _Replaceable(examples=record.heartbeat.examples)
        self._workers.add(rank)
        self._running.add(rank)
        self._start(self._spec.plan.role(rank))

    def _is_over(self) -> bool:
        """Whether a worker's loop has ended: then the last barrier is over, and no other worker is needed."""
        return any(self._page.ranks[rank].heartbeat.finished for rank in self._workers)

    def _is_late(self, rank: int) -> bool:
        """Whether a process is not needed for the rest of the run."""
        if rank in self._workers:
            # Each worker that has started with the run takes part in its end.
            record = self._page.ranks[rank]
            return self._is_over() and not record.heartbeat.finished and record.restarts > 0
        return not self._running.intersection(self._workers) and self._is_over()

    def _end_late(self) -> None:
        """Ends the workers that started when everything was done, and that wait for others that have ended."""
        if monotonic() - self._ended_at > _GRACE_S:
            late = [rank for rank in self._running & set(self._replaceable) if self._is_late(rank)]
            if late:
                self._fork_server.kill(late)

    def _note_end(self, rank: int) -> None:
        """Notes that a server has ended, itself or its backup."""
        self._left.discard(self._failover.server_of(rank))
        if not self._left:
            self._ended_at = min(self._ended_at, monotonic())

    def _fail(self, rank: int, codes: dict[int, int]) -> None:
        code = codes[rank]
        self._abort(rank)
        deadline = monotonic() + _GRACE_S
        # Others may have failed at the same time, and the first one's error explains. Where a snapshot holds what they
        # have just done, they may write their events.
        while (code >= 0 or self._spec.snapshots_every_s) and self._running and monotonic() < deadline:
            codes |= self._collect()
        # An error of one process may only tell of the death of another.
        killed = [peer for peer in codes if _is_killed(codes[peer]) and peer not in self._replaceable]
        if code < 0 or killed:
            dead = rank if code < 0 else killed[0]
            raise self._lost(dead, self._end_of(dead, codes[dead]))
        failures = [failure for peer in codes for failure in self._failures(peer)]
        if not failures:
            failures = [self._unsaid(rank, code)]
        first = min(failures, key=lambda failure: failure.time_s)
        host, part = self._spec.plan.role(first.rank).host, self._spec.plan.part_of(first.rank)
        failed = WorkerFailed(first.rank, host, first.cause, first.traceback, first.exit_code, part)
        raise failed.with_remedy(first.remedy)

    def _end_of(self, rank: int, code: int) -> str:
        """Returns how a process has ended, with what its log says of threads where a library has ended it."""
        with suppress(OSError):
            if code == -signal.SIGABRT and isinstance(
                problem := explained(RuntimeError(self._log(rank))), UnfitMachine
            ):
                return f"{describe_end(code)}: {problem}"
        return describe_end(code)

    def _log(self, rank: int) -> str:
        return log_path(self._spec.run_dir, rank).read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]

    def _unsaid(self, rank: int, code: int) -> Failed:
        """Returns the failure of a process that has written none."""
        run_dir = self._spec.run_dir
        try:
            log = self._log(rank)
        except OSError as error:
            if disk_fails(error):
                return Failed(rank, 0.0, 0, f"exit code {code}; its error and its log cannot be read: {error}", "")
            gone = f"its error and its log are gone with the run's directory, which was deleted or replaced ({error})"
            return Failed(rank, 0.0, 0, f"exit code {code}; {gone}", "")
        if isinstance(problem := explained(RuntimeError(log)), UnfitMachine):
            return Failed(rank, 0.0, 0, str(problem), "", problem.exit_code)
        cause, remedy = unsaid(rank, code)
        if is_full(run_dir):
            cause = f"No space left on device: the disk of {run_dir} is full, also for its own error (exit code {code})"
            remedy = "make room on it"
        return Failed(rank, 0.0, 0, cause, log, remedy=remedy)

    def _abort(self, rank: int) -> None:
        if not self._page.abort:
            self._page.abort = rank + 1

    def _kill(self) -> None:
        if not self._running or not self._fork_server.is_alive():
            return
        self._fork_server.kill(sorted(self._running))
        deadline = monotonic() + _KILL_S
        while self._running and monotonic() < deadline:
            self._collect()
        if self._running:
            # It does not answer, so it is ended itself, and the system ends its workers.
            self._fork_server.close()

    def _collect(self) -> dict[int, int]:
        ended = dict(self._fork_server.ended(_LOOK_EVERY_S))
        self._running.difference_update(ended)
        return ended

    def _failures(self, rank: int) -> list[Failed]:
        last, told = self._page.ranks[rank].last_event.read(), list[str]()
        with unless(disk_fails):
            told += lines_of_kind(events_path(self._spec.run_dir, rank), "failed")
        if last.startswith('{"kind":"failed"'):
            told.append(last)
        events = [decode(line) for line in told]
        return [event for event in events if isinstance(event, Failed) and event.time_s >= self._spec.attempt.began_s]

    def _is_complete(self, rank: int) -> bool:
        """Whether a rank that ended without an error has written its last event; os._exit(0) in user code has not."""
        ends = ('{"kind":"worker_ended"', '{"kind":"server_ended"')
        if self._page.ranks[rank].last_event.read().startswith(ends):
            text = (
                f"the disk of {self._spec.run_dir} did not take the last events of rank {rank}, which are lost: the "
                "run's report is incomplete"
            )
            self._events.write(Notice(LAUNCHER, self._events.now(), text))
            return True
        path = events_path(self._spec.run_dir, rank)
        if not disk.exists(path):
            # The run's directory is gone, which is said at the end of the run.
            return self._page.ranks[rank].heartbeat.finished > 0
        return last_line(path).startswith(ends)

    def _lost(self, rank: int, cause: str) -> PeerLost:
        """Ends the run because of a rank; returns the error to raise."""
        # Not before, because only a run on accelerators needs it.
        from headrace.collectives.watchdog.boards import missed

        cause += missed([record.board for record in self._page.ranks], rank)
        self._abort(rank)
        plan = self._spec.plan
        return PeerLost(rank, plan.role(rank).host, cause, plan.part_of(rank))


def _is_killed(code: int) -> bool:
    """Whether a signal has ended a process, and not one by which libraries end it after another's error (NCCL)."""
    return code < 0 and code != -signal.SIGABRT
