"""Requests that come one by one at a given rate, as from many users that do not know of each other."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import uvloop
from servers import Request

_CONNECTIONS = 1024


def steady(url: str, request: Request, rate: float, seconds: float) -> list[float]:
    """Sends requests with random gaps (Poisson), whether the last ones are answered or not.

    Returns:
        the latencies, ms, sorted.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_load(url, request, rate, seconds))


async def _load(url: str, request: Request, rate: float, seconds: float) -> list[float]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    body = request.body.read_bytes()
    lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", *request.header_lines()]
    message = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
    latencies: list[float] = []
    # The one that has been free the longest is next: the server closes connections that are idle for 5 s.
    free: deque[_Connection] = deque()
    loop = asyncio.get_running_loop()
    for _ in range(_CONNECTIONS):
        _, connection = await loop.create_connection(lambda: _Connection(free, latencies), parts.hostname, parts.port)
        free.append(connection)
    chosen = random.Random(0)
    began = due = time.perf_counter()
    count = 0
    while due < began + seconds:
        due += chosen.expovariate(rate)
        # The clock of an event loop has steps of a millisecond: what is due within one goes together.
        if (wait := due - time.perf_counter()) > 0.0005:
            await asyncio.sleep(wait)
        assert free, f"{_CONNECTIONS} requests wait for their answers: this rate is too high"
        free.popleft().send(message)
        count += 1
    until = time.perf_counter() + 30
    while len(latencies) < count:
        assert time.perf_counter() < until, f"{count - len(latencies)} requests were not answered"
        await asyncio.sleep(0.01)
    for connection in free:
        connection.close()
    return sorted(latencies)


class _Connection(asyncio.Protocol):
    def __init__(self, free: deque[_Connection], latencies: list[float]) -> None:
        self._free, self._latencies = free, latencies
        self._transport: asyncio.Transport
        self._got = b""
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is one, and does not say so

    def send(self, message: bytes) -> None:
        self._sent, self._got = time.perf_counter(), b""
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) == length:
            assert head.startswith(b"HTTP/1.1 200 "), self._got[:300]
            self._latencies.append((time.perf_counter() - self._sent) * 1e3)
            self._free.append(self)

    def close(self) -> None:
        self._transport.close()
