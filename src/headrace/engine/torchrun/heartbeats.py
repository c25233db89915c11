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

_MARKS = struct.Struct("<? 2q i 7q d q 32s")
"""left, abort, stop, barrier counter; count, step, examples, pid, finished, saved bytes and error; loss; saved step,
digest."""


class HeartbeatRelay:
    """A thread that tells what this process writes in its page, and writes there what the others tell.

    Attributes:
        told_s: when it last told and heard, on the monotonic clock.
    """

    def __init__(self, store: Any, words: str, page: ControlPage, rank: int) -> None:
        self.told_s = monotonic()
        self.broken = ""
        self._store = store
        self._keys = [f"{words}/marks/{each}" for each in range(len(page.ranks))]
        self._page = page
        self._rank = rank
        self._left: set[int] = set()
        self._over = threading.Event()
        # The first one waits until all ranks have begun.
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
        while self._page.abort and monotonic() < give_up and self._left | lost != set(range(len(self._page.ranks))):
            pause.wait(_EVERY_S)
            self._pass()

    def _pass(self) -> None:
        self._page.ranks[self._rank].heartbeat.count += 1
        self._store.set(self._keys[self._rank], self._tell())
        for rank, marks in enumerate(self._store.multi_get(self._keys)):
            if rank != self._rank:
                self._hear(rank, marks)
        self.told_s = monotonic()

    def _tell(self) -> bytes:
        record = self._page.ranks[self._rank]
        heartbeat, saved = record.heartbeat, record.saved
        # First what says that the rest is there.
        finished, saved_step = heartbeat.finished, saved.step_plus_1
        return _MARKS.pack(
            *(self._over.is_set(), self._page.abort, self._page.stop, record.barrier_counter),
            *(heartbeat.count, heartbeat.step, heartbeat.examples, heartbeat.pid, finished, saved.nbytes, saved.error),
            *(heartbeat.loss, saved_step, bytes(saved.digest)),
        )

    def _hear(self, rank: int, marks: bytes) -> None:
        page = self._page
        record = page.ranks[rank]
        heartbeat, saved = record.heartbeat, record.saved
        left, abort, stop, counter, *numbers, loss, saved_step, digest = _MARKS.unpack(marks)
        # Each of them only if it is so: this process may mark it at the same time.
        if abort and not page.abort:
            page.abort = abort
        if stop:
            page.stop = stop
        record.barrier_counter = counter
        heartbeat.count, heartbeat.step, heartbeat.examples, heartbeat.pid, finished, saved.nbytes, saved.error = (
            numbers
        )
        heartbeat.loss = loss
        saved.digest[:] = list(digest)
        # Last, because they say that the rest is there.
        saved.step_plus_1, heartbeat.finished = saved_step, finished
        if left:
            self._left.add(rank)
