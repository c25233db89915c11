"""The page on which a model can be tried in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

_PATH = Path(__file__).with_name("page.html")


@cache
def page_text() -> bytes:
    """Returns the page."""
    return _PATH.read_bytes()


@cache
def page_headers() -> list[tuple[bytes, bytes]]:
    """Returns headers by which a browser runs the page's own script alone, and asks nothing but this server."""
    text = page_text()
    script, style = (re.search(rb"<%s>(.*?)</%s>" % (kind, kind), text, re.DOTALL) for kind in (b"script", b"style"))
    assert script is not None
    assert style is not None
    rules = [
        "default-src 'none'",
        f"script-src '{_digest(script[1])}'",
        f"style-src '{_digest(style[1])}'",
        "connect-src 'self'",
        "img-src blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", "; ".join(rules).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]


def _digest(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
