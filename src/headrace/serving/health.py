"""Answers probes at a port and in a thread of their own, however many requests for predictions wait to be read."""

from __future__ import annotations

import socket
import threading

import uvicorn

from headrace.serving.application import PredictionServer
from headrace.web.server import server_config

_JOIN_S = 5.0


class HealthServer:
    """Answers requests for health beside the event loop that reads requests for predictions.

    A probe that comes to that loop waits for all that have come before it. Here it waits for other probes alone, and
    for its turn among the threads.

    Args:
        bound: where it listens.
    """

    def __init__(self, application: PredictionServer, bound: socket.socket) -> None:
        self._bound = bound
        config = server_config(
            application.probe,
            interface="asgi3",
            http="httptools",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        # A daemon: an error before the end leaves no thread that keeps the process.
        self._thread = threading.Thread(target=self._run, name="headrace-health", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._server.should_exit = True
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        self._server.run(sockets=[self._bound])
