"""A store of torch.distributed in a run's own, which only the processes of the run can read and write."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Protocol

import torch.distributed as dist


class KeyValues(Protocol):
    """What the processes of a run find each other by; `multi_get` waits for keys, and raises TimeoutError."""

    def set(self, key: str, value: str | bytes) -> None: ...

    def multi_get(self, keys: Sequence[str]) -> list[bytes]: ...

    def add(self, key: str, number: int) -> int: ...

    def close(self) -> None: ...


class RunStore(dist.Store):  # type: ignore[misc, name-defined]
    """Keys that begin with `prefix`; who waits for one gives up after `timeout_s`.

    `client` is this store's alone: threads of a backend use it, too.
    """

    def __init__(self, client: KeyValues, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._client, self._prefix, self._timeout_s = client, prefix, timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(self._prefix + key, value)
        self._client.add(self._mark(key), 1)

    def get(self, key: str) -> bytes:
        return self._values([key], self._timeout_s)[0]

    def add(self, key: str, number: int) -> int:
        self._client.add(self._mark(key), 1)
        return self._client.add(self._prefix + key, number)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there; waits for none."""
        return all(self._client.add(self._mark(key), 0) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def _mark(self, key: str) -> str:
        return f"{self._prefix}there/{key}"

    def _values(self, keys: Sequence[str], within_s: float) -> list[bytes]:
        give_up = monotonic() + within_s
        while True:
            try:
                return self._client.multi_get([self._prefix + key for key in keys])
            except TimeoutError:
                if monotonic() > give_up:
                    raise
