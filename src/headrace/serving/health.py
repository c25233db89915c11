"""Starts the process that answers probes at a port of their own, and ends it."""

from __future__ import annotations

import socket
import subprocess
import sys

from headrace.serving.probe import HealthState

_END_S = 5.0


class HealthServer:
    """Answers requests for health beside the process that answers predictions; see `headrace.serving.probe`.

    A probe that comes to that process waits for all that have come before it, and for its garbage collections, which
    take 0.1 s and more with thousands of connections.

    Args:
        bound: where it listens; the process takes it over.
        any_host: as of `ServeSettings`.

    Attributes:
        state: what the probes are told; the server writes it.
    """

    def __init__(self, bound: socket.socket, any_host: bool) -> None:
        self.state = HealthState()
        self._bound, self._any_host = bound, any_host
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Answers from now on."""
        passed = (self._bound.fileno(), self.state.descriptor)
        command = [sys.executable, "-P", "-m", "headrace.serving.probe", *map(str, passed), str(self._any_host)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=passed)
        # If that process ended, a connection would wait here without an answer.
        self._bound.close()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.state.close()
