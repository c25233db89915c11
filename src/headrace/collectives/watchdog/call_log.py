"""Writes down each call of a group of devices before it is made, at the cost of about a microsecond."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from headrace.collectives.watchdog.boards import LEFT, call_of, digest_of, said, take
from headrace.errors import CollectiveFailed, in_one_line
from headrace.shared_memory.calls import APART, REMEMBERED, GroupCalls
from headrace.shared_memory.control_page import Heartbeat

VERDICT_S = 3.0
"""How long a lost process may take to be noticed after a connection to it has broken."""


class Waits:
    """For how long this rank has waited for others.

    Attributes:
        by_rank: in seconds, of each rank that has not come.
        numbers: how often each of them has come.
        told_s: for how long it had waited when it was last said.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, float] = {}
        self.numbers: dict[int, int] = {}
        self.told_s = 0.0

    def note(self, late: dict[int, int], passed_s: float) -> dict[int, float]:
        """Notes who has not come, and how often each has before; one that comes, and is late again, begins anew."""
        again = {rank for rank, number in late.items() if self.numbers.get(rank) == number}
        self.by_rank = {rank: self.by_rank[rank] + passed_s if rank in again else 0.0 for rank in late}
        self.numbers = dict(late)
        return self.by_rank


class CallLog:
    """The calls of one group of devices; `ranks` are the group's in the run, `me` is this one of them.

    Attributes:
        key: tells the group from others, alike on all its ranks.
        others: the other ranks of the group.
        calls: what all ranks of the host read.
        abort: ends what waits in the group, also on the device.
        problem: why no call can be made any more; None while one can. Then `ended` is set.
        watched: whether a watchdog looks.
        has_ended: tells whether the last call has, without waiting; None before there is one.
        failure: tells why the last call has failed, without waiting; "" while it has not.
        waits: who has not come to this rank's last call.
        captures: whether the device records what it is told, for later: such calls wait for no rank, and none is noted.
    """

    def __init__(self, ranks: Sequence[int], me: int, key: int, calls: GroupCalls, heartbeat: Heartbeat) -> None:
        self.key = key
        self.ranks, self.me = tuple(ranks), me
        self.others = [rank for rank in ranks if rank != me]
        self.calls = calls
        take(calls, self.key)
        self.abort: Callable[[], None] = lambda: None
        self.problem: Exception | None = None
        self.ended = threading.Event()
        self.watched = self.left = False
        self.has_ended: Callable[[], bool] | None = None
        self.failure: Callable[[], str] = lambda: ""
        self.failed_s = 0.0
        self.waits = Waits()
        self.captures: Callable[[], bool] = lambda: False
        self.differs_s = 0.0
        self.stuck_s = 0.0
        self.stuck_at = 0
        self._heartbeat, self._numbers, self._digest = heartbeat, itertools.count(1), 0
        self._remembered = calls.calls
        self._futures: bool | None = None

    def begin(self, name: bytes, nbytes: int, dtype: object = None) -> None:
        """Notes a call that is about to be made; raises where the group has failed."""
        self.require()
        if self.captures():
            return
        number = next(self._numbers)
        call = self._remembered[number % REMEMBERED]
        call.number = 0
        kind = name, dtype
        if kind not in _CODES:
            type_name = str(dtype or "").removeprefix("torch.").encode()
            _CODES[kind] = zlib.crc32(name + b" " + type_name), type_name[:15]
        code, call.dtype = _CODES[kind]
        call.name, call.nbytes, call.round = name, nbytes, self._heartbeat.step
        # Of numbers alone, because those of texts differ from process to process.
        self._digest = call.digest = hash((self._digest, code, nbytes))
        call.number = number
        if not number % APART:
            kept = digest_of(self.calls, number)
            kept.number = 0
            kept.digest = self._digest
            kept.number = number
        # Last, because it says that the rest is there.
        self.calls.number = number

    def follow(self, work: Any) -> None:
        """Notes how to ask whether the last call has ended; where the backend allows it, its tensors are not kept."""
        if self.captures():
            return
        if self._futures is None:
            self._futures = _has_future(work)
        if self._futures:
            result = work.get_future_result()
            self.has_ended, self.failure = result.done, partial(_failure, result)
        else:
            self.has_ended = work.is_completed

    def wait(self, work: Any) -> None:
        """Waits for a call, on the device where its backend can."""
        with self.explaining():
            work.wait()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raises why a call or the device has failed in the place of its own error, if the watchdog finds it."""
        try:
            yield
        except RuntimeError as error:
            if self.watched:
                self.ended.wait(VERDICT_S)
            if self.problem:
                raise self.problem from error
            raise

    def require(self) -> None:
        """Raises why the group has failed: what the device computes of a call that was aborted is nonsense."""
        if self.problem:
            raise self.problem

    def require_success(self) -> None:
        """Raises where the last call has failed: what the device computes of it is nonsense."""
        self.require()
        if why := self.failure():
            call = said(call_of(self.calls, self.calls.number))
            raise CollectiveFailed(
                f"{call} has failed on rank {self.me}: {why}; the log of this rank and the errors of the others say "
                "more, and with NCCL_DEBUG=INFO the library's own; look for a lost rank and at the network"
            )

    def leave(self) -> None:
        """Says that this rank is done with the group: no other rank waits for it."""
        self.left = True
        self.calls.number = LEFT

    def fail(self, problem: Exception) -> None:
        """Lets all further calls raise an error."""
        self.problem = problem
        self.ended.set()


_CODES: dict[tuple[bytes, object], tuple[int, bytes]] = {}
"""A number and the type's name, by what is called with which type."""


_FAILED = {1: "it was not done in its time", 2: "its communicator has failed"}
"""What torch's WorkResult says of a call that is done; it may be 100, unknown."""


def _failure(result: Any) -> str:
    if not result.done():
        return ""
    try:
        return _FAILED.get(result.value(), "")
    except RuntimeError as error:
        return in_one_line(error)


def _has_future(work: Any) -> bool:
    try:
        work.get_future_result()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
