"""The launcher's side of a fork server: how it is started, and how it is asked to fork workers.

A program can be started at any time, but it imports torch once more. A command that has done nothing but import torch
can be forked, which saves seconds of processor time.

Importing this module does not import torch: the fork server may import it while the caller still reads a job.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from headrace.engine.base import LivenessProbe, end_with, leave_alone
from headrace.engine.local.environment import set_since
from headrace.errors import ForkServerLost, HeadraceError, UnfitMachine, UsageError
from headrace.machine.allocator import MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD, prefer_large_pages, tune
from headrace.machine.limits import too_many_threads

NOT_STARTED = 256
"""In place of an exit code, which is smaller: the system started no further process."""

_START_S = 120.0
_CLOSE_S = 5.0
_MESSAGE_BYTES = 64 * 1024
_NAMES = 500
"""Of modules, in one message."""
_LOOK_EVERY_S = 0.01

_KEPT_BYTES = 1 << 30
_SPARE_BYTES = 64 << 20
_LARGE_BYTES = 512 << 20
ENVIRONMENT = {
    # Memory that a step frees stays mapped, so that the next step does not fault it in again. glibc reads these
    # when a process begins; 2-18 % more throughput on CPU, for any training.
    "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(_SPARE_BYTES),
    # Large pages, where the system leaves them to those who ask: weights and gradients are read from end to end in
    # every step, and each page of 4 kB on the way is looked up. 7-10 % less time a step of an mlp.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # A library that starts threads while it is imported could not be forked.
    "OPENBLAS_NUM_THREADS": "1",
}
_OF_WORKERS = {
    # Workers share the cores, and those that read data may be forked, which tokenizers with threads warn of.
    "TOKENIZERS_PARALLELISM": "false",
    # What the library has to say of a model it says in the launcher, which checks the job, once.
    "TRANSFORMERS_VERBOSITY": "error",
    # hash() of text is the same in all of them, and in every run.
    "PYTHONHASHSEED": "0",
}
"""Not set for the launcher: job files tokenize data there."""
_TUNED = ((MMAP_THRESHOLD, _KEPT_BYTES), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, _SPARE_BYTES))


class _Fork:
    """A forked child of this process, with the methods of `subprocess.Popen` that a fork server needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(_LOOK_EVERY_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


ChildProcess = subprocess.Popen[bytes] | _Fork


def environment_of_workers() -> dict[str, str]:
    """Returns the environment of a program that is a worker, or forks workers: this process's, and its module path."""
    path = [entry for entry in sys.path if entry]
    return {**ENVIRONMENT, **_OF_WORKERS, **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def start_fork_server(channel: socket.socket) -> ChildProcess:
    """Starts a fork server as a program; it inherits `channel`."""
    return subprocess.Popen(
        # Safe path: files in the user's folder must not replace the libraries.
        [sys.executable, "-P", "-m", "headrace.engine.local.fork_server_main", str(channel.fileno())],
        pass_fds=[channel.fileno()],
        env=environment_of_workers(),
        stdin=subprocess.DEVNULL,
        # Keys pressed in the terminal are for the launcher.
        start_new_session=True,
    )


def fork_fork_server(channel: socket.socket) -> ChildProcess:
    """Imports what a fork server has, and forks one; where this process has threads, starts a program instead.

    Call it before any user code runs: every worker would inherit what that has left.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    from headrace.engine.local import fork_server_main as program

    program.load()
    if len(os.listdir("/proc/self/task")) > 1:
        return start_fork_server(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_fork_server(channel)
    return _Fork(pid)


def _become_fork_server(channel: socket.socket) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kept = channel.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.update({name: os.environ.get(name, value) for name, value in _OF_WORKERS.items()})
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        # What the environment does for a program that starts.
        for option, value in _TUNED:
            tune(option, value)
        prefer_large_pages(_LARGE_BYTES)
        from headrace.engine.local import fork_server_main as program

        program.main(channel.detach())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class ForkServer:
    """A fork server, started at once. Use as a context, or `close` it.

    Raises:
        UnfitMachine: the system starts no further process.
    """

    def __init__(self, start: Callable[[socket.socket], ChildProcess] = start_fork_server) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = start(theirs)
        except BlockingIOError as error:
            ours.close()
            raise too_many_threads() from error
        # While it imports it does not notice this process's end.
        end_with(self._process.pid)
        self._socket = ours
        self._probe = LivenessProbe(self._process.pid)
        self._stopped_at: float | None = None
        self._ready = False
        self._imported: set[str] = set()
        self._environment = dict(os.environ)
        _open.add(self)

    def import_modules(self, names: Sequence[str]) -> None:
        """Has modules imported once for all processes; returns when they are, because a process's time runs from then.

        Raises:
            UsageError: the fork server is closed.
            UnfitMachine: the fork server has ended, or has not imported them in time.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self._imported]
        if not missing:
            return
        self._await_ready()
        for begin in range(0, len(missing), _NAMES):
            self._send(json.dumps({"import": missing[begin : begin + _NAMES], **set_since(self._environment)}).encode())
            self._await("the process that imports modules for the workers", "done")
        self._imported.update(missing)

    def spawn(self, rank: int, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Forks a process for `request` (see `engine.local.process`) with copies of these descriptors.

        Raises:
            UsageError: the fork server is closed.
            UnfitMachine: the fork server has ended, or never started.
        """
        self._await_ready()
        message = json.dumps({"spawn": rank, **set_since(self._environment), **request}).encode()
        if len(message) > _MESSAGE_BYTES:
            raise UnfitMachine(f"the request for rank {rank} is {len(message)} bytes long, more than {_MESSAGE_BYTES}")
        self._send(message, descriptors)

    def kill(self, ranks: Sequence[int]) -> None:
        """Ends processes with SIGKILL."""
        # If the fork server has ended meanwhile, so have they.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps({"kill": list(ranks)}).encode())

    def is_alive(self) -> bool:
        """Whether the fork server has not ended."""
        return self._process.poll() is None

    def check(self, timeout_s: float) -> None:
        """Raises:
        ForkServerLost: the fork server has been stopped for `timeout_s`, so a worker's end would go unnoticed.
        """
        if not self._probe.is_stopped():
            self._stopped_at = None
            return
        self._stopped_at = self._stopped_at or monotonic()
        if monotonic() - self._stopped_at > timeout_s:
            raise ForkServerLost(
                f"the process that starts the workers (pid {self._process.pid}) was stopped for {timeout_s} s; "
                "who stopped it (SIGSTOP, a debugger) must let it go on"
            )

    def ended(self, timeout_s: float) -> list[tuple[int, int]]:
        """Waits for ended processes; returns (rank, exit code) of each, a negative code for a signal.

        The code is `NOT_STARTED` for one that the system did not start.

        Raises:
            UnfitMachine: the fork server itself has ended.
        """
        found = []
        while self._has_message(timeout_s):
            message = self._receive()
            unstarted = "unstarted" in message
            found.append((message["unstarted"], NOT_STARTED) if unstarted else (message["ended"], message["status"]))
            timeout_s = 0.0
        return found

    def leave(self) -> None:
        """Closes this process's end of the socket, the last of which ends the fork server."""
        self._socket.close()
        leave_alone(self._process.pid)

    def close(self) -> None:
        """Ends the fork server and every process of it."""
        self.leave()
        if not self._ready or self._probe.is_stopped():
            # It has no worker to end, and would finish its imports first; or it cannot react.
            self._process.kill()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _await_ready(self) -> None:
        if self._socket.fileno() < 0:
            raise UsageError("this engine is closed; make another one, or use it inside its `with`")
        if self._ready:
            return
        self._await("the process that imports torch for the workers", "ready")
        self._ready = True

    def _send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._socket, [message], descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone() from error

    def _await(self, who: str, what: str) -> None:
        """Waits for an answer that says that something has been imported."""
        if not self._has_message(_START_S):
            raise UnfitMachine(f"{who} was not {what} after {_START_S:.0f} s")
        self._receive()

    def _has_message(self, timeout_s: float) -> bool:
        # Not select, which is limited to 1,024 descriptors: the user's code may have more.
        messages = select.poll()
        messages.register(self._socket, select.POLLIN)
        return bool(messages.poll(math.ceil(1000 * timeout_s)))

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._socket.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            message = b""
        if not message:
            raise self._gone()
        received: dict[str, Any] = json.loads(message)
        return received

    def _gone(self) -> HeadraceError:
        ended = describe_end(self._process.wait(_CLOSE_S))
        if self._ready:
            return ForkServerLost(f"the process that starts the workers was lost, and they with it: {ended}")
        return UnfitMachine(f"the process that imports torch for the workers could not begin: {ended}; see above")


def unsaid(rank: int, code: int) -> tuple[str, str]:
    """Returns cause and remedy where a process has ended with a code and has said nothing."""
    said = f"exit code {code} without an error of its own (os._exit?)"
    return said, f"the end of its log may say why: logs/rank-{rank}.log of the run"


def describe_end(code: int) -> str:
    """Returns how a process has ended, in words, from its exit code."""
    if code >= 0:
        return f"ended with code {code}"
    names = {each.value: each.name for each in signal.Signals}
    # The real-time ones between the first and the last have no name.
    return f"killed by signal {-code} ({names.get(-code) or signal.strsignal(-code)})"


_open: weakref.WeakSet[ForkServer] = weakref.WeakSet()


def _leave_all() -> None:
    for fork_server in list(_open):
        fork_server.leave()


# A child that user code forks would hold the socket, and with it the fork server, beyond this process's end.
os.register_at_fork(after_in_child=_leave_all)
