"""A thread beside a worker that sees who has not come to a collective of devices, which itself waits in silence.

    every rank   writes down a call before it makes it       (CallLog, in the control page)
    watchdog     compares its rank's calls with the others'   four times a second

    another rank is behind         it is waited for: after some seconds a notice says who waits for whom
                                   after collective_timeout_s the run ends
    others have called other       the run ends, with what each has called
    all have come, and it goes on  after collective_timeout_s the run ends, with what each has called
    a process is lost              the run ends (the check of the group of processes says so)

At the end of the run the communicators are aborted, so that a worker that waits for its device goes on, to the error.
"""

from __future__ import annotations

import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import NoReturn

from headrace.collectives.watchdog.activity import activity_of
from headrace.collectives.watchdog.boards import LEFT, call_of, group_of, last_call, listed, said
from headrace.collectives.watchdog.call_log import VERDICT_S, CallLog, Waits
from headrace.collectives.watchdog.difference import CallDifference
from headrace.collectives.watchdog.flight_record import FlightRecord
from headrace.errors import CollectiveFailed, HeadraceError, in_one_line
from headrace.shared_memory.barrier import reached
from headrace.shared_memory.calls import CHARACTERS, REMEMBERED, GroupCalls
from headrace.shared_memory.control_page import RankRecord
from headrace.shared_memory.ends import FinishedRanks

_LOOK_EVERY_S = 0.25
_GAP_S = 0.5
"""Longer than between two looks: a watchdog that stood still itself accuses no rank."""
_SEEKS_S = 0.6
_TELLS_S = 1.5
"""How long other hosts may take to tell all their calls, once they are asked."""
_NOTICE_S = 5.0
_AGAIN = 4
_BRIEFLY_S = 3.0
_LAST_RESORT_S = 30.0
"""How long a worker may take to its error after the communicators are aborted; then its process is ended."""


