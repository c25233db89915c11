"""Digests that cost little time: a thread computes them while the disk moves the next bytes."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

CHUNK = 4 << 20
"""How many bytes go to the disk, or come from it, at once."""

_WORTH_A_THREAD = 1 << 18


class Digest:
    """The SHA-256 of what it is fed; a context, which ends its thread.

    Args:
        behind_bytes: how far it may fall behind, where what it is fed stays as it is until then.
    """

    def __init__(self, behind_bytes: int = 0) -> None:
        self._state = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._behind_bytes = behind_bytes
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._waiting_bytes = 0

    def __enter__(self) -> Digest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def feed(self, data: memoryview, behind_bytes: int | None = None) -> None:
        """Returns when what was fed *before* has been digested, but for the last `behind_bytes` of it.

        `data` must not change until then.

        Args:
            data: any bytes.
            behind_bytes: less than the usual, where `data` takes memory of its own.
        """
        if len(data) < _WORTH_A_THREAD:
            self._wait(0)
            self._state.update(data)
            return
        self._wait(self._behind_bytes if behind_bytes is None else min(behind_bytes, self._behind_bytes))
        self._waiting.append((len(data), self._thread.submit(self._state.update, data)))
        self._waiting_bytes += len(data)

    def hexdigest(self) -> str:
        """Returns the digest of everything."""
        self._wait(0)
        return self._state.hexdigest()

    def _wait(self, behind_bytes: int) -> None:
        while self._waiting_bytes > behind_bytes:
            count, digested = self._waiting.popleft()
            digested.result()
            self._waiting_bytes -= count
