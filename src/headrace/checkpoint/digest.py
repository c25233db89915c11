"""Digests that cost little time: a thread computes them while the disk moves the next bytes."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

__all__ = ["CHUNK", "Digest"]

CHUNK = 4 << 20
"""How many bytes go to the disk, or come from it, at once: they are still in a cache when they are digested."""

_WORTH_A_THREAD = 1 << 18


class Digest:
    """The SHA-256 of what it is fed; a context, which ends its thread."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> Digest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def feed(self, data: memoryview) -> None:
        """Returns when what was fed *before* has been digested; `data` must not change until the next call."""
        self._wait()
        if len(data) < _WORTH_A_THREAD:
            self._state.update(data)
        else:
            self._last = self._thread.submit(self._state.update, data)

    def hexdigest(self) -> str:
        """Returns the digest of everything."""
        self._wait()
        return self._state.hexdigest()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None
