"""What the server says of its models: names, versions, forms, the files that the page shows, the repository."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version as installed_version
from typing import Any

from headrace.errors import DataError
from headrace.export.signature import open_file
from headrace.serving.catalog import Catalog
from headrace.serving.programs import SAMPLE
from headrace.serving.protocols.http import (
    Answer,
    BodyBudget,
    HttpAnswer,
    Receive,
    Scope,
    expect,
    json_reply,
    parse_json,
    read_body,
)
from headrace.serving.protocols.open_inference import model_metadata, server_metadata
from headrace.serving.protocols.openapi import openapi_document
from headrace.serving.protocols.tensorflow_rest import model_status
from headrace.serving.settings import RequestError
from headrace.spec.plain import to_plain


class Description:
    """Answers all that is no prediction, and is about models.

    Args:
        budget: of the bodies that are read.
        with_token: whether requests must name one.
    """

    def __init__(self, catalog: Catalog, budget: BodyBudget, with_token: bool) -> None:
        self._catalog, self._budget, self._with_token = catalog, budget, with_token
        self._version = installed_version("headrace")

    def routes(self) -> Iterator[tuple[str, str, Answer]]:
        """Yields method, path and answer."""
        at, old, repository = "/v2/models/{model}", "/v1/models/{model}", "/v2/repository"
        yield "GET", "/v2", self._server
        yield "GET", "/v2/models", self._models
        for place in ("", "/versions/{version}"):
            yield "GET", at + place, self._model
            yield "GET", f"{at}{place}/ready", self._ready
            yield "GET", f"{at}{place}/signature.json", self._signature
            yield "GET", f"{at}{place}/{SAMPLE}", self._sample
            yield "GET", f"{old}{place}/metadata", self._metadata
            yield "GET", old + place, self._status
        yield "POST", f"{repository}/index", self._index
        yield "POST", f"{repository}/models/{{model}}/load", self._load
        yield "POST", f"{repository}/models/{{model}}/unload", self._unload
        yield "GET", "/openapi.json", self._openapi

    async def _server(self, scope: Scope, receive: Receive) -> HttpAnswer:
        return json_reply(server_metadata(self._version))

    async def _models(self, scope: Scope, receive: Receive) -> HttpAnswer:
        models = sorted(self._catalog.models.items())
        return json_reply({"models": [model_metadata(model, model.newest()) for _, model in models]})

    async def _model(self, scope: Scope, receive: Receive) -> HttpAnswer:
        return json_reply(model_metadata(*self._catalog.find(scope["path_params"])))

    async def _ready(self, scope: Scope, receive: Receive) -> HttpAnswer:
        model, version = self._catalog.find(scope["path_params"])
        return json_reply({"name": model.name, "version": str(version.number), "ready": True})

    async def _status(self, scope: Scope, receive: Receive) -> HttpAnswer:
        model, version = self._catalog.find(scope["path_params"])
        return json_reply(model_status(model, version if "version" in scope["path_params"] else None))

    async def _metadata(self, scope: Scope, receive: Receive) -> HttpAnswer:
        _, version = self._catalog.find(scope["path_params"])
        facts = version.facts
        return json_reply(
            {
                "model_spec": {"name": version.name, "version": str(version.number)},
                "metadata": {"task": facts.task, "labels": facts.labels, "metrics": dict(facts.metrics)},
            }
        )

    async def _signature(self, scope: Scope, receive: Receive) -> HttpAnswer:
        return json_reply(to_plain(self._catalog.find(scope["path_params"])[1].facts))

    async def _sample(self, scope: Scope, receive: Receive) -> HttpAnswer:
        model, version = self._catalog.find(scope["path_params"])
        folder = model.path(version.number)

        def read() -> bytes:
            return open_file(folder, version.facts, SAMPLE).read_bytes()

        try:
            content = await asyncio.to_thread(read)
        except (DataError, OSError):
            text = f"the folder of {model.name} version {version.number} no longer holds the {SAMPLE} that was loaded"
            raise RequestError(404, text) from None
        return HttpAnswer(content, 200, [(b"content-type", b"application/octet-stream")])

    async def _index(self, scope: Scope, receive: Receive) -> HttpAnswer:
        ready = expect(await self._document(scope, receive), "ready", bool, "the request", False)
        rows = [
            {
                "name": model.name,
                "version": str(number),
                "state": "UNAVAILABLE" if reason else "READY",
                "reason": reason,
            }
            for _, model in sorted(self._catalog.models.items())
            for number, reason in sorted({**dict.fromkeys(model.versions, ""), **model.reasons()}.items())
        ]
        return json_reply([row for row in rows if not (ready and row["reason"])])

    async def _load(self, scope: Scope, receive: Receive) -> HttpAnswer:
        model = self._catalog.model(scope["path_params"]["model"])
        if await self._document(scope, receive):
            raise RequestError(400, "a model is loaded as its folder is; parameters and files in a request are refused")
        await self._catalog.look(model)
        if reasons := model.reasons():
            newest = max(reasons)
            raise RequestError(400, f"version {newest} of {model.name} is not loaded: {reasons[newest]}")
        return json_reply({})

    async def _unload(self, scope: Scope, receive: Receive) -> HttpAnswer:
        model = self._catalog.model(scope["path_params"]["model"])
        what = "move a version out of it" if model.numbered else "start the server without it"
        raise RequestError(400, f"{model.name} is loaded because its folder is served; {what}")

    async def _document(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        body = await read_body(scope, receive, self._budget)
        self._budget.give_back(len(body))
        return parse_json(body) if body else {}

    async def _openapi(self, scope: Scope, receive: Receive) -> HttpAnswer:
        return json_reply(openapi_document(self._catalog, self._version, self._with_token))
