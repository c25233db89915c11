"""Signs of life: the marks of a run's processes on one host come to the control pages of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import Structure, c_int64, sizeof
from time import monotonic

from headrace.collectives.watchdog.telling import note_remembered, note_summary, remembered, summary
from headrace.engine.torchrun.key_value import StoreClient
from headrace.shared_memory.control_page import Address, ControlPage, Heartbeat, SavedPart, ServerView, Suspicion

_EVERY_S = 0.25
_TICK_S = 0.05
_LINGER_S = 2.0
_UNHEARD_S = 1.0
_NO_MORE_S = 0.6
"""For so long no other rank has given a sign of life: then none reads the reason any more."""


class _Marks(Structure):
    """What a process tells of its run and of itself; `left` is 1 where it has left the run in order.

    A summary of the collectives that it has called follows, of `summary_nbytes`. All that it remembers of them has a
    key of its own in the store, and `calls` counts what was there: it is of use where ranks wait for each other.
    """

    left: int
    abort: int
    apart: int
    stop: int
    barrier_counter: int
    heartbeat: Heartbeat
    saved: SavedPart
    address: Address
    suspicion: Suspicion
    summary_nbytes: int
    calls: int
    _fields_ = [
        *((name, c_int64) for name in ("left", "abort", "apart", "stop", "barrier_counter")),
        ("heartbeat", Heartbeat),
        ("saved", SavedPart),
        ("address", Address),
        ("suspicion", Suspicion),
        *((name, c_int64) for name in ("summary_nbytes", "calls")),
    ]


class _Decision(Structure):
    """What the rank that decides has decided about a rank."""

    restarts: int
    server_view: ServerView
    _fields_ = [("restarts", c_int64), ("server_view", ServerView)]


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
        store, prefix: where `decide`, which is called in the relay's thread, finds what belongs to the run.
        leads: whether this rank's marks carry what is decided about others.
        left: ranks that have left in order.
        severed: ranks whose connection to the store has ended, in order or not.
    """

    def __init__(
        self,
        store: StoreClient,
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
        self.prefix = prefix
        self._own = [self._key(what, rank, incarnation) for what in ("ended", "marks", "calls")]
        self._calls, self._told_calls = b"", 0
        self._known_calls: dict[int, int] = {}
        self._new_calls: dict[int, int] = {}
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

    def own_marks(self, left: bool = False) -> bytes:
        """Returns this rank's marks, also for workers that tell each other where the store may be lost."""
        return self._marks(self._rank, left) + (self._decisions() if self.leads else b"")

    def take_marks(self, rank: int, marks: bytes) -> None:
        """Notes another rank's marks."""
        page, record, told = self._page, self._page.ranks[rank], _Marks.from_buffer_copy(marks)
        self._follow_decisions(marks)
        # Each only where it is set: this process may set it at the same time.
        if told.abort and not page.abort:
            page.apart, page.abort = told.apart, told.abort
        if told.stop:
            page.stop = told.stop
        record.barrier_counter = told.barrier_counter
        if told.address.length and not record.address.length:
            record.address = told.address
        record.suspicion, record.saved = told.suspicion, told.saved
        note_summary(record.board, marks[sizeof(_Marks) : sizeof(_Marks) + told.summary_nbytes])
        if told.calls > self._known_calls.get(rank, 0):
            self._new_calls[rank] = told.calls
        # Last, because its `finished` says that the rest is complete.
        record.heartbeat = told.heartbeat
        if told.left:
            self.left.add(rank)

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
        except (OSError, ValueError) as error:  # of the store, and of what is in it
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
        self._tell_calls()
        self.store.set(self._own[1], self.own_marks(left=self._over.is_set()))
        first = self._key("marks", 0, 0)
        if self.leads and self._own[1] != first:
            # There a process that comes back looks for what is decided.
            self.store.set(first, self._marks(0) + self._decisions())
        restarts = [record.restarts for record in self._page.ranks]
        keys = [self._key(what, rank, now) for what in ("ended", "marks") for rank, now in enumerate(restarts)]
        # At once: what a process whose connection has ended told last is then there.
        told = self.store.multi_get(keys)
        for rank, marks in enumerate(told[len(restarts) :]):
            # Not those of a process that rank 0, whose marks are the first, says is lost.
            is_now = restarts[rank] == self._page.ranks[rank].restarts
            if rank != self._rank and is_now and self._follow_rank(rank):
                self.take_marks(rank, marks)
        self._hear_calls(restarts)
        self.severed = {rank for rank, ended in enumerate(told[: len(restarts)]) if ended}
        self.told_s, self.asked_s = monotonic(), began

    def _tell_calls(self) -> None:
        """Tells all that is remembered of this rank's collectives, if it has changed and others may need it."""
        board = self._page.ranks[self._rank].board
        if board.seeks and (calls := remembered(board)) != self._calls:
            self.store.set(self._own[2], calls)
            self._calls, self._told_calls = calls, self._told_calls + 1

    def _hear_calls(self, restarts: list[int]) -> None:
        new, self._new_calls = self._new_calls, {}
        if new:
            told = self.store.multi_get([self._key("calls", rank, restarts[rank]) for rank in new])
            for rank, calls in zip(new, told, strict=True):
                note_remembered(self._page.ranks[rank].board, calls)
            self._known_calls |= new

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
        marks = self.own_marks() if rank == self._rank else self._marks(rank)
        for what, value in (("ended", b""), ("marks", marks)):
            self.store.set(self._key(what, rank, incarnation), value)

    def _key(self, what: str, rank: int, incarnation: int) -> str:
        return f"{self.prefix}/{what}/{rank}/{incarnation}"

    def _marks(self, rank: int, left: bool = False) -> bytes:
        page, record = self._page, self._page.ranks[rank]
        # Read first, because its `finished` says that the rest is complete.
        heartbeat = Heartbeat.from_buffer_copy(record.heartbeat)
        own = (record.barrier_counter, heartbeat, record.saved, record.address, record.suspicion)
        board, calls = (summary(record.board), self._told_calls) if rank == self._rank else (b"", 0)
        return bytes(_Marks(left, page.abort, page.apart, page.stop, *own, len(board), calls)) + board

    def _decisions(self) -> bytes:
        return b"".join(
            bytes(_Decision(record.restarts, ServerView(*record.server_view.read()))) for record in self._page.ranks
        )

    def _follow_decisions(self, marks: bytes) -> None:
        """Follows what is decided about the ranks, if these are the marks of the rank that decides."""
        after = sizeof(_Marks) + _Marks.from_buffer_copy(marks).summary_nbytes
        if len(marks) == after:
            return
        records = self._page.ranks
        decisions = (_Decision * len(records)).from_buffer_copy(marks, after)
        for record, decided in zip(records, decisions, strict=True):
            # They only grow, and one that has led before may tell older ones.
            if decided.restarts > record.restarts:
                # Before, because from then on the next process may tell its own.
                record.address.clear()
                record.restarts = decided.restarts
            view = decided.server_view
            if view.epoch > record.server_view.epoch:
                record.server_view.publish(view.epoch, view.primary, view.backup)
