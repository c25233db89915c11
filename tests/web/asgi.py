"""Requests to an ASGI application in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def http_scope(method: str, address: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a server tells an application of a request; a query may stand behind the path."""
    path, _, query = address.partition("?")
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
