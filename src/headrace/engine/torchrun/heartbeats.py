"""Signs of life: the marks of a run's processes on one host come to the control pages of the others."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from headrace.shared_memory.control_page import ControlPage

_EVERY_S = 0.25
_TICK_S = 0.05
_LINGER_S = 2.0
_UNHEARD_S = 1.0
_NO_MORE_S = 0.6
"""For so long no other rank has given a sign of life: then none reads the reason any more."""

_MARKS = struct.Struct("<? 3q i 8q d q 32s 191p 2q")
"""left, abort, apart, stop, barrier counter; count, step, examples, pid, promotable epoch, finished, saved bytes and
error; loss; saved step, digest; address; suspected rank, and number of suspicions."""

_DECIDED = struct.Struct("<4q")
"""What rank 0 decides about each rank: restarts; epoch, primary and backup of its server view."""


class _Store(Protocol):
    """What the relay needs of `StoreClient`."""

    def set(self, key: str, value: bytes) -> None: ...
    def leave(self, key: str, value: bytes) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def lose(self, name: str) -> None: ...
    def add(self, key: str, number: int) -> int: ...
    def close(self) -> None: ...


class HeartbeatRelay:
    """A thread that copies heartbeats between the control pages of several hosts, through the store, and closes it.

        rank 0   page ──┐                        ┌─► page
                        ├─► store: a key a rank ─┤            four times a second
        rank 1   page ──┘                        └─► page

    Marks of the ranks that it does not `follow` are not taken. Where this rank `serves` a store instead of rank 0, it
    sets there what the others ask for first. After a suspicion, and when a backup can be promoted, it exchanges at
    once. On the rank that decides which processes are lost, `decide` is called after each exchange, and these follow
    each other faster.

    Attributes:
        told_s: when it last sent and received, on the monotonic clock.
        asked_s: when the last exchange that was answered began.
        broken: why it has ended early; "" while it has not.
        store: for `decide`, which is called in the relay's thread.
        leads: whether this rank's marks carry what is decided about others.
        left: ranks that have left in order.
        severed: ranks whose connection to the store has ended, in order or not.
    """

    def __init__(
        self,
        store: _Store,
        prefix: str,
        page: ControlPage,
        rank: int,
        incarnation: int = 0,
        follow: Callable[[int], bool] = lambda _: True,
        serves: bool = False,
    ) -> None:
        self.told_s = self.asked_s = monotonic()
        self.broken = ""
        self.store = store
        self.left: set[int] = set()
        self.severed: set[int] = set()
        self._prefix = prefix
        self._own = [self._key(what, rank, incarnation) for what in ("ended", "marks")]
        self._page = page
        self._rank = rank
        self._follow_rank = follow
        self.leads = (rank, incarnation) == (0, 0)
        self._decide: Callable[[], None] | None = None
        self._decides_often = False
        self._urgent = (0, 0)
        self._over = threading.Event()
        try:
            if serves:
                # Else set by the others, and by rank 0.
                self.leads = True
                for other, record in enumerate(page.ranks):
                    self._begin_rank(other, record.restarts)
            if incarnation and not rank and not serves:
                # The others follow rank 0's marks, and it does not follow its own.
                (marks,) = self.store.multi_get([self._key("marks", 0, 0)])
                self._follow_decisions(marks)
            self.store.set(self._own[0], b"")
            self.store.leave(self._own[0], b"1")
            # The first one waits until all ranks have started.
            self._exchange()
        except BaseException:
            store.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="headrace-relay", daemon=True)
        self._thread.start()

    def decide_by(self, decide: Callable[[], None], often: bool = True) -> None:
        """Makes this the rank that decides; `often` where no other thread notices losses, which costs some time."""
        self._decide, self._decides_often, self.leads = decide, often, True

    def close(self) -> None:
        """Sends this rank's marks a last time."""
        self._over.set()
        # A thread that waits for a store that does not answer ends with the process.
        unheard = self._page.abort and monotonic() - self.told_s > _UNHEARD_S
        self._thread.join(_TICK_S if self.broken or unheard else _LINGER_S + 1)

    def own_marks(self) -> bytes:
        """Returns this rank's marks, for workers that tell each other where the store may be lost."""
        return self._pack(self._rank, left=False)

    def take_marks(self, rank: int, marks: bytes) -> None:
        """Notes another rank's marks."""
        self._apply(rank, marks)

    def _follow(self) -> None:
        try:
            while not self._over.wait(_TICK_S):
                record = self._page.ranks[self._rank]
                urgent = record.suspicion.count, record.heartbeat.promotable_epoch
                if self._decides_often or urgent != self._urgent or monotonic() - self.told_s > _EVERY_S:
                    self._urgent = urgent
                    self._exchange()
                    if self._decide:
                        self._decide()
            self._exchange()
            if self._rank == 0:
                self._linger()
        except (OSError, struct.error) as error:  # of the store, and of what is in it
            self.broken = str(error).partition("\n")[0]
        finally:
            # Here, because only this thread knows when it waits no more.
            self.store.close()

    def _linger(self) -> None:
        # The store may end with rank 0, and the others must read the reason before that.
        pause = threading.Event()
        give_up = monotonic() + _LINGER_S
        lost = {0, self._page.abort - 1}
        counts: list[int] = []
        changed = monotonic()
        while self._page.abort and monotonic() < min(give_up, changed + _NO_MORE_S):
            readers = set(range(len(self._page.ranks))) - self.left - lost
            if not readers:
                break
            before, counts = counts, [self._page.ranks[rank].heartbeat.count for rank in sorted(readers)]
            changed = changed if counts == before else monotonic()
            pause.wait(_TICK_S)
            self._exchange()

    def _exchange(self) -> None:
        began = monotonic()
        self._page.ranks[self._rank].heartbeat.count += 1
        self.store.set(self._own[1], self._pack(self._rank, self._over.is_set()))
        first = self._key("marks", 0, 0)
        if self.leads and self._own[1] != first:
            # There a process that comes back looks for what is decided.
            self.store.set(first, self._marks(0, left=False) + self._decisions())
        restarts = [record.restarts for record in self._page.ranks]
        keys = [self._key(what, rank, now) for what in ("ended", "marks") for rank, now in enumerate(restarts)]
        # At once: what a process whose connection has ended told last is then there.
        told = self.store.multi_get(keys)
        for rank, marks in enumerate(told[len(restarts) :]):
            # Not those of a process that rank 0, whose marks are the first, says is lost.
            is_now = restarts[rank] == self._page.ranks[rank].restarts
            if rank != self._rank and is_now and self._follow_rank(rank):
                self._apply(rank, marks)
        self.severed = {rank for rank, ended in enumerate(told[: len(restarts)]) if ended}
        self.told_s, self.asked_s = monotonic(), began

    def follow_next(self, rank: int) -> None:
        """Lets all follow the next process of a rank, on the rank that decides; nothing that this one tells counts."""
        record = self._page.ranks[rank]
        record.heartbeat.pid = 0
        record.address.clear()
        self.left.discard(rank)
        self._begin_rank(rank, record.restarts + 1)
        # Last, because the others then ask for the next one's marks.
        record.restarts += 1

    def _begin_rank(self, rank: int, incarnation: int) -> None:
        for what, value in (("ended", b""), ("marks", self._pack(rank, left=False))):
            self.store.set(self._key(what, rank, incarnation), value)

    def _key(self, what: str, rank: int, incarnation: int) -> str:
        return f"{self._prefix}/{what}/{rank}/{incarnation}"

    def _pack(self, rank: int, left: bool) -> bytes:
        marks = self._marks(rank, left)
        return marks + self._decisions() if self.leads and rank == self._rank else marks

    def _marks(self, rank: int, left: bool) -> bytes:
        record = self._page.ranks[rank]
        heartbeat, saved = record.heartbeat, record.saved
        # Read first, because they say that the rest is complete.
        finished, saved_step = heartbeat.finished, saved.step_plus_1
        return _MARKS.pack(
            *(left, self._page.abort, self._page.apart, self._page.stop, record.barrier_counter, heartbeat.count),
            *(heartbeat.step, heartbeat.examples, heartbeat.pid, heartbeat.promotable_epoch, finished),
            *(saved.nbytes, saved.error, heartbeat.loss, saved_step, bytes(saved.digest)),
            *(record.address.read().encode(), record.suspicion.rank, record.suspicion.count),
        )

    def _decisions(self) -> bytes:
        return b"".join(_DECIDED.pack(each.restarts, *each.server_view.read()) for each in self._page.ranks)

    def _apply(self, rank: int, marks: bytes) -> None:
        page, record = self._page, self._page.ranks[rank]
        heartbeat, saved = record.heartbeat, record.saved
        left, abort, apart, stop, *others = _MARKS.unpack_from(marks)
        counter, *numbers, loss, saved_step, digest, address, suspect, count = others
        if len(marks) > _MARKS.size:
            self._follow_decisions(marks)
        # Each only where it is set: this process may set it at the same time.
        if abort and not page.abort:
            page.apart, page.abort = apart, abort
        if stop:
            page.stop = stop
        record.barrier_counter = counter
        heartbeat.count, heartbeat.step, heartbeat.examples, heartbeat.pid, *numbers = numbers
        heartbeat.promotable_epoch, finished, saved.nbytes, saved.error = numbers
        heartbeat.loss = loss
        if address and not record.address.length:
            record.address.publish(address.decode())
        record.suspicion.rank, record.suspicion.count = suspect, count
        saved.digest[:] = list(digest)
        # Last, because they say that the rest is complete.
        saved.step_plus_1, heartbeat.finished = saved_step, finished
        if left:
            self.left.add(rank)

    def _follow_decisions(self, marks: bytes) -> None:
        for record, (restarts, *view) in zip(self._page.ranks, _DECIDED.iter_unpack(marks[_MARKS.size :]), strict=True):
            # They only grow, and one that has led before may tell older ones.
            if restarts > record.restarts:
                # Before, because from then on the next process may tell its own.
                record.address.clear()
                record.restarts = restarts
            if view[0] > record.server_view.epoch:
                record.server_view.publish(*view)
