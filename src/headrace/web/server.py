"""uvicorn's server as commands run it: it leaves signals to them, and says when it listens."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from headrace.web.connections import HttpConnection


def server_config(application: Any, **own: Any) -> uvicorn.Config:
    """Returns what all servers have in common: limits, no web sockets, no access log, no header that names the server.

    Args:
        own: other arguments of `uvicorn.Config`.
    """
    return uvicorn.Config(
        application,
        http=HttpConnection,
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **own,
    )


class AnnouncedServer(uvicorn.Server):
    """Calls `told` when the first request can come."""

    def __init__(self, config: uvicorn.Config, told: Callable[[], object] = lambda: None) -> None:
        super().__init__(config)
        self._told = told

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the caller's own handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        if self.started:
            self._told()
