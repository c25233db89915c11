"""One request and its answer: bodies of bounded size, JSON, errors in one form."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.serving.settings import RequestError
from headrace.web.access import WHOLE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = (b"content-type", b"application/json")
_MOST_JSON_BYTES = 4 << 20
_MOST_CONTAINERS = 1 << 17
"""Lists, objects and texts: each takes 20 times the memory of its two characters."""
_READ_S = 30.0
_UNTIMED = nullcontext()
_PART_BYTES = 256 << 10
_DROPPED = 4
"""Of a body that is too large, so many times the limit is read and forgotten before the connection is closed."""


class BodyBudget:
    """The bytes of all requests that are being read or answered, or of all answers that are being sent.

    Args:
        most_one: bytes of one.
        most_all: bytes of all together; a single one may have more.
        what: they are, for an error.
    """

    def __init__(self, most_one: int, most_all: int, what: str = "requests") -> None:
        self.most_one, self._most_all, self._what = most_one, most_all, what
        self._held = 0

    def take(self, count: int) -> None:
        """Counts bytes; raises RequestError 429 where there are too many with those of others."""
        if self._held and self._held + count > self._most_all:
            text = f"{self._what} of too many bytes wait already; come again in 1 s"
            raise RequestError(429, text, {"Retry-After": "1"})
        self._held += count

    def give_back(self, count: int) -> None:
        """Ends what `take` began."""
        self._held -= count


@dataclass(slots=True)
class HttpAnswer:
    """An answer: status, body, headers."""

    body: bytes
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [JSON])

    async def send(self, send: Send) -> None:
        """Sends it."""
        length = (b"content-length", str(len(self.body)).encode())
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        # By parts: each waits until the client has read most of the one before.
        whole = len(self.body) // _PART_BYTES * _PART_BYTES
        for begin in range(0, whole, _PART_BYTES):
            part = self.body[begin : begin + _PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": self.body[whole:] if whole else self.body})


Answer = Callable[[Scope, Receive], Awaitable[HttpAnswer]]


def json_reply(document: Any) -> HttpAnswer:
    """Returns a document as JSON; arrays of numpy may be in it."""
    return HttpAnswer(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY))


def error_reply(error: RequestError) -> HttpAnswer:
    """Returns `{"error": message}`."""
    headers = [JSON, *((name.encode(), value.encode()) for name, value in error.headers.items())]
    return HttpAnswer(orjson.dumps({"error": error.message}), error.status, headers)


def header(scope: Scope, name: bytes) -> str | None:
    """Returns a header of a request by its name in lower case; the first if there are several."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def is_number(text: str) -> bool:
    """Tells whether a header is a whole number: of ASCII digits alone, because Latin-1 has others, as "²"."""
    return text.isascii() and text.isdecimal()


async def read_body(scope: Scope, receive: Receive, budget: BodyBudget) -> bytes:
    """Returns the body of a request, whose bytes stay counted until `budget.give_back(len(body))`.

    Raises:
        RequestError: 400, it ended early; 408, it took too long; 413, it is too large; 429, too much is being read.
    """
    declared = header(scope, b"content-length")
    is_larger = declared is not None and is_number(declared) and int(declared) > budget.most_one
    parts: list[bytes] = []
    count = 0
    try:
        # A body that is there already needs no timer, which takes a tenth of what a request does.
        async with _UNTIMED if scope.get(WHOLE) else asyncio.timeout(_READ_S):
            if is_larger:
                await _drop(receive, _DROPPED * budget.most_one)
                raise _too_large(budget)
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise RequestError(400, "the request ended before its body")
                part = message.get("body", b"")
                if count + len(part) > budget.most_one:
                    if message.get("more_body", False):
                        await _drop(receive, _DROPPED * budget.most_one)
                    raise _too_large(budget)
                budget.take(len(part))
                count += len(part)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        budget.give_back(count)
        raise RequestError(408, f"the body did not come within {_READ_S:.0f} s") from None
    except BaseException:
        budget.give_back(count)
        raise


async def _drop(receive: Receive, most: int) -> None:
    """Reads the rest of a body and forgets it: a client that still sends would see a reset, not the answer."""
    count = 0
    while count <= most:
        message = await receive()
        count += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def parse_json(content: bytes) -> dict[str, Any]:
    """Returns a JSON object of bounded size.

    Raises:
        RequestError: 400, it is none; 413, it is too large.
    """
    if len(content) > _MOST_JSON_BYTES:
        raise RequestError(
            413, f"{len(content):,} bytes of JSON, at most {_MOST_JSON_BYTES:,}; send tensors as binary data"
        )
    if sum(map(content.count, (b"[", b"{", b'"'))) > _MOST_CONTAINERS:
        raise RequestError(
            413, f"more than {_MOST_CONTAINERS:,} lists, objects and texts; send tensors flat, or as binary data"
        )
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error!s:.200}") from None
    if not isinstance(document, dict):
        raise RequestError(400, f"expected a JSON object, got a {_TYPES.get(type(document), type(document).__name__)}")
    return document


def expect(document: Mapping[str, Any], key: str, kind: type, where: str, default: Any = None) -> Any:
    """Returns a value of an object, or the default for none and null; raises RequestError 400 for another type."""
    return default if document.get(key) is None else require(document, key, kind, where)


def require(document: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """Returns a value of an object; raises RequestError 400 where it is not of the type."""
    value = document.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RequestError(
            400, f"{where}: {key} is a {_TYPES.get(type(value), type(value).__name__)}, expected a {_TYPES[kind]}"
        )
    return value


def _too_large(budget: BodyBudget) -> RequestError:
    return RequestError(413, f"a request has at most {budget.most_one:,} bytes", {"Connection": "close"})


_TYPES: Mapping[type, str] = {
    dict: "object",
    list: "list",
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
}
