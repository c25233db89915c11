"""Signs of life between hosts: every process's marks, brought through the launcher's store to the pages of all.

rank 0   page ──┐                      ┌─► page
                ├─► store: a key a rank ─┤            four times a second
rank 1   page ──┘                      └─► page
"""

from __future__ import annotations

import struct
import threading
from time import monotonic
from typing import Any

from headrace.shared_memory.control_page import ControlPage

_EVERY_S = 0.25
_LINGER_S = 2.0

_MARKS = struct.Struct("<? 2q i 4q d q 3q 32s")
"""left, abort, stop, counter, beats, loss, end, saves, digest."""


class HeartbeatRelay:
    """A thread that tells what this process writes in its page, and writes there what the others tell.

    Args:
        store: of the launcher; for this thread alone.
        words: what its keys begin with.
        page: this process's own.
        rank: this process's.

    Attributes:
        told_s: when it last told and heard, on the monotonic clock.
        broken: why it tells no more; "" while it does.
    """

    def __init__(self, store: Any, words: str, page: ControlPage, rank: int) -> None:
        self.told_s = monotonic()
        self.broken = ""
        self._store = store
        self._keys = [f"{words}/marks/{each}" for each in range(page.ranks)]
        self._page = page
        self._rank = rank
        self._left: set[int] = set()
        self._over = threading.Event()
        # The first waits until everybody has begun.
        self._pass()
        self._thread = threading.Thread(target=self._follow, name="headrace-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells a last time."""
        self._over.set()
        self._thread.join(_LINGER_S + 1)

    def _follow(self) -> None:
        try:
            while not self._over.wait(_EVERY_S):
                self._pass()
            self._pass()
            if self._rank == 0:
                self._linger()
        except (RuntimeError, struct.error) as error:  # of the store, and of what is in it
            self.broken = str(error).partition("\n")[0]

    def _linger(self) -> None:
        # The store may end with rank 0, and the others are to hear why, not that it has ended.
        pause = threading.Event()
        give_up = monotonic() + _LINGER_S
        lost = {0, self._page.abort - 1}
        while self._page.abort and monotonic() < give_up and self._left | lost != set(range(self._page.ranks)):
            pause.wait(_EVERY_S)
            self._pass()

    def _pass(self) -> None:
        self._page.beats[self._rank][0] += 1
        self._store.set(self._keys[self._rank], self._tell())
        for rank, marks in enumerate(self._store.multi_get(self._keys)):
            if rank != self._rank:
                self._hear(rank, marks)
        self.told_s = monotonic()

    def _tell(self) -> bytes:
        page, rank = self._page, self._rank
        # First what says that the rest is there.
        end, saves = page.ends[rank][0], tuple(page.saves[rank])
        return _MARKS.pack(
            self._over.is_set(),
            page.abort,
            page.stop,
            page.counters[rank][0],
            *page.beats[rank],
            page.losses[rank][0],
            end,
            *saves,
            bytes(page.digests[rank]),
        )

    def _hear(self, rank: int, marks: bytes) -> None:
        page = self._page
        left, abort, stop, counter, *beats, loss, end, saved, size, error, digest = _MARKS.unpack(marks)
        # Each of them only if it is so: this process may mark it at the same time.
        if abort and not page.abort:
            page.abort = abort
        if stop:
            page.stop = stop
        page.counters[rank][0] = counter
        for index, value in enumerate(beats):
            page.beats[rank][index] = value
        page.losses[rank][0] = loss
        page.digests[rank][:] = digest
        page.saves[rank][1], page.saves[rank][2] = size, error
        # Last, because they say that the rest is there.
        page.saves[rank][0], page.ends[rank][0] = saved, end
        if left:
            self._left.add(rank)
