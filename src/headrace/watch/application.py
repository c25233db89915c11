"""The page of runs as an ASGI application: static files, and server-sent events with what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.report.views.style import colour_sheet
from headrace.watch.runs import RunWatcher, wait_for
from headrace.watch.state import WatchedRun
from headrace.web.access import has_token, is_foreign_origin, names_loopback

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("main", "stream", "panels", "chart", "lanes")},
}
_COLOURS = "/colours.css"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_SHOWN = 8
_STREAMS = 32
_BEAT_S = 2.0
"""A stream without changes says that it is there so often; the page counts on it."""
_PAUSE_S = 0.1
"""Between two messages."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Access:
    """Who may ask: with a token, if there is one; by a loopback name alone, if not by any."""

    token: str = ""
    any_host: bool = False


class WatchServer:
    """The page of runs; an ASGI application."""

    def __init__(self, watcher: RunWatcher, access: Access) -> None:
        self._watcher = watcher
        self._access = access
        self._streams = 0
        routes = [Route(path, _file, methods=["GET"]) for path in (*_FILES, _COLOURS)]
        routes.append(Route("/stream", self._stream, methods=["GET"]))
        self._app = Starlette(routes=routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))) is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if not self._access.any_host and not names_loopback(request.headers.get("host", "")):
            text = "the server listens for this machine alone: ask localhost, or start it with --host"
            return JSONResponse({"error": text}, 403, _HEADERS)
        if not self._access.any_host and is_foreign_origin(request.headers.get("origin", "")):
            return JSONResponse({"error": "a page of another site asks: open it from localhost"}, 403, _HEADERS)
        token = self._access.token
        static = _path(request) in _FILES or _path(request) == _COLOURS
        if token and not static and not has_token(request.headers.get("authorization", ""), token):
            text = "expected the header Authorization: Bearer TOKEN"
            return JSONResponse({"error": text}, 401, {"WWW-Authenticate": "Bearer", **_HEADERS})
        return None

    async def _stream(self, request: Request) -> Response:
        """Answers with a stream about the runs that `run` names, the first in detail; without one, the newest."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:_SHOWN] or list(self._watcher.found)[:1]
        if unknown := [name for name in names if name not in self._watcher.found]:
            return JSONResponse({"error": f"there is no run {unknown[0][:100]!r}"}, 404, _HEADERS)
        if self._streams >= _STREAMS:
            return JSONResponse({"error": f"{_STREAMS} pages are open already; close one"}, 503, _HEADERS)
        return StreamingResponse(self._messages(names), media_type="text/event-stream", headers=_HEADERS)

    async def _messages(self, names: list[str]) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            async with self._watcher.looking_at(names) as runs:
                changes = _changes(self._watcher, runs)
                while True:
                    # What changes from here on ends the wait below.
                    changed = self._watcher.changed
                    message = next(changes)
                    # Twice a line end ends a message; JSON has none.
                    yield b"data: " + orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"
                    if self._watcher.closing:
                        yield b"event: end\ndata: {}\n\n"
                        return
                    await asyncio.sleep(_PAUSE_S)
                    await wait_for(changed, _BEAT_S)
        finally:
            self._streams -= 1


def _changes(watcher: RunWatcher, runs: dict[str, WatchedRun]) -> Iterator[dict[str, Any]]:
    """Yields what has changed since the last time, the first run in detail."""
    revisions = dict.fromkeys(runs, -1)
    sent: dict[str, dict[str, Any]] = {}
    order: list[str] = []
    while True:
        message: dict[str, Any] = {"shown": {}}
        if (now := list(watcher.found)) != order:
            message["order"] = order = now
        if rows := {name: row for name, row in watcher.rows.items() if sent.get(name) != row}:
            message["rows"] = rows
            sent |= rows
        for name, run in runs.items():
            since = revisions[name]
            if run.revision > since:
                message["shown"][name] = run.curves(since)
                if name == next(iter(runs)):
                    message["detail"] = {"name": name, **run.details(since)}
                revisions[name] = run.revision
        yield message


def _path(request: Request) -> str:
    """Returns what routes compare; `request.url` is made of the header Host, too, which a client chooses."""
    return str(request.scope["path"])


async def _file(request: Request) -> Response:
    path = _path(request)
    if path == _COLOURS:
        return Response(colour_sheet(":root"), media_type="text/css", headers=_HEADERS)
    name, kind = _FILES[path]
    return Response(_read(name), media_type=kind, headers=_HEADERS)


@cache
def _read(name: str) -> bytes:
    return resources.files("headrace.watch").joinpath("page", name).read_bytes()
