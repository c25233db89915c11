"""A watchdog beside each of some workers, of one process, whose collectives are written down and never made."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.collectives.watchdog import watchdog as module
from headrace.collectives.watchdog.call_log import CallLog
from headrace.collectives.watchdog.flight_record import FlightRecord
from headrace.collectives.watchdog.watchdog import Watchdog
from headrace.errors import CollectiveFailed, PeerLost, UsageError
from headrace.shared_memory.calls import REMEMBERED
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks

LIMIT_S = 30.0


class Worker:
    """A worker that calls what a test says, and whose watchdog looks when the test says so."""

    def __init__(
        self, page: ControlPage, rank: int, check: Callable[[], None], record: FlightRecord, shared: bool = True
    ) -> None:
        self.said: list[str] = []
        self.records = records = page.ranks
        ends = FinishedRanks([record.heartbeat for record in records])
        self.watchdog = Watchdog(records, rank, check, ends, LIMIT_S, self.said.append, record, shared)
        self.log: CallLog = self.watchdog.log(range(len(records)))
        self.heartbeat = records[rank].heartbeat

    def call(self, name: bytes = b"all_reduce", nbytes: int = 4096, ended: bool = True) -> None:
        self.log.begin(name, nbytes)
        self.log.has_ended = lambda: ended


class Run:
    """Some workers, on a clock of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.lost = ""
        self.folder = folder
        # Watchdogs look when the test says so.
        monkeypatch.setattr(module, "_LOOK_EVERY_S", 1e9)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        self.workers: list[Worker] = []

    def begin(self, world: int) -> list[Worker]:
        page = ControlPage.create(world, "watched")
        self.workers = [
            Worker(page, rank, self.check, FlightRecord(self.folder, rank, "gloo")) for rank in range(world)
        ]
        return self.workers

    def check(self) -> None:
        if self.lost:
            raise PeerLost(1, "here", self.lost)

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for worker in self.workers:
                worker.watchdog.look()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path, monkeypatch)
    yield run
    for worker in run.workers:
        worker.watchdog.close()


def test_workers_that_call_the_same_are_left_alone(run: Run) -> None:
    workers = run.begin(3)
    for number in range(3 * REMEMBERED):
        for worker in workers:
            worker.call(nbytes=number)
        run.pass_s(0.25)
    run.pass_s(2 * LIMIT_S)
    assert [worker.said for worker in workers] == [[], [], []]


def test_who_waits_for_whom_is_said_by_one_rank_and_seldom(run: Run) -> None:
    workers = run.begin(3)
    for worker in workers:
        worker.call()
    workers[0].heartbeat.step = workers[2].heartbeat.step = 1
    workers[0].call()
    workers[2].call()
    run.pass_s(4.5)
    assert not workers[0].said
    run.pass_s(1.5)
    (line,) = workers[0].said
    assert line.startswith(
        "rank 1 has not come to all_reduce (number 2, round 1, 4,096 bytes), where rank 0 and rank 2 wait, for 5 s; "
        "rank 1: all_reduce (number 1, round 0, 4,096 bytes), "
    )
    assert line.endswith("; collectives wait for at most 30 s (collective_timeout_s)")
    run.pass_s(18)
    assert len(workers[0].said) == 2
    assert not workers[1].said
    assert not workers[2].said
    # It comes, and the next wait is a new one.
    workers[1].call()
    run.pass_s(60)
    assert len(workers[0].said) == 2


def test_what_a_late_rank_does_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "activity_of", lambda _: "evaluates (metrics.py, line 12, in slow)")
    workers = run.begin(2)
    workers[0].call()
    run.pass_s(6)
    assert "; rank 1: no call, evaluates (metrics.py, line 12, in slow); " in workers[0].said[0]


def test_a_rank_that_lives_and_does_not_come_ends_the_run_after_the_limit(run: Run) -> None:
    workers = run.begin(2)
    workers[0].call()
    run.pass_s(LIMIT_S)
    with pytest.raises(CollectiveFailed) as failed:
        run.pass_s(1)
    assert str(failed.value).startswith(
        "rank 1 has not come to all_reduce (number 1, round 0, 4,096 bytes), where rank 0 waits, for 30 s; the last "
        "calls: rank 0: all_reduce (number 1, round 0, 4,096 bytes), "
    )
    assert "raise collective_timeout_s (30 s)" in str(failed.value)


def test_a_collective_that_does_not_end_is_named_with_all_its_ranks(run: Run) -> None:
    workers = run.begin(2)
    for worker in workers:
        worker.call(b"broadcast", 8, ended=False)
    run.pass_s(LIMIT_S)
    with pytest.raises(CollectiveFailed) as failed:
        run.pass_s(1)
    assert str(failed.value).startswith(
        "broadcast (number 1, round 0, 8 bytes) has not ended, 30 s after rank 0 and rank 1 came to it; the last "
        "calls: rank 0: broadcast (number 1, round 0, 8 bytes)"
    )


