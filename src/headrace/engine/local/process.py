"""A worker's process, from the fork to its exit code."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, Any, TextIO

import torch

from headrace import internals
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.engine.base import LivenessProbe
from headrace.engine.local.environment import take_environment
from headrace.engine.shipping import unpack
from headrace.engine.torchrun.address import start_timeout_s
from headrace.errors import HeadraceError, JobError, NoStandardInput, PeerLost, user_traceback
from headrace.machine.allocator import give_back_at_once
from headrace.machine.disk import takes_no_more
from headrace.shared_memory.control_page import ControlPage, LastEvent
from headrace.shared_memory.segment import SharedSegment
from headrace.spec.events import Failed
from headrace.spec.plan import outlives_workers
from headrace.worker.events import EventWriter
from headrace.worker.main import work
from headrace.worker.run_spec import LAST_LOG_LINE, RunSpec

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BEAT_EVERY_S = 0.25


def run(request: Mapping[str, Any], descriptors: list[int]) -> int:
    """Runs a worker, a server or a script, as the launcher requests; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(request["directory"])
    take_environment(request)
    redirect(Path(request["log"]), Path(request["output"]) if "output" in request else None)
    torch.set_num_threads(request["threads"])
    try:
        if "script" in request:
            return _run_script(request, descriptors)
        return _run_worker(request, descriptors)
    except HeadraceError as error:
        _log(str(error))
        return error.exit_code
    except BaseException as error:
        _log(user_traceback(error, fallback=True))
        return 1
    finally:
        if "script" in request:
            internals.end_interpreter()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


def _log(text: str) -> None:
    # Standard error is this rank's log, whose disk may take nothing more.
    with contextlib.suppress(OSError):
        print(LAST_LOG_LINE, text, sep="\n", file=sys.stderr)  # noqa: T201


def _run_worker(request: Mapping[str, Any], descriptors: list[int]) -> int:
    control, lifeline, code, *data = descriptors
    rank: int = request["spawn"]
    page = ControlPage(SharedSegment(control, ControlPage.nbytes(request["ranks"])), request["ranks"])
    _start_heartbeat(page, rank, lifeline)
    # SIGTERM to one worker asks the whole run to end in order, with a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: _ask_to_end(rank, page))
    with os.fdopen(code, "rb") as pipe:
        packed = pipe.read()
    spec = _unpack(packed, data[0] if data else -1, request, page.ranks[rank].last_event)
    del packed
    plan = spec.plan

    def check() -> None:
        if page.abort:
            lost = page.abort - 1
            raise PeerLost(lost, plan.role(lost).host, "the launcher ended the run because of it", plan.part_of(lost))

    if not plan.role(rank).computes:
        from headrace.worker.server import serve

        serve(spec, rank, page, check)
        return 0
    if outlives_workers(plan):
        from headrace.collectives.elastic import elastic_on_page, first_members
        from headrace.collectives.views.group import ViewGroup
        from headrace.collectives.views.page import PageViews

        members = first_members((rank, page.ranks[rank].restarts), plan.workers)
        if plan.replaces:
            work(spec, rank, elastic_on_page(page, rank, members, check), page)
        else:
            views = PageViews(page, rank, members, check, plan.min_workers, start_timeout_s())
            work(spec, rank, ViewGroup(views), page)
        return 0
    # The workers have the first ranks.
    group = SharedMemoryGroup(ControlPage(page.segment, plan.workers), rank, check)
    if spec.model.in_parts:
        give_back_at_once()
    work(spec, rank, group, page)
    group.close()
    return 0


def _ask_to_end(rank: int, page: ControlPage) -> None:
    if not page.stop:
        page.stopped_by, page.stop = rank + 1, 1


def _unpack(packed: bytes, memory: int, request: Mapping[str, Any], last_event: LastEvent) -> RunSpec:
    try:
        spec: RunSpec = unpack(packed, memory if request["data_bytes"] else -1, request["data_bytes"])
    except Exception as error:
        # The run's directory, which the packed spec names, is that of the log.
        events = EventWriter(Path(request["log"]).parents[1], request["spawn"], request["started"])
        cause = f"JobError: the job arrived but cannot be unpacked here: {type(error).__name__}: {error}"
        shown = user_traceback(error, fallback=True)
        failed = Failed(request["spawn"], events.now(), 0, cause, shown, JobError.exit_code)
        events.write_last(failed, last_event)
        events.close()
        raise
    return spec


def _run_script(request: Mapping[str, Any], descriptors: list[int]) -> int:
    (lifeline,) = descriptors
    threading.Thread(target=_follow, args=(lifeline, os.getppid()), daemon=True).start()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201  (as the interpreter does)
        return 1
    return 0


def redirect(log: Path, output: Path | None = None) -> None:
    """Lets this process print to files, as far as their disk takes it, and read nothing; all to the log, or two."""
    for number, path in ((1, output or log), (2, log)):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            if not takes_no_more(error):
                raise
            descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = _printing(1, sys.stdout), _printing(2, sys.stderr)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = _NoInput()


class _NoInput(io.TextIOBase):
    """Standard input that is refused: an empty one would train with other settings than the script alone."""

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        raise NoStandardInput(
            "the program reads standard input (input(), sys.stdin), which the processes of a run do not have: give "
            "what it asks for as an argument of the script, in a file, or by an environment variable"
        )

    def read(self, size: int | None = -1) -> str:
        return self.readline()

    @property
    def buffer(self) -> Any:
        # Not refused yet: libraries look whether there is one.
        return self


class _Log(io.FileIO):
    """What its disk does not take is lost, as events are not: a line that is printed ends no training."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not takes_no_more(error):
                raise
            return memoryview(data).nbytes


def _printing(descriptor: int, instead_of: TextIO) -> TextIO:
    raw = _Log(descriptor, "wb", closefd=False)
    # Line by line, because a killed process does not flush what it has printed.
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=instead_of.encoding, errors=instead_of.errors, line_buffering=True
    )


def _start_heartbeat(page: ControlPage, rank: int, lifeline: int) -> None:
    heartbeat = page.ranks[rank].heartbeat
    heartbeat.pid = os.getpid()
    fork_server = os.getppid()

    def follow() -> None:
        while not select([lifeline], [], [], _BEAT_EVERY_S)[0]:
            heartbeat.count += 1
        _end(fork_server, [pid for record in page.ranks if (pid := record.heartbeat.pid) not in (0, os.getpid())])

    threading.Thread(target=follow, name="headrace-beat", daemon=True).start()


def _follow(lifeline: int, fork_server: int) -> None:
    # The launcher never writes; its end of the pipe closes when it ends, however it ends.
    select([lifeline], [], [])
    _end(fork_server)


def _end(fork_server: int, peers: Sequence[int] = ()) -> None:
    """Ends this process and those that it has started; where the fork server is stopped, the other ranks, too."""
    if os.getppid() == fork_server and LivenessProbe(fork_server).is_stopped():
        for peer in peers:
            # A stopped fork server reaps no process, so these are still the workers' ids.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(peer, signal.SIGKILL)
        # The end of the fork server ends this process at once (PR_SET_PDEATHSIG): its group ends before, without it.
        own = os.getpgrp()
        os.setpgid(0, os.getpgid(fork_server))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(own, signal.SIGKILL)
        os.kill(fork_server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