class Watchdog:
    """Watches the groups of devices of one worker.

    Args:
        records: of all workers, by rank, in the control page.
        me: this worker.
        check: raises where a process is lost.
        ends: which loops have ended, and what ranks are called.
        collective_s: how long a collective may take.
        say: shows a line to the user.
        record: writes down what is known when the run fails; None for nowhere.
    """

    def __init__(
        self,
        records: Sequence[RankRecord],
        me: int,
        check: Callable[[], None],
        ends: FinishedRanks,
        collective_s: float,
        say: Callable[[str], None],
        record: FlightRecord | None,
    ) -> None:
        self.problem: Exception | None = None
        self._records, self._me, self._check, self._ends = records, me, check, ends
        self._boards = [record.board for record in records]
        self._meetings = Waits()
        self._collective_s, self._say, self._record = collective_s, say, record
        self._logs: list[CallLog] = []
        self._made: dict[str, int] = {}
        self._looked = monotonic()
        self._over = threading.Event()
        # Made in the thread that trains.
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="headrace-watchdog", daemon=True)
        self._thread.start()

    def log(self, ranks: Sequence[int], kind: bytes = b"") -> CallLog:
        """Returns where the calls of a new group are written down; every rank of it calls this.

        Only the first groups are watched, of those that a rank is in at a time; `kind` tells them apart.
        """
        groups = sorted(self._boards[self._me].groups, key=lambda group: group.key != 0)
        place = next((group for group in groups if not group.key or group.number == LEFT), None)
        name = repr((kind, *ranks))
        nth = self._made[name] = self._made.get(name, 0) + 1
        key = 1 + zlib.crc32(f"{nth} {name}".encode())
        log = CallLog(ranks, self._me, key, GroupCalls() if place is None else place, self._records[self._me].heartbeat)
        if self.problem:
            log.fail(self.problem)
        if place is None:
            self._boards[self._me].crowded = 1
        else:
            log.watched = True
            # Another list, because the watchdog may go through the one before.
            self._logs = [*(each for each in self._logs if not each.left), log]
        return log

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        """Compares this rank's calls with those of the others; raises where the run is to end."""
        now = monotonic()
        passed_s, self._looked = min(now - self._looked, _GAP_S), now
        self._check()
        seeks, awaits = self._meet(passed_s), 0
        logs = [log for log in self._logs if not log.left]
        for log in logs:
            late, ahead = self._compare(log, passed_s)
            seeks |= ahead or log.differs_s > 0 or any(waited_s > _SEEKS_S for waited_s in late.values())
            awaits = awaits or (1 + next(iter(late)) if late else 0)
            self._judge(log, late)
            self._require_end(log, bool(late) or ahead, passed_s)
            log.failed_s = log.failed_s + passed_s if log.failure() else 0.0
            # A lost rank, which explains more, may be noticed a little later.
            if log.failed_s > VERDICT_S:
                log.require_success()
            seeks |= log.stuck_s > _SEEKS_S
        board = self._boards[self._me]
        board.awaits, board.seeks = awaits, seeks
        # Always, because a process that is killed, or frozen, says no more what it did.
        board.activity = activity_of(self._watched).encode()[:CHARACTERS]
        waiting = [log for log in logs if log.waits.by_rank]
        for log in waiting:
            self._tell(log.waits, log.ranks, partial(self._late, log))
        if not waiting:
            # Ranks also wait for each other before and after their calls, on CPUs too, without a limit.
            self._tell(self._meetings, range(len(self._boards)), self._absent)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:
                self._end(error)
                return

    def _compare(self, log: CallLog, passed_s: float) -> tuple[dict[int, float], bool]:
        """Returns for how long which ranks have not come to this rank's last call, and whether one is ahead of it."""
        own = log.calls.number
        numbers: dict[int, int] = {}
        for rank in log.others:
            calls = group_of(self._boards[rank], log.key)
            if calls or not self._boards[rank].crowded:
                numbers[rank] = calls.number if calls else 0
            if calls and (difference := CallDifference.between(log.calls, calls)):
                log.differs_s += passed_s
                if difference.is_first or log.differs_s > _SEEKS_S + _TELLS_S:
                    self._refuse(log, calls, rank, difference)
        late = {rank: number for rank, number in numbers.items() if number < own}
        return log.waits.note(late, passed_s), any(number > own for number in numbers.values())

    def _meet(self, passed_s: float) -> bool:
        """Notes who has not come where this rank's process waits for the others; returns whether one is ahead of it."""
        counters = [record.barrier_counter for record in self._records]
        own = counters[self._me]
        self._meetings.note({rank: at for rank, at in enumerate(counters) if not reached(at, own)}, passed_s)
        return not all(reached(own, counter) for counter in counters)

    def _judge(self, log: CallLog, late: dict[int, float]) -> None:
        """Raises where a rank is late for too long, or its loop has ended."""
        for rank, waited_s in late.items():
            if waited_s > _SEEKS_S:
                self._ends.check(rank, self._me, partial(self._has_come, log, rank))
        most_s = max(late.values(), default=0.0)
        if most_s > self._collective_s:
            raise self._timeout(log, self._late(log, late))

    def _has_come(self, log: CallLog, rank: int) -> bool:
        calls = group_of(self._boards[rank], log.key)
        return calls is not None and calls.number >= log.calls.number

    def _require_end(self, log: CallLog, uneven: bool, passed_s: float) -> None:
        """Raises where the last call, to which all ranks have come, does not end."""
        number, has_ended = log.calls.number, log.has_ended
        if uneven or number != log.stuck_at or has_ended is None or has_ended():
            log.stuck_s, log.stuck_at = 0.0, number
            return
        log.stuck_s += passed_s
        if log.stuck_s > self._collective_s:
            came = listed([self._ends.names[rank] for rank in log.ranks])
            what = f"{said(call_of(log.calls, number))} has not ended, {log.stuck_s:.0f} s after {came} came to it"
            raise self._timeout(log, what)

    def _tell(self, waits: Waits, ranks: Sequence[int], what: Callable[[dict[int, float]], str]) -> None:
        """Says who waits for whom, once in a while, on the first rank that waits."""
        late = waits.by_rank
        most_s = max(late.values(), default=0.0)
        if most_s < _NOTICE_S:
            waits.told_s = 0.0
            return
        first = next(rank for rank in ranks if rank not in late)
        if most_s < _AGAIN * waits.told_s or self._me != first or all(map(self._waits_itself, late)):
            return
        waits.told_s = most_s
        doing = "; ".join(self._state(rank) for rank in late)
        limit = f"collectives wait for at most {self._collective_s:g} s (collective_timeout_s)"
        self._say(f"{what(late)}; {doing}; {limit}")

    def _waits_itself(self, rank: int) -> bool:
        """Whether a rank is late because it waits for another, in another group; not if they wait in a circle."""
        seen = [self._me]
        while rank not in seen and self._boards[rank].awaits:
            seen.append(rank)
            rank = self._boards[rank].awaits - 1
        return len(seen) > 1 and rank not in seen

    def _late(self, log: CallLog, late: dict[int, float]) -> str:
        """Returns which ranks have not come to which call, where which wait, and for how long."""
        missed = 1 + min(log.waits.numbers.values(), default=0)
        call = call_of(log.calls, max(missed, log.calls.number - REMEMBERED + 1))
        return self._away(late, log.ranks, said(call))

    def _absent(self, late: dict[int, float]) -> str:
        done = self._records[self._me].heartbeat.step
        return self._away(late, range(len(self._boards)), f"where the workers meet in round {done}")

    def _away(self, late: dict[int, float], ranks: Sequence[int], where: str) -> str:
        names = self._ends.names
        waiting = [names[rank] for rank in ranks if rank not in late]
        have, wait = "has" if len(late) == 1 else "have", "waits" if len(waiting) == 1 else "wait"
        return (
            f"{listed([names[rank] for rank in late])} {have} not come to {where}, where {listed(waiting)} {wait}, "
            f"for {max(late.values()):.0f} s"
        )

    def _state(self, rank: int) -> str:
        """Returns what a rank has called last, and what it does, if its own watchdog has looked."""
        board, name = self._boards[rank], self._ends.names[rank]
        doing = board.activity.decode(errors="replace")
        return f"{name}: {last_call(board)}{doing and f', {doing}'}"

    def _timeout(self, log: CallLog, what: str) -> CollectiveFailed:
        states = "; ".join(self._state(rank) for rank in log.ranks)
        limit = f"for work that takes longer raise collective_timeout_s ({self._collective_s:g} s)"
        return CollectiveFailed(f"{what}; the last calls: {states}; {limit}{self._written()}")

    def _refuse(self, log: CallLog, calls: GroupCalls, rank: int, difference: CallDifference) -> NoReturn:
        number = difference.number
        made = {
            each: call_of(of, number) or call_of(of, of.number) for each, of in ((self._me, log.calls), (rank, calls))
        }
        told = "; ".join(f"{self._ends.names[each]}: {said(made[each])}" for each in sorted(made))
        since = "" if difference.is_first else f" (or others before, up to number {number})"
        raise CollectiveFailed(
            f"ranks have called different collectives of their devices{since}: {told}; every rank must call the same "
            "ones, in the same order and of the same sizes and types: look for a branch, an evaluation or a loop that "
            f"one rank alone goes through{self._written()}"
        )

    def _written(self) -> str:
        if self._record is None:
            return "; with a run_dir, what each rank has called is written there"
        return f"; what each rank has called, and its backend recorded, is in {self._record.folder}"

    def _end(self, error: Exception) -> None:
        """Lets the worker end with an error, wherever it waits."""
        board = self._boards[self._me]
        if self._record:
            board.activity = activity_of(self._watched).encode()[:CHARACTERS]
            self._briefly(partial(self._record.write, board), "what it has called is not written")
        # After that, because a communicator that is aborted knows nothing more.
        self.problem = error
        for log in self._logs:
            log.fail(error)
        board.recorded = 1
        for log in self._logs:
            self._briefly(log.abort, "its communicator is not aborted")
        if not self._over.wait(_LAST_RESORT_S):
            sys.stderr.write(f"headrace: {error}; rank {self._me} still waits for its device, and is ended\n")
            sys.stderr.flush()
            os._exit(error.exit_code if isinstance(error, HeadraceError) else 1)

    def _briefly(self, act: Callable[[], None], otherwise: str) -> None:
        """Does something beside this thread, because a communicator may wait when it is asked or aborted."""

        def run() -> None:
            try:
                act()
            except (OSError, RuntimeError) as error:
                self._say(f"rank {self._me}: {otherwise}: {in_one_line(error)}")

        thread = threading.Thread(target=run, name="headrace-abort", daemon=True)
        thread.start()
        thread.join(_BRIEFLY_S)
