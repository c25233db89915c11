"""The page on which a model can be tried in a browser: the exported page's fields and answers, which ask the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

FOLDER = "/page/"
"""Where the page's files are."""
_KINDS = {".js": b"text/javascript", ".css": b"text/css"}
_RULES = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' blob: data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)


@cache
def page_text() -> bytes:
    """Returns the page."""
    return (files("headrace.serving") / "page" / "index.html").read_bytes()


@cache
def page_files() -> Mapping[str, bytes]:
    """Returns what the page asks for, by path."""
    shared = files("headrace.export.browser") / "page"
    found = {name: shared / name for name in ("page.css", "panel.js", "tensors.js")}
    found["serve.js"] = files("headrace.serving") / "page" / "serve.js"
    return {FOLDER + name: file.read_bytes() for name, file in found.items()}


def page_headers(path: str = ".html") -> list[tuple[bytes, bytes]]:
    """Returns headers by which a browser runs the page's own scripts alone, and asks nothing but this server."""
    kind = _KINDS.get(path[path.rindex(".") :], b"text/html")
    return [
        (b"content-type", kind + b"; charset=utf-8"),
        (b"content-security-policy", "; ".join(_RULES).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-cache"),
    ]
