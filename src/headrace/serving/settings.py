"""What a server may do, and how a request is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import UsageError

TOO_MANY = 429
"""The status of HTTP for requests that are refused because others wait."""


@dataclass(frozen=True)
class ServeSettings:
    """Limits of a server.

    Attributes:
        max_batch: examples that are computed together.
        max_wait_ms: how long the first request of a batch waits for others.
        max_queue: requests of one model that wait; others are refused with 429.
        max_body_bytes: of one request.
        max_held_bytes: of all requests that are being read; others are refused with 429.
        threads: that compute one batch; None for all cores.
        keep: the newest versions of a model that are loaded.
        poll_s: seconds between two looks for new versions.
        token: that requests must name; "" for none.
        any_host: whether requests may name this machine by any name; else by a loopback name alone.
        trust_pt2: whether `model.pt2` is loaded, which may hold code.
    """

    max_batch: int = 32
    max_wait_ms: float = 2.0
    max_queue: int = 256
    max_body_bytes: int = 16 << 20
    max_held_bytes: int = 32 << 20
    threads: int | None = None
    keep: int = 2
    poll_s: float = 2.0
    token: str = ""
    any_host: bool = False
    trust_pt2: bool = False

    def __post_init__(self) -> None:
        if self.max_body_bytes > self.max_held_bytes:
            raise UsageError(
                f"max_body_bytes {self.max_body_bytes:,} is more than max_held_bytes {self.max_held_bytes:,}: no "
                "request of that size could be read"
            )


class RequestError(Exception):
    """A request that is not answered as asked.

    Args:
        status: of HTTP.
        message: what happened, what was expected.
        headers: of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
