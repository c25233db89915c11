"""The launcher's side of the zygote: starts processes, hears of their end.

Importing this module does not import torch: the zygote may import it while the caller still reads a job.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from headrace.engine.liveness import LivenessProbe
from headrace.engine.local.fork_server_start import ChildProcess, start_fork_server
from headrace.engine.termination import end_with, leave_alone
from headrace.errors import RunFailed, UnfitMachine, UsageError

_START_S = 120.0
_CLOSE_S = 5.0
_MESSAGE_BYTES = 64 * 1024


class ForkServer:
    """One zygote, started at once. Use as a context, or `close` it.

    Args:
        start: starts it, with its end of the socket.
    """

    def __init__(self, start: Callable[[socket.socket], ChildProcess] = start_fork_server) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start(theirs)
        # While it imports it hears nothing.
        end_with(self._process.pid)
        self._socket = ours
        self._vitals = LivenessProbe(self._process.pid)
        self._stopped_at: float | None = None
        self._ready = False

    def spawn(self, rank: int, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Forks a process that does `order` (see `engine.process`) with copies of these descriptors.

        Raises:
            UsageError: the nursery is closed.
            UnfitMachine: the zygote has gone, or never came.
        """
        self._await_ready()
        message = json.dumps({"spawn": rank, **order}).encode()
        if len(message) > _MESSAGE_BYTES:
            raise UnfitMachine(f"the order for rank {rank} is {len(message)} bytes long, more than {_MESSAGE_BYTES}")
        try:
            socket.send_fds(self._socket, [message], descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone() from error

    def kill(self, ranks: Sequence[int]) -> None:
        """Ends processes with SIGKILL."""
        # If it has gone meanwhile, so have they.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps({"kill": list(ranks)}).encode())

    def is_alive(self) -> bool:
        """Whether the zygote has not ended."""
        return self._process.poll() is None

    def is_lost(self) -> bool:
        """Whether the zygote has ended though nobody closed the nursery."""
        return self._socket.fileno() >= 0 and not self.is_alive()

    def check(self, timeout_s: float) -> None:
        """Raises:
        RunFailed: the zygote has been stopped for `timeout_s`, so nobody would hear of a worker's end.
        """
        if not self._vitals.is_stopped():
            self._stopped_at = None
            return
        self._stopped_at = self._stopped_at or monotonic()
        if monotonic() - self._stopped_at > timeout_s:
            raise RunFailed(
                f"the process that starts the workers (pid {self._process.pid}) was stopped for {timeout_s} s; "
                "who stopped it (SIGSTOP, a debugger) must let it go on"
            )

    def ended(self, timeout_s: float) -> list[tuple[int, int]]:
        """Waits a while; returns (rank, exit code) of who has ended, a negative code for a signal.

        Raises:
            UnfitMachine: the zygote itself has gone.
        """
        found = []
        while select.select([self._socket], [], [], timeout_s)[0]:
            message = self._receive()
            found.append((message["ended"], message["status"]))
            timeout_s = 0.0
        return found

    def close(self) -> None:
        """Ends the zygote and every process of it."""
        self._socket.close()
        leave_alone(self._process.pid)
        if not self._ready or self._vitals.is_stopped():
            # It has no worker to end, and would import to the end first; or it cannot hear.
            self._process.kill()
        try:
            self._process.wait(_CLOSE_S)
        except TimeoutError:
            self._process.kill()
            self._process.wait()

    def _await_ready(self) -> None:
        if self._socket.fileno() < 0:
            raise UsageError("this engine is closed; make another one, or use it inside its `with`")
        if self._ready:
            return
        deadline = monotonic() + _START_S
        if not select.select([self._socket], [], [], deadline - monotonic())[0]:
            raise UnfitMachine(f"the process that imports torch for the workers was not ready after {_START_S:.0f} s")
        self._receive()
        self._ready = True

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._socket.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            message = b""
        if not message:
            raise self._gone()
        received: dict[str, Any] = json.loads(message)
        return received

    def _gone(self) -> UnfitMachine:
        code = self._process.wait(_CLOSE_S)
        return UnfitMachine(f"the process that starts the workers ended with code {code}; see above")
