"""Answers probes in a process of its own: `python -m headrace.serving.probe LISTENING STATE ANY_HOST`.

    server   ─ every 0.25 s: when its event loop turned last, whether it is ready ─►  memory of both processes
    probes   ─ GET /v2/health/live, /v2/health/ready ─►  this process reads the memory

No load and no garbage collection of the server delays the answers. The process ends when its standard input does, that
is with the server, however that ends.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from typing import Final

from headrace.serving.protocols.http import HttpAnswer, Receive, Scope, Send, error_reply, header, json_reply
from headrace.serving.settings import RequestError
from headrace.web.access import names_loopback
from headrace.web.server import AnnouncedServer, server_config

LIVE, READY = "/v2/health/live", "/v2/health/ready"
UNREADY: Final = ("", "a model is not loaded", "the server is about to end")
"""Why a server is not ready; "" if it is."""
NOT_HERE = "the server listens for this machine alone: ask localhost, or start it with --host"
_STUCK_S = 10.0
_STATE = struct.Struct("<dB")
_ARGUMENTS = 4


class HealthState:
    """What the probes are told, in memory that two processes share: one writes, the other reads.

    Args:
        descriptor: of the memory; None to make some.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("headrace-health") if descriptor is None else descriptor
        if descriptor is None:
            os.truncate(self.descriptor, _STATE.size)
        self._memory = mmap.mmap(self.descriptor, _STATE.size)

    def write(self, turned_s: float, unready: str) -> None:
        """Notes when the event loop turned last, on the monotonic clock, and why the server is not ready."""
        _STATE.pack_into(self._memory, 0, turned_s, UNREADY.index(unready))

    def read(self) -> tuple[float, str]:
        """Returns what was written last."""
        turned_s, code = _STATE.unpack_from(self._memory)
        return turned_s, UNREADY[code]

    def close(self) -> None:
        """Lets go of the memory."""
        self._memory.close()
        os.close(self.descriptor)


class Probes:
    """An ASGI application that answers requests for health, and no others.

    Args:
        any_host: whether requests may name this machine by any name; else by a loopback name alone.
    """

    def __init__(self, state: HealthState, any_host: bool) -> None:
        self._state, self._any_host = state, any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            answer = self._answer(scope)
        except RequestError as error:
            answer = error_reply(error)
        await answer.send(send)

    def _answer(self, scope: Scope) -> HttpAnswer:
        if not self._any_host and not names_loopback(header(scope, b"host") or ""):
            raise RequestError(403, NOT_HERE)
        if scope["method"] != "GET" or scope["path"] not in (LIVE, READY):
            raise RequestError(404, f"this port answers GET {LIVE} and {READY} alone")
        turned_s, unready = self._state.read()
        if scope["path"] == READY:
            if unready:
                raise RequestError(503, unready)
            return json_reply({"ready": True})
        seconds = time.monotonic() - turned_s
        if seconds > _STUCK_S:
            raise RequestError(503, f"the event loop that reads requests has not turned for {seconds:.0f} s")
        return json_reply({"live": True})


def main(listening: int, state: int, any_host: bool) -> None:
    """Answers probes until standard input ends."""
    # The server gets these, too, and says then that it is about to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = server_config(
        Probes(HealthState(state), any_host),
        interface="asgi3",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = AnnouncedServer(config)

    def follow() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=follow, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=listening)])


if __name__ == "__main__":
    assert len(sys.argv) == _ARGUMENTS, __doc__
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
