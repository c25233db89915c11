"""A worker's process, from the fork to its exit code."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

import torch

from headrace.collectives.elastic import ElasticGroup
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.engine.base import LivenessProbe
from headrace.engine.shipping import unpack
from headrace.errors import HeadraceError, JobError, PeerLost
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment
from headrace.spec.events import Failed
from headrace.tracebacks import user_traceback
from headrace.worker.events import EventWriter
from headrace.worker.main import work
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import serve

LAST_WORDS = "headrace: this rank ends because of"
"""The line of a rank's log below which its error stands."""

_BEAT_EVERY_S = 0.25


def log_path(run_dir: Path, rank: int) -> Path:
    """Returns the file that a rank's standard output and error go to."""
    return run_dir / "logs" / f"rank-{rank}.log"


def run(order: Mapping[str, Any], descriptors: list[int]) -> int:
    """Does what the launcher ordered; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(order["directory"])
    sys.path[:] = order["path"]
    _redirect(Path(order["log"]))
    torch.set_num_threads(order["threads"])
    try:
        if "script" in order:
            return _run_script(order, descriptors)
        return _run_worker(order, descriptors)
    except HeadraceError as error:
        _log(LAST_WORDS, error)
        return error.exit_code
    except BaseException as error:
        _log(LAST_WORDS, user_traceback(error, fallback=True))
        return 1
    finally:
        if "script" in order:
            # What the interpreter does at its end, which a fork of the fork server never comes to.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _log(*lines: object) -> None:
    print(*lines, sep="\n", file=sys.stderr)  # noqa: T201  (standard error is this rank's log)


def _run_worker(order: Mapping[str, Any], descriptors: list[int]) -> int:
    control, lifeline, code, *data = descriptors
    rank: int = order["spawn"]
    page = ControlPage(SharedSegment(control, ControlPage.nbytes(order["ranks"])), order["ranks"])
    _start_beating(page, rank, lifeline)
    # SIGTERM to one worker asks the whole run to end in order, with a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: setattr(page, "stop", 1))
    with os.fdopen(code, "rb") as pipe:
        packed = pipe.read()
    assignment = _unpack(packed, data[0] if data else -1, order)
    del packed
    check = _checker(page, assignment)
    plan = assignment.plan
    if not plan.role(rank).computes:
        serve(assignment, rank, page, check)
        return 0
    if plan.replaces:
        # A worker that replaces a lost one is alone until the next synchronization.
        incarnation = page.ranks[rank].restarts
        members = [(rank, incarnation)] if incarnation else [(worker, 0) for worker in range(plan.workers)]
        work(assignment, rank, ElasticGroup(page, rank, members, check), page)
        return 0
    # The workers are the first of all.
    host = SharedMemoryGroup(ControlPage(page.segment, plan.workers), rank, check)
    work(assignment, rank, host, page)
    host.close()
    return 0


def _unpack(packed: bytes, memory: int, order: Mapping[str, Any]) -> RunSpec:
    try:
        assignment: RunSpec = unpack(packed, memory if order["data_bytes"] else -1, order["data_bytes"])
    except Exception as error:
        # Only what was unpacked would say where the run's directory is; the log lies in it.
        journal = EventWriter(Path(order["log"]).parents[1], order["spawn"], monotonic())
        cause = f"JobError: the job arrived but cannot be unpacked here: {type(error).__name__}: {error}"
        journal.write(Failed(order["spawn"], 0.0, 0, cause, user_traceback(error, fallback=True), JobError.exit_code))
        journal.close()
        raise
    return assignment


def _run_script(order: Mapping[str, Any], descriptors: list[int]) -> int:
    (lifeline,) = descriptors
    threading.Thread(target=_follow, args=(lifeline, os.getppid()), daemon=True).start()
    os.environ.update(order["environment"])
    sys.argv = [order["script"], *order["arguments"]]
    try:
        runpy.run_path(order["script"], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201  (as the interpreter does)
        return 1
    return 0


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Line by line, because a killed process does not flush what it has printed.
            stream.reconfigure(line_buffering=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _checker(page: ControlPage, order: RunSpec) -> Callable[[], None]:
    def check() -> None:
        if page.abort:
            rank = page.abort - 1
            cause = "the launcher ended the run because of it"
            raise PeerLost(rank, order.plan.role(rank).host, cause, order.plan.part_of(rank))

    return check


def _start_beating(page: ControlPage, rank: int, lifeline: int) -> None:
    heartbeat = page.ranks[rank].heartbeat
    heartbeat.pid = os.getpid()
    fork_server = os.getppid()

    def follow() -> None:
        while not select([lifeline], [], [], _BEAT_EVERY_S)[0]:
            heartbeat.count += 1
        _end(fork_server, [pid for record in page.ranks if (pid := record.heartbeat.pid) not in (0, os.getpid())])

    threading.Thread(target=follow, name="headrace-beat", daemon=True).start()


def _follow(lifeline: int, fork_server: int) -> None:
    # The launcher never writes; its end of the pipe closes when it goes, however it goes.
    select([lifeline], [], [])
    _end(fork_server)


def _end(fork_server: int, peers: Sequence[int] = ()) -> None:
    """Ends this process and all that it has started; where the fork server is stopped, the other ranks, too."""
    if os.getppid() == fork_server and LivenessProbe(fork_server).is_stopped():
        for peer in peers:
            # A stopped fork server reaps no process, so these are still the ids of the workers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(peer, signal.SIGKILL)
        os.kill(fork_server, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