def test_a_long_wait_between_two_collectives_is_no_fault(run: Run) -> None:
    workers = run.begin(2)
    for worker in workers:
        worker.call()
    run.pass_s(3 * LIMIT_S)


@pytest.mark.parametrize(("name", "nbytes"), [(b"broadcast", 4096), (b"all_reduce", 8192)])
def test_different_calls_are_named_with_what_each_rank_called(run: Run, name: bytes, nbytes: int) -> None:
    workers = run.begin(2)
    for worker in workers:
        worker.call()
    workers[0].call()
    workers[1].call(name, nbytes)
    # Both may be ahead when it is seen.
    for worker in workers:
        worker.call()
    with pytest.raises(CollectiveFailed) as failed:
        run.pass_s(0.25)
    both = (
        "different collectives of their devices: rank 0: all_reduce (number 2, round 0, 4,096 bytes); rank 1: "
        f"{name.decode()} (number 2, round 0, {nbytes:,} bytes); every rank must call the same"
    )
    assert both in str(failed.value)
    with pytest.raises(CollectiveFailed):
        workers[1].watchdog.look()


def test_a_difference_long_ago_is_noticed(run: Run) -> None:
    workers = run.begin(2)
    workers[0].call()
    workers[1].call(nbytes=1)
    for _ in range(5 * REMEMBERED):
        for worker in workers:
            worker.call()
    with pytest.raises(CollectiveFailed):
        run.pass_s(0.25)


def test_a_loop_that_has_ended_is_not_waited_for(run: Run) -> None:
    workers = run.begin(2)
    workers[0].call()
    workers[1].heartbeat.finished = 4
    with pytest.raises(UsageError, match="the loop on rank 1 ended after 3 rounds and rank 0 still waits for it"):
        run.pass_s(2)


def test_only_the_rank_that_others_wait_for_in_the_end_is_named(run: Run) -> None:
    workers = run.begin(3)
    logs = {(one, two): workers[one].watchdog.log((two - 1, two)) for one, two in ((0, 1), (1, 1), (1, 2), (2, 2))}
    # Rank 1 does not come to the collective with rank 0, because it waits in the one with rank 2.
    logs[0, 1].begin(b"all_reduce", 4)
    logs[1, 2].begin(b"all_reduce", 4)
    run.pass_s(6)
    assert not workers[0].said
    assert workers[1].said[0].startswith("rank 2 has not come to all_reduce (number 1")


def test_ranks_that_wait_for_each_other_are_named(run: Run) -> None:
    workers = run.begin(2)
    pair = workers[0].watchdog.log((0, 1)), workers[1].watchdog.log((0, 1))
    workers[0].call()
    pair[1].begin(b"all_reduce", 4)
    run.pass_s(6)
    assert workers[0].said[0].startswith("rank 1 has not come to")
    assert workers[1].said[0].startswith("rank 0 has not come to")


def test_who_does_not_come_where_processes_meet_is_said_too(run: Run) -> None:
    workers = run.begin(2)
    workers[0].records[0].barrier_counter = 2**31 - 1
    workers[0].records[1].barrier_counter = 2**31 - 2
    run.pass_s(6)
    assert (
        workers[0]
        .said[0]
        .startswith(
            "rank 1 has not come to where the workers meet in round 0, where rank 0 waits, for 5 s; rank 1: no call"
        )
    )
    assert not workers[1].said
    # The counter begins at 0 again.
    workers[0].records[0].barrier_counter = workers[0].records[1].barrier_counter = 0
    run.pass_s(60)
    assert len(workers[0].said) == 1


def test_ranks_of_other_hosts_whose_calls_are_not_known_are_not_accused(run: Run) -> None:
    page = ControlPage.create(2, "apart")
    run.workers = [Worker(page, 0, run.check, FlightRecord(run.folder, 0, "gloo"), shared=False)]
    run.workers[0].call()
    run.pass_s(3 * LIMIT_S)
    assert not run.workers[0].said


def test_a_watchdog_that_stood_still_accuses_nobody(run: Run) -> None:
    workers = run.begin(2)
    workers[0].call()
    run.pass_s(1)
    run.now += 1000
    run.pass_s(1)
    assert not workers[0].said


def test_at_the_end_calls_are_refused_and_communicators_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, aborted = Run(tmp_path / "kept", monkeypatch), threading.Event()
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    (worker, _) = run.begin(2)
    worker.call()
    worker.log.abort = aborted.set
    run.lost = "killed"
    assert aborted.wait(10)
    with pytest.raises(PeerLost, match="killed"):
        worker.call()
    told = json.loads((tmp_path / "kept" / "calls_rank_0.json").read_text())
    assert told["calls"] == [["all_reduce (number 1, round 0, 4,096 bytes)"]]
    for each in run.workers:
        each.watchdog.close()
