"""Workers as processes of this host: of a run (`LocalEngine`), or of a plain script (`launch_script`).

Importing this module does not import torch, so that an engine can be made first thing.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from headrace.devices import accelerators, parts_of_devices
from headrace.engine.base import Engine, RunProgress, orderly_interrupts
from headrace.engine.local.fork_server import (
    NOT_STARTED,
    ForkServer,
    describe_end,
    fork_fork_server,
    start_fork_server,
)
from headrace.engine.local.monitor import Monitor
from headrace.errors import HeadraceError, PeerLost, UsageError
from headrace.machine.identity import host_name
from headrace.machine.limits import too_many_threads
from headrace.machine.resources import cores, most_threads
from headrace.machine.temporary import temporary_folder
from headrace.policies.roles import threads_per_worker
from headrace.worker.run_spec import RunSpec, log_path

if TYPE_CHECKING:
    # For the types alone: they import torch.
    from headrace.shared_memory.control_page import ControlPage
    from headrace.spec.plan import Role

_SPARE = 16
"""How many workers may join a run."""

_LOOK_EVERY_S = 0.05
_GRACE_S = 2.0
_LIBRARIES = ("transformers", "tokenizers", "timm", "torchvision")
"""Libraries that take seconds to import, and start no thread then, so that what has imported them can be forked."""


class LocalEngine(Engine):
    """Forks the workers from a process that imports torch while the engine's owner does other things.

    Use as a context, or `close` it; several runs may follow each other on one engine.

    Args:
        forks: whether that process is a fork of this one, which has done nothing yet, and imports torch for both.

    Attributes:
        settled: whether all processes of the runs so far have ended.
    """

    def __init__(self, forks: bool = False) -> None:
        self._inherited = _inherited()
        self._fork_server = ForkServer(fork_fork_server if forks else start_fork_server)
        self._closed = False
        self._busy = threading.Lock()
        self.settled = True

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

    def run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        if not self._busy.acquire(blocking=False):
            raise UsageError("this engine runs something already; wait for its end, or give each run an engine")
        try:
            return self._run(spec, progress)
        finally:
            self._busy.release()

    def _run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        # Not before, because it imports torch.
        from headrace.shared_memory.control_page import ControlPage

        if not self._closed and not self._fork_server.is_alive():
            # It ended in an earlier run, which has raised an error.
            self._fork_server.close()
            self._fork_server = ForkServer()
        ranks = len(spec.plan.roles) + _spare(spec)
        page = ControlPage.create(ranks)
        watched_end, lifeline = os.pipe()
        try:
            with (
                orderly_interrupts(page) as interrupts,
                closing(ProcessLauncher(spec, self._fork_server, page, watched_end)) as launcher,
            ):
                self.settled = False
                for role in spec.plan.roles:
                    launcher.start(role)
                monitor = Monitor(spec, page, self._fork_server, launcher.start, progress)
                try:
                    monitor.follow()
                finally:
                    # It ends them, whatever was raised: also by a function that is told about events.
                    self.settled = True
            return interrupts.status(page)
        finally:
            for descriptor in (watched_end, lifeline):
                os.close(descriptor)
            page.segment.close()


def _spare(spec: RunSpec) -> int:
    """Returns how many workers may join beside those that the run begins with."""
    plan = spec.plan
    if plan.min_workers:
        return max(0, plan.max_workers - plan.workers)
    return _SPARE if plan.elastic else 0


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
    except Exception as error:
        if isinstance(error, HeadraceError) or engine.settled:
            _keep(engine)
        else:
            # Its workers may be in any state.
            engine.close()
        raise
    except BaseException:
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
    """Starts the processes of one run, and those that replace lost ones."""

    def __init__(self, spec: RunSpec, fork_server: ForkServer, page: ControlPage, lifeline: int) -> None:
        # Not before, because it imports torch.
        from headrace.engine.shipping import pack
        from headrace.internals import COMPILER, INDUCTOR
        from headrace.machine.dynamo import has_compiler

        self._spec = spec
        self._fork_server = fork_server
        self._descriptors = [page.segment.descriptor, lifeline]
        self._ranks = len(page.ranks)
        # What this process needed to check the job its workers need, too.
        names = [name for name in sys.modules if name.partition(".")[0] in _LIBRARIES]
        names += [COMPILER] if has_compiler() else []
        names += [COMPILER, INDUCTOR] if spec.job.options.compile else []
        fork_server.import_modules((*names, *spec.modules, *spec.strategy.imports()))
        self._code, self._memory, self._length = pack(spec)
        log_path(spec.run_dir, 0).parent.mkdir(parents=True, exist_ok=True)

    def start(self, role: Role) -> None:
        """Starts a process; the control page holds how many there were before it with its rank."""
        read_end, write_end = os.pipe()
        request = {
            "ranks": self._ranks,
            "threads": role.threads,
            "directory": os.getcwd(),
            "path": sys.path,
            "log": str(log_path(self._spec.run_dir, role.rank)),
            "data_bytes": self._length,
            "started": self._spec.started,
        }
        # The worker does not read the lock; the run's directory stays locked until the last worker has ended.
        further = [descriptor for descriptor in (self._memory, self._spec.attempt.lock) if descriptor >= 0]
        try:
            self._fork_server.spawn(role.rank, request, [*self._descriptors, read_end, *further])
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        # A thread for each process: a worker that dies before it has read must not block the others.
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


def launch_script(path: Path, arguments: Sequence[str], workers: int, stdout: TextIO | None = None) -> int:
    """Runs a script in `workers` processes, as torchrun would; returns the exit code of the first that failed.

    What rank 0 prints is passed on at once, to `stdout` and stderr; the others' is kept, and shown where they fail.
    """
    with temporary_folder() as folder:
        logs = [log_path(folder, rank) for rank in range(workers)]
        logs[0].parent.mkdir()
        for log in (*logs, _output_of(logs[0])):
            log.touch()
        fork_server = ForkServer()
        held, lifeline = os.pipe()
        try:
            _start_script(fork_server, path, arguments, logs, held)
            return _conclude(_follow_script(fork_server, logs, stdout or sys.stdout), logs)
        finally:
            fork_server.close()
            os.close(held)
            os.close(lifeline)


def _start_script(
    fork_server: ForkServer, path: Path, arguments: Sequence[str], logs: Sequence[Path], held: int
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    workers = str(len(logs))
    launched = {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for rank, log in enumerate(logs):
        request = {
            "script": str(path.absolute()),
            "arguments": list(arguments),
            "environment": {"RANK": str(rank), "LOCAL_RANK": str(rank), **launched, **_part_of_device(rank)},
            "threads": threads_per_worker(cores(), len(logs), most_threads()),
            "directory": os.getcwd(),
            "path": [str(path.absolute().parent), *sys.path],
            "log": str(log),
        } | ({} if rank else {"output": str(_output_of(log))})
        fork_server.spawn(rank, request, [held])


def _part_of_device(local: int) -> dict[str, str]:
    """Returns what lets a process see the part of a device that is its own, where this one was given parts."""
    found = {kind.visible: parts_of_devices(kind) for kind in accelerators() if kind.part}
    return {name: parts[local] for name, parts in found.items() if local < len(parts)}


def _output_of(log: Path) -> Path:
    """Returns the file of what rank 0 prints to its standard output."""
    return log.with_suffix(".out")


def _follow_script(fork_server: ForkServer, logs: Sequence[Path], stdout: TextIO) -> dict[int, int]:
    """Returns the exit codes by rank, in the order of the ends; the ranks that have not ended in time are killed."""
    codes: dict[int, int] = {}
    deadline = math.inf
    with (
        logs[0].open(encoding="utf-8", errors="replace") as said,
        _output_of(logs[0]).open(encoding="utf-8", errors="replace") as printed,
    ):
        while len(codes) < len(logs) and monotonic() < deadline:
            for rank, code in fork_server.ended(_LOOK_EVERY_S):
                if code == NOT_STARTED:
                    raise too_many_threads()
                codes[rank] = code
                if code != 0:
                    # The others get the time to find out and end by themselves.
                    deadline = min(deadline, monotonic() + _GRACE_S)
            for file, stream in ((printed, stdout), (said, sys.stderr)):
                stream.write(file.read())
                stream.flush()
    fork_server.kill([rank for rank in range(len(logs)) if rank not in codes])
    return codes


def _conclude(codes: dict[int, int], logs: Sequence[Path]) -> int:
    failed = [rank for rank, code in codes.items() if code != 0]
    if not failed:
        return 0
    # A rank that lost another one has an exit code of its own; the lost one's log explains.
    first = next((rank for rank in failed if codes[rank] != PeerLost.exit_code), failed[0])
    if first != 0:
        sys.stderr.write(logs[first].read_text(encoding="utf-8", errors="replace"))
    code = codes[first]
    if code < 0:
        sys.stderr.write(f"rank {first} on {host_name()} was lost: {describe_end(code)}\n")
        return PeerLost.exit_code
    return code
