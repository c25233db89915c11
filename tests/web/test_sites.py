"""What a page of another site may have a browser ask: it reads nothing, and nothing is computed for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.watch.application import Access, WatchServer
from headrace.watch.runs import RunWatcher
from headrace.web.access import is_foreign_origin, names_loopback
from serving.folders import scaled, serving
from watch.made import begun, started, steps, write
from web.servers import http_scope

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
FOREIGN_HOSTS = (
    *(
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example:8000",
        "127.0.0.1.evil.example",
        "127.0.0.1:8000:80",
    ),
    *(
        "",
        "localhost:8000@evil.example",
        "evil.example#localhost",
        "[::1].evil.example:8000",
        "0.0.0.0:8000",
        "localhost:",
    ),
    *("127.1:8000", "2130706433:8000", "LOCALHOST.", "evil.example/localhost:8000"),
)
OWN_HOSTS = ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "localhost")
FOREIGN_ORIGINS = (
    *("https://evil.example", "http://evil.example:8000", "null", "http://localhost.evil.example", "file://"),
    *("http://127.0.0.1.evil.example:8000", "chrome-extension://localhosts", "evil"),
)
OWN_ORIGINS = ("", "http://localhost:8000", "http://127.0.0.1:3000", "http://[::1]:8000")
KINDS = ("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
BODY = b'{"instances": [[1, 2, 3]]}'

Ask = Callable[..., Awaitable[tuple[int, dict[str, str], bytes]]]


def asking(application: Any) -> Ask:
    """Returns what asks an application by ASGI: method, path and headers; an answer has one part of a body."""

    async def ask(method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        sent: asyncio.Queue[Any] = asyncio.Queue()
        came = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive() -> Any:
            return came.pop() if came else await asyncio.Event().wait()

        task = asyncio.ensure_future(application(http_scope(method, path, headers), receive, sent.put))
        head, part = await sent.get(), await sent.get()
        task.cancel()
        await asyncio.wait([task])
        found = {name.decode().lower(): value.decode() for name, value in head["headers"]}
        return head["status"], found, part.get("body", b"")

    return ask


def from_elsewhere() -> Iterator[tuple[str, dict[str, str]]]:
    """Yields method and headers of requests of which name or origin is not this machine's."""
    for method, kind in itertools.product(METHODS, KINDS):
        for host, origin in (
            *itertools.product(FOREIGN_HOSTS, (*FOREIGN_ORIGINS, *OWN_ORIGINS)),
            *itertools.product(OWN_HOSTS, FOREIGN_ORIGINS),
        ):
            yield method, {"host": host, "content-type": kind, **({"origin": origin} if origin else {})}


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert not any(map(names_loopback, FOREIGN_HOSTS))
    assert all(map(names_loopback, OWN_HOSTS))
    assert all(map(is_foreign_origin, FOREIGN_ORIGINS))
    assert not any(map(is_foreign_origin, OWN_ORIGINS))
    assert sum(1 for _ in from_elsewhere()) >= 3000


def refused(status: int, headers: dict[str, str], body: bytes) -> bool:
    """Whether an answer says no more than that, and lets no other site read even this."""
    return status == 403 and len(body) < 200 and not [name for name in headers if name.startswith("access-control")]


@pytest.mark.slow
def test_a_server_of_predictions_answers_no_page_of_another_site(tmp_path: Path) -> None:
    async def talk() -> None:
        async with serving(scaled(tmp_path / "a", 2.0)) as client:
            ask, own = asking(client.server), {"host": "localhost:8000"}
            before = (await ask("GET", "/metrics", own))[2]
            for method, headers in from_elsewhere():
                path = "/v1/models/m:predict" if method == "POST" else "/v2/models"
                assert refused(*await ask(method, path, headers)), (method, headers)
            cross = {**own, "sec-fetch-site": "cross-site"}
            assert refused(*await ask("POST", "/v1/models/m:predict", cross))
            assert b'requests_total{model="m"' not in (await ask("GET", "/metrics", own))[2], before
            for origin in OWN_ORIGINS:
                status, headers, body = await ask("POST", "/v1/models/m:predict", {**own, "origin": origin})
                assert (status, body) == (200, b'{"predictions":[[2.0,4.0,6.0]]}')
                assert not [name for name in headers if name.startswith("access-control")]
            for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
                assert (await ask(method, "/v1/models/m:predict", own))[0] == 405

    asyncio.run(talk())


@pytest.mark.slow
def test_the_page_of_runs_answers_no_page_of_another_site(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a", started(), begun(0), *steps(0, range(10)))

    async def talk() -> None:
        ask, own = asking(WatchServer(RunWatcher([tmp_path / "runs"]), Access())), {"host": "localhost:8000"}
        for method, headers in from_elsewhere():
            assert refused(*await ask(method, "/stream", headers)), (method, headers)
        for origin in OWN_ORIGINS:
            status, headers, body = await ask("GET", "/stream", {**own, "origin": origin})
            assert (status, body[:6]) == (200, b"data: ")
            assert not [name for name in headers if name.startswith("access-control")]
        for method in METHODS[2:]:
            assert (await ask(method, "/stream", own))[0] == 405

    asyncio.run(talk())


def test_with_a_token_the_rest_of_a_request_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "runs" / "a", started(), begun(0), *steps(0, range(10)))

    async def talk() -> None:
        watching = asking(WatchServer(RunWatcher([tmp_path / "runs"]), Access("t" * 20, any_host=True)))
        async with serving(scaled(tmp_path / "m", 2.0), token="t" * 20, any_host=True) as client:
            serve = asking(client.server)
            for method, (host, origin) in itertools.product(METHODS, itertools.product(FOREIGN_HOSTS, FOREIGN_ORIGINS)):
                headers = {"host": host, "origin": origin, "authorization": "Bearer"}
                assert (await watching(method, "/stream", headers))[0] == 401
                assert (await serve(method, "/v1/models/m:predict", headers))[0] == 401

    asyncio.run(talk())


def test_the_path_that_decides_is_not_made_of_the_header_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In starlette before 1.0.1 `request.url.path` was "/page.css" for such a Host (CVE-2026-48710)."""
    from starlette.datastructures import URL
    from starlette.requests import Request

    def made_of_host(request: Request) -> URL:
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(Request, "url", property(made_of_host))
    write(tmp_path / "runs" / "a", started(), begun(0), *steps(0, range(10)))

    async def talk() -> None:
        ask = asking(WatchServer(RunWatcher([tmp_path / "runs"]), Access("t" * 20, any_host=True)))
        assert (await ask("GET", "/stream", {"host": "evil.example/page.css?"}))[0] == 401
        assert (await ask("GET", "/page.css", {"host": "evil.example/stream?"}))[0] == 200

    asyncio.run(talk())
