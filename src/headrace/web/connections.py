"""HTTP connections with limits: what a client can make a server hold, and for how long, with a token or without."""

from __future__ import annotations

import asyncio
import resource
from time import monotonic
from typing import Any, cast

from headrace.internals import HttpToolsProtocol
from headrace.web.access import WHOLE

MOST_HEAD_BYTES = 64 << 10
"""Of a request besides its body: address, headers, trailers. One read of a socket, 256 KiB at most, may come on top."""
MOST_PIPELINED = 16
"""Requests of one connection that wait for the answer to the one before."""
HEAD_S = 10.0
"""How long a connection may be open without a whole request, at its start and between two requests."""
UNREAD_S = 30.0
"""How long a client may leave an answer unread that waits to be sent."""
_SPARE = 64
"""Descriptors that are not for connections."""
_TOGETHER = 16 << 10
"""Bytes of one turn of the event loop that wait for its end."""


class GatheredWrites:
    """A transport whose small writes of one turn of the event loop are one write: the head of an answer, and its body.

    Each write is a call of the system, which takes as long as the reading of a request.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []
        self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends at the end of this turn, or now where that is much."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > _TOGETHER:
            self._flush()

    def close(self) -> None:
        """Sends what waits, then closes."""
        self._flush()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        """Returns how many bytes wait."""
        return self._bytes + self._transport.get_write_buffer_size()

    def _flush(self) -> None:
        parts, self._parts, self._bytes = self._parts, [], 0
        if parts:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))


class HttpConnection(HttpToolsProtocol):
    """One connection. uvicorn limits neither what comes before a request is whole nor how long that takes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.waits_since: float | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection; if there are too many, those that have waited longest for a request end."""
        super().connection_made(GatheredWrites(transport, self.loop))  # type: ignore[arg-type]
        self._wait_for_request()
        if len(self.connections) > _most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all timers."""
        self._stop(self._head_timer)
        self._stop(self._unread_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads what came, and refuses a request whose head does not end."""
        self._bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._bytes > MOST_HEAD_BYTES:
            self.send_400_response(f"The head of a request has at most {MOST_HEAD_BYTES} bytes.")
        elif not self._answers() and self._head_timer is None:
            self._wait_for_request()

    def on_headers_complete(self) -> None:
        """Begins to answer a request."""
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError(f"more than {MOST_PIPELINED} requests wait")  # the parser ends the connection with 400
        super().on_headers_complete()
        self._bytes = 0
        self.waits_since = None
        self._stop(self._head_timer)
        self._head_timer = None

    def on_body(self, body: bytes) -> None:
        """Passes on a part of a body, which is limited by who reads it."""
        super().on_body(body)
        self._bytes = 0

    def on_message_complete(self) -> None:
        """Ends a request."""
        cast(dict[str, Any], self.scope)[WHOLE] = True
        super().on_message_complete()
        self._bytes = 0

    def on_response_complete(self) -> None:
        """Waits for the next request; uvicorn ends the connection if nothing at all comes for 5 s."""
        super().on_response_complete()
        if not self._answers():
            self.waits_since = monotonic()

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection, also where the client has not read the last answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._stop(self._unread_timer)
            self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Waits for the client to read, and not for ever."""
        super().pause_writing()
        self._stop(self._unread_timer)
        self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Goes on to send."""
        self._stop(self._unread_timer)
        super().resume_writing()

    def _make_room(self) -> None:
        """Ends an eighth of the connections that wait for a request, where too many are open."""
        left = [
            each for each in self.connections if isinstance(each, HttpConnection) and not each.transport.is_closing()
        ]
        if len(left) > _most_connections():
            waiting = sorted((each.waits_since, id(each), each) for each in left if each.waits_since is not None)
            for _, _, each in waiting[: len(waiting) // 8 + 1]:
                each.transport.abort()

    def _wait_for_request(self) -> None:
        self.waits_since = self.waits_since or monotonic()
        self._head_timer = self.loop.call_later(HEAD_S, self._end_late)

    def _end_late(self) -> None:
        if not self._answers():
            self.transport.abort()

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def _most_connections() -> int:
    """Returns how many connections the limit of descriptors leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_SPARE, soft - _SPARE) if soft != resource.RLIM_INFINITY else 1 << 20
