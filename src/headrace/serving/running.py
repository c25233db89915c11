"""Runs the server in this process until SIGTERM or SIGINT, and answers what has come before it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headrace.serving.application import PredictionServer
from headrace.serving.probe import HealthState
from headrace.serving.settings import ServeSettings
from headrace.web.access import listening_socket, url_of
from headrace.web.server import AnnouncedServer, server_config

_BACKLOG = 4096
"""Connections that wait to be accepted. Linux drops what comes beyond; the client tries again a second later."""
_ACCEPTED = 16
"""Connections that are accepted in one turn of the event loop; libuv accepts one for each socket that it watches. While
the loop reads many requests, thousands of new connections, and a request for health among them, would wait for seconds.
"""
_SWITCH_S = 0.001
"""After so long a thread gives way: the one that computes does not wait long for the one that reads requests."""


_END_S = 5.0
"""How long the process that answers probes may take to end."""


@dataclass(frozen=True)
class Listening:
    """Where a server listens.

    Attributes:
        url: "http://127.0.0.1:8000".
        models: their versions by name.
        health: the same for probes alone; "" where they have no port of their own.
    """

    url: str
    models: dict[str, tuple[int, ...]]
    health: str = ""


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


def run_server(
    folders: Sequence[Path],
    settings: ServeSettings,
    host: str,
    port: int,
    drain_s: float,
    listening: Callable[[Listening], None],
    health_port: int | None = None,
) -> None:
    """Answers requests until a signal; then it takes no more connections, and answers what has come.

    Args:
        port: 0 for a free one.
        drain_s: how long answers may take after the signal.
        listening: is told when the first request can come.
        health_port: for probes alone, 0 for a free one; None where they come to the port of the predictions.

    Raises:
        UsageError: a folder does not exist, two models have one name, or a port is in use.
        DataError: a folder is not what was exported.
        UnfitMachine: the address is none of this machine.
    """
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("headrace.serve").setLevel(logging.INFO)
    with ExitStack() as stack:
        bound = stack.enter_context(listening_socket(host, port, _BACKLOG))
        probed = None
        if health_port is not None:
            probed = stack.enter_context(listening_socket(host, health_port, _BACKLOG, "--health-port"))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(_run(folders, settings, bound, probed, drain_s, listening))


async def _run(
    folders: Sequence[Path],
    settings: ServeSettings,
    bound: socket.socket,
    probed: socket.socket | None,
    drain_s: float,
    listening: Callable[[Listening], None],
) -> None:
    application = PredictionServer(folders, settings)
    await application.load()
    # What is loaded stays: a garbage collection that searches it stops all threads for 0.1 s and more.
    gc.collect()
    gc.freeze()
    config = server_config(
        application,
        lifespan="on",
        log_config=None,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        backlog=_BACKLOG,
    )
    server = AnnouncedServer(config, lambda: listening(Listening(url_of(bound), models, health_url)))

    def end() -> None:
        # The second signal does not wait for answers.
        server.force_exit = application.draining
        application.draining = server.should_exit = True
        application.note()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    models = {name: tuple(sorted(model.versions)) for name, model in application.catalog.models.items()}
    health_url = "" if probed is None else url_of(probed)
    health = None if probed is None else HealthServer(probed, settings.any_host)
    if health is not None:
        application.state = health.state
        application.note()
        health.start()

    try:
        await server.serve([bound, *(bound.dup() for _ in range(_ACCEPTED - 1))])
    finally:
        if health is not None:
            # Until here it has said that the server is about to end.
            application.state = None
            await asyncio.to_thread(health.stop)
