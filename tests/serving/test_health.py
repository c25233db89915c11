"""Probes at a port of their own are answered whatever the event loop for predictions does."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from engine.conftest import ended, until
from headrace.serving.application import PredictionServer
from headrace.serving.running import HealthServer
from headrace.serving.settings import ServeSettings
from serving.folders import scaled

LIVE, READY = "/v2/health/live", "/v2/health/ready"


@contextmanager
def probed(application: PredictionServer) -> Iterator[int]:
    """Yields the port of the probes; no event loop for predictions turns here but while a test runs one."""
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    health = HealthServer(bound, any_host=False)
    application.state = health.state
    application.note()
    health.start()
    process = health._process
    try:
        yield port
    finally:
        health.stop()
    assert process is not None
    assert process.returncode == 0


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        content = reply.read().decode()
        return reply.status, json.loads(content).get("error", content)


def test_they_are_answered_while_the_other_event_loop_is_blocked(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "a", 2.0)

    async def blocked() -> None:
        """Nothing else turns in this event loop while the answers are waited for."""
        application = PredictionServer([folder], ServeSettings(token="secret of this server"))
        with probed(application) as port:
            assert ask(port, LIVE)[0] == 200
            assert ask(port, READY) == (503, "a model is not loaded")
            await application.load()
            application.note()
            assert ask(port, READY)[0] == 200
            application.draining = True
            application.note()
            assert ask(port, READY) == (503, "the server is about to end")
            assert ask(port, LIVE)[0] == 200
            await application.catalog.close()

    asyncio.run(blocked())


def test_nothing_else_is_answered_there(tmp_path: Path) -> None:
    application = PredictionServer([scaled(tmp_path / "a", 2.0)], ServeSettings())
    with probed(application) as port:
        for path, method in (("/v2/models/m/infer", "POST"), ("/metrics", "GET"), (LIVE, "POST")):
            assert ask(port, path, method) == (404, f"this port answers GET {LIVE} and {READY} alone")
        assert ask(port, LIVE, Host="evil.example")[0] == 403


def test_an_event_loop_that_does_not_turn_is_not_alive(tmp_path: Path) -> None:
    application = PredictionServer([scaled(tmp_path / "a", 2.0)], ServeSettings())
    with probed(application) as port:
        assert application.state is not None
        application.state.write(time.monotonic() - 3600, "")
        status, told = ask(port, LIVE)
        assert (status, told.startswith("the event loop that reads requests has not turned for 3")) == (503, True)

        async def turn() -> None:
            task = asyncio.create_task(application._turn())
            await asyncio.sleep(0)
            task.cancel()

        asyncio.run(turn())
        assert ask(port, LIVE)[0] == 200


def test_its_process_ends_with_that_of_the_server(tmp_path: Path) -> None:
    code = """
import os, socket
from headrace.serving.running import HealthServer
health = HealthServer(socket.create_server(("127.0.0.1", 0)), False)
health.start()
print(health._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert until(lambda: ended(int(done.stdout)), 30)
