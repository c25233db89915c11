"""The server as an ASGI application: addresses, who may ask, errors in one form."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.serving.catalog import Catalog, LoadedVersion
from headrace.serving.description import Description
from headrace.serving.metrics import CONTENT_TYPE, ServerMetrics
from headrace.serving.page import page_files, page_headers, page_text
from headrace.serving.probe import LIVE, NOT_HERE, READY, UNREADY, HealthState
from headrace.serving.protocols.http import (
    Answer,
    BodyBudget,
    HttpAnswer,
    Receive,
    Scope,
    Send,
    error_reply,
    header,
    json_reply,
    read_body,
)
from headrace.serving.protocols.open_inference import (
    JSON_LENGTH,
    RequestHead,
    read_request,
    write_reply,
)
from headrace.serving.protocols.tensorflow_rest import read_predict, write_predictions
from headrace.serving.settings import TOO_MANY, RequestError, ServeSettings
from headrace.web.access import has_token, is_foreign_origin, names_loopback

_log = logging.getLogger("headrace.serve")
_OPEN = {"/", LIVE, READY, *page_files()}
"""Answered without the token: probes of a scheduler, and the page, which asks for it."""
_SITE = b"sec-fetch-site"
_TURN_S = 0.25
"""How often the event loop says that it turns."""

_A_SECOND, _AT_ONCE, _MOST_S = 500, 64, 4.0
"""Refusals that leave in a second and that leave together after a pause, and the longest that one is held back."""

_INTERNAL = RequestError(500, "internal error; the log of the server has it")
_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_PREDICT = re.compile(r"/v1/models/([^/:]+)(?:/versions/([^/:]+))?:predict")

Predict = Callable[[LoadedVersion, Scope, bytes], Awaitable[HttpAnswer]]


class PredictionServer:
    """Answers requests for predictions of exported models; an ASGI application.

    Args:
        folders: of models.

    Attributes:
        catalog: the models.
        draining: whether the server is about to end: it answers, and says that it is not ready.
        state: what the process that answers probes is told; None where there is none.

    Raises:
        UsageError, DataError: a folder holds no model, or two have one name.
    """

    def __init__(self, folders: Sequence[Path], settings: ServeSettings) -> None:
        self._settings = settings
        self._metrics = ServerMetrics()
        self._budget = BodyBudget(settings.max_body_bytes, settings.max_held_bytes)
        self._unsent = BodyBudget(settings.max_held_bytes, settings.max_held_bytes, "answers")
        self.catalog = Catalog(folders, settings, self._metrics)
        self._description = Description(self.catalog, self._budget, bool(settings.token))
        self.draining = False
        self.state: HealthState | None = None
        self._loaded = False
        self._heads: WeakKeyDictionary[LoadedVersion, dict[bytes, RequestHead]] = WeakKeyDictionary()
        self._counters: dict[tuple[str, int, int], Any] = {}
        self._refusals = Refusals()
        infer, tensorflow = (
            _Endpoint(self._predicting(protocol), self._unsent) for protocol in (self._infer, self._tensorflow)
        )
        self._predictions = ((_INFER, infer), (_PREDICT, tensorflow))
        self._health = {LIVE: _Endpoint(self._live), READY: _Endpoint(self._ready)}
        self._app = Starlette(
            routes=self._routes(infer, tensorflow),
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await error_reply(refusal).send(send)
            return
        await (self._direct(scope) or self._app)(scope, receive, send)

    def note(self) -> None:
        """Tells the process that answers probes, if there is one, that the event loop turns, and what it may answer."""
        if self.state is not None:
            self.state.write(time.monotonic(), self._unready())

    async def load(self) -> None:
        """Loads all models; raises what is wrong with one. Without it the first request would wait for that."""
        if not self._loaded:
            await self.catalog.load()
            self._loaded = True

    def _direct(self, scope: Scope) -> _Endpoint | None:
        """Returns what answers predictions and health, past the list of all routes and what stands before it."""
        if scope["type"] == "http":
            if scope["method"] == "POST":
                for pattern, endpoint in self._predictions:
                    if names := pattern.fullmatch(scope["path"]):
                        scope["path_params"] = {"model": names[1], "version": names[2]}
                        return endpoint
            elif scope["method"] == "GET":
                return self._health.get(scope["path"])
        return None

    def _routes(self, infer: _Endpoint, tensorflow: _Endpoint) -> list[Route]:
        """Returns all addresses; those of predictions and health for the answers to other methods alone."""
        at, old = "/v2/models/{model}", "/v1/models/{model}"
        routes = [
            Route(path, endpoint, methods=["POST"])
            for place in ("", "/versions/{version}")
            for path, endpoint in ((f"{at}{place}/infer", infer), (f"{old}{place}:predict", tensorflow))
        ]
        own = [(LIVE, self._live), (READY, self._ready), ("/metrics", self._metrics_text), ("/", self._page)]
        own += [(path, self._page) for path in page_files()]
        answers = [*(("GET", path, answer) for path, answer in own), *self._description.routes()]
        return routes + [Route(path, _Endpoint(answer, self._unsent), methods=[way]) for way, path, answer in answers]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self.load()
        tasks = [asyncio.create_task(routine) for routine in (self.catalog.watch(), self._turn())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self.catalog.close()

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Returns why a request is not looked at; None where it is."""
        if not self._settings.any_host and not names_loopback(header(scope, b"host") or ""):
            return RequestError(403, NOT_HERE)
        if not self._settings.any_host and _other_site(scope):
            # A browser sends it without asking, and keeps the answer from the page; the prediction would be computed.
            return RequestError(403, "a page of another site asks: open it from localhost, or start with --host")
        token = self._settings.token
        if token and scope["path"] not in _OPEN and not has_token(header(scope, b"authorization") or "", token):
            return RequestError(401, "expected the header Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
        return None

    def _predicting(self, predict: Predict) -> Answer:
        """Returns the answer to a request for predictions: it reads the body, and counts."""

        async def answer(scope: Scope, receive: Receive) -> HttpAnswer:
            began = time.perf_counter()
            version = self.catalog.find(scope["path_params"])[1]
            try:
                version.require_room()
                body = await read_body(scope, receive, self._budget)
            except RequestError as error:
                if error.status == TOO_MANY:
                    await self._refusals.turn()
                self._count(version, error.status, time.perf_counter() - began)
                raise
            try:
                # A version may have gone while the body came.
                version = self.catalog.find(scope["path_params"])[1]
                reply = await predict(version, scope, body)
            except RequestError as error:
                reply = error_reply(error)
            finally:
                self._budget.give_back(len(body))
            if reply.status == TOO_MANY:
                await self._refusals.turn()
            self._count(version, reply.status, time.perf_counter() - began)
            return reply

        return answer

    async def _infer(self, version: LoadedVersion, scope: Scope, body: bytes) -> HttpAnswer:
        facts = version.facts
        known = self._heads.setdefault(version, {})
        request = read_request(body, header(scope, JSON_LENGTH), facts.inputs, facts.outputs, known)
        return write_reply(version, request, await version.predict(request.inputs))

    async def _tensorflow(self, version: LoadedVersion, scope: Scope, body: bytes) -> HttpAnswer:
        inputs, in_rows = read_predict(body, version.facts.inputs)
        return write_predictions(version, await version.predict(inputs), in_rows)

    def _count(self, version: LoadedVersion, status: int, seconds: float) -> None:
        key = (version.name, version.number, status)
        counters = self._counters.get(key)
        if counters is None:
            labels = (version.name, str(version.number))
            counters = self._counters[key] = (
                self._metrics.requests.labels(*labels, str(status)),
                self._metrics.seconds.labels(*labels),
            )
        counters[0].inc()
        counters[1].observe(seconds)

    async def _turn(self) -> None:
        """Notes that the event loop turns, until it is cancelled."""
        while True:
            self.note()
            await asyncio.sleep(_TURN_S)

    def _unready(self) -> str:
        loaded = all(model.versions for model in self.catalog.models.values())
        return UNREADY[2 if self.draining else 0 if loaded else 1]

    async def _live(self, scope: Scope, receive: Receive) -> HttpAnswer:
        return json_reply({"live": True})

    async def _ready(self, scope: Scope, receive: Receive) -> HttpAnswer:
        if unready := self._unready():
            raise RequestError(503, unready)
        return json_reply({"ready": True})

    async def _metrics_text(self, scope: Scope, receive: Receive) -> HttpAnswer:
        return HttpAnswer(self._metrics.text(), 200, [(b"content-type", CONTENT_TYPE.encode())])

    async def _page(self, scope: Scope, receive: Receive) -> HttpAnswer:
        path = scope["path"]
        file = page_files().get(path)
        return (
            HttpAnswer(page_text(), 200, page_headers()) if file is None else HttpAnswer(file, 200, page_headers(path))
        )


class _Endpoint:
    """An answer as an ASGI application; answers count as unsent until their client has read them."""

    def __init__(self, answer: Answer, unsent: BodyBudget | None = None) -> None:
        self._answer = answer
        self._unsent = unsent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counted = 0
        try:
            reply = await self._answer(scope, receive)
            if self._unsent is not None:
                self._unsent.take(len(reply.body))
                counted = len(reply.body)
        except RequestError as error:
            reply = error_reply(error)
        except Exception:
            await error_reply(_INTERNAL).send(send)
            raise
        try:
            await reply.send(send)
        finally:
            if self._unsent is not None:
                self._unsent.give_back(counted)


class Refusals:
    """Holds refusals back where too many are due.

    To refuse a request takes the event loop about as long as to read one that is answered. Clients that repeat what was
    refused without a pause would get thousands of refusals a second, and little else would be done. A client that
    waits for its refusal asks nothing meanwhile.

    Args:
        a_second: refusals that leave in a second.
        at_once: how many leave together after a pause.
        most_s: the longest that one is held back.
    """

    def __init__(self, a_second: float = _A_SECOND, at_once: int = _AT_ONCE, most_s: float = _MOST_S) -> None:
        self._apart_s = 1 / a_second
        self._ahead_s = at_once / a_second
        self._most_s = most_s
        self._next = 0.0

    async def turn(self) -> None:
        """Returns when the next refusal may leave."""
        now = asyncio.get_running_loop().time()
        due = max(self._next, now - self._ahead_s) + self._apart_s
        self._next = min(due, now + self._most_s)
        if self._next > now:
            await asyncio.sleep(self._next - now)


def _other_site(scope: Scope) -> bool:
    """Whether a browser says that a page of another site asks for a prediction, or for what it may read."""
    return is_foreign_origin(header(scope, b"origin") or "") or (
        scope["method"] == "POST" and header(scope, _SITE) == "cross-site"
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers for addresses and methods that do not exist."""
    assert isinstance(error, HTTPException)
    unknown = f"there is no {request.scope['path'][:100]}; /openapi.json lists the addresses"
    text = {404: unknown, 405: "another method"}.get(error.status_code, error.detail)
    if allowed := (error.headers or {}).get("Allow" if error.headers and "Allow" in error.headers else "allow"):
        text = f"{request.method} is not possible here; {allowed} is"
    reply = error_reply(RequestError(error.status_code, text))
    return Response(reply.body, error.status_code, headers=dict(error.headers or {}), media_type="application/json")


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answers for a defect: its traceback stands in the log alone."""
    reply = error_reply(_INTERNAL)
    return Response(reply.body, 500, media_type="application/json")
