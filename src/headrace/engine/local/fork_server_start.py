"""How a zygote comes into being: as a program of its own, or as a fork of the command that needs it.

A program of its own can be had whenever, whatever its launcher has done before; but it imports torch once more. A
command that has done nothing yet but import it can be forked, which saves that: seconds of a processor's time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from time import monotonic

from headrace.memory import MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD, prefer_large_pages, tune

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
_TUNED = ((MMAP_THRESHOLD, _KEPT_BYTES), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, _SPARE_BYTES))


class ChildProcess(ABC):
    """A process that this one has started, and nobody else waits for."""

    pid: int

    @abstractmethod
    def poll(self) -> int | None:
        """Returns its exit code; None while it lives."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int:
        """Returns its exit code when it has ended.

        Raises:
            TimeoutError: it has not in time.
        """

    def kill(self) -> None:
        """Ends it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start_fork_server(channel: socket.socket) -> ChildProcess:
    """Starts a zygote as a program of its own.

    Args:
        channel: its end of the socket to its launcher.
    """
    path = [entry for entry in sys.path if entry]
    return _Program(
        subprocess.Popen(
            # Safe path: what lies in the user's folder must not stand in for the libraries.
            [sys.executable, "-P", "-m", "headrace.engine.local.fork_server_main", str(channel.fileno())],
            pass_fds=[channel.fileno()],
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            # Keys pressed in the terminal are the launcher's to answer.
            start_new_session=True,
        )
    )


def fork_fork_server(channel: socket.socket) -> ChildProcess:
    """Imports what a zygote has, and forks one; where this process has threads, starts a program of its own.

    To be called before anything of the user's is run: what it has left would be in every worker.

    Args:
        channel: as in `start_fork_server`.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    from headrace.engine.local import fork_server_main as zygote

    zygote.load()
    if len(os.listdir("/proc/self/task")) > 1:
        return start_fork_server(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_zygote(channel)
    return _Fork(pid)


def _become_zygote(channel: socket.socket) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        kept = channel.fileno()
        os.closerange(3, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        # What the environment does for a program that begins.
        for option, value in _TUNED:
            tune(option, value)
        prefer_large_pages(_LARGE_BYTES)
        from headrace.engine.local import fork_server_main as zygote

        zygote.main(channel.detach())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Program(ChildProcess):
    """Args:
    process: that was started.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"process {self.pid} has not ended in {timeout_s} s") from error


class _Fork(ChildProcess):
    """Args:
    pid: of a child of this process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while (code := self.poll()) is None:
            if deadline is not None and monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout_s} s")
            time.sleep(_LOOK_EVERY_S)
        return code
