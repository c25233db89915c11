"""Runs the page's server in this process until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.web.access import listening_socket, url_of

if TYPE_CHECKING:
    from headrace.watch.application import Access

_BACKLOG = 64


def run_watch(
    paths: Sequence[Path],
    access: Access,
    host: str,
    port: int,
    expected: bool,
    listening: Callable[[str], None],
    lifeline: int | None = None,
) -> None:
    """Shows runs until a signal; pages are told what was written last.

    Args:
        paths: directories of runs, or of directories of runs.
        port: 0 for a free one.
        expected: whether a directory need not hold a run yet.
        listening: is told the address when the first page can be opened.
        lifeline: a pipe, at whose end the server ends, too.

    Raises:
        UsageError: a directory holds no run, or the port is in use.
        UnfitMachine: the address is none of this machine.
    """
    with listening_socket(host, port, _BACKLOG) as bound:
        asyncio.run(_run(paths, access, bound, expected, listening, lifeline))


async def _run(
    paths: Sequence[Path],
    access: Access,
    bound: socket.socket,
    expected: bool,
    listening: Callable[[str], None],
    lifeline: int | None,
) -> None:
    from headrace.watch.application import WatchServer
    from headrace.watch.runs import RunWatcher
    from headrace.web.server import AnnouncedServer, server_config

    watcher = RunWatcher(paths, expected)
    application = WatchServer(watcher, access)
    config = server_config(application, lifespan="off", log_level="warning", timeout_graceful_shutdown=2)
    server = AnnouncedServer(config, lambda: listening(url_of(bound)))
    closing: list[asyncio.Task[None]] = []

    async def close() -> None:
        await watcher.close()
        server.should_exit = True

    def end() -> None:
        server.force_exit = bool(closing)
        closing.append(asyncio.create_task(close()))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if lifeline is not None:

        def read() -> None:
            if not os.read(lifeline, 1):
                loop.remove_reader(lifeline)
                end()

        loop.add_reader(lifeline, read)
    serving = asyncio.create_task(server.serve([bound]))
    following = asyncio.create_task(watcher.follow())
    await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    if following.done():
        # A page that stands still would deceive.
        following.result()
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
