"""A watchdog beside each of some workers, of one process, whose collectives are written down and never made."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from collectives.watched import LIMIT_S, Done, Endless, Run
from headrace.collectives.watchdog import watchdog as module
from headrace.collectives.watchdog.boards import missed
from headrace.errors import CollectiveFailed, PeerLost, UsageError
from headrace.shared_memory.calls import GROUPS, REMEMBERED
from headrace.shared_memory.control_page import ControlPage


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path, monkeypatch)
    yield run
    for worker in run.workers:
        worker.watchdog.close()


@pytest.mark.parametrize("hosts", [1, 2])
def test_workers_that_call_the_same_are_left_alone(run: Run, hosts: int) -> None:
    workers = run.begin(3, hosts)
    for number in range(3 * REMEMBERED):
        for worker in workers:
            worker.call(nbytes=number)
        run.pass_s(0.25)
    run.pass_s(2 * LIMIT_S)
    assert [worker.said for worker in workers] == [[], [], []]


@pytest.mark.parametrize("hosts", [1, 2])
def test_who_waits_for_whom_is_said_by_one_rank_and_seldom(run: Run, hosts: int) -> None:
    workers = run.begin(3, hosts)
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


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_lives_and_does_not_come_ends_the_run_after_the_limit(run: Run, hosts: int) -> None:
    workers = run.begin(2, hosts)
    workers[0].call()
    run.pass_s(LIMIT_S)
    with pytest.raises(CollectiveFailed) as failed:
        run.pass_s(1)
    assert str(failed.value).startswith(
        "rank 1 has not come to all_reduce (number 1, round 0, 4,096 bytes), where rank 0 waits, for 30 s; the last "
        "calls: rank 0: all_reduce (number 1, round 0, 4,096 bytes), "
    )
    assert "raise collective_timeout_s (30 s)" in str(failed.value)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_collective_that_does_not_end_is_named_with_all_its_ranks(run: Run, hosts: int) -> None:
    workers = run.begin(2, hosts)
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
@pytest.mark.parametrize("hosts", [1, 2])
def test_different_calls_are_named_with_what_each_rank_called(run: Run, hosts: int, name: bytes, nbytes: int) -> None:
    workers = run.begin(2, hosts)
    for worker in workers:
        worker.call()
    workers[0].call()
    workers[1].call(name, nbytes)
    # Both may be ahead when it is seen.
    for worker in workers:
        worker.call()
    with pytest.raises(CollectiveFailed) as failed:
        # On the other host first the last call is known, and then, where that differs, all.
        run.pass_s(0.25 if hosts == 1 else 1.0)
    both = (
        "different collectives of their devices: rank 0: all_reduce (number 2, round 0, 4,096 bytes); rank 1: "
        f"{name.decode()} (number 2, round 0, {nbytes:,} bytes); every rank must call the same"
    )
    assert both in str(failed.value)
    with pytest.raises(CollectiveFailed):
        workers[1].watchdog.look()


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_same_number_of_bytes_of_another_type_is_different(run: Run, hosts: int) -> None:
    workers = run.begin(2, hosts)
    for worker, dtype in zip(workers, (torch.float32, torch.int32), strict=True):
        worker.log.begin(b"all_reduce", 4096, dtype)
    with pytest.raises(CollectiveFailed) as failed:
        run.pass_s(1.0)
    assert (
        "devices: rank 0: all_reduce (number 1, round 0, 4,096 bytes of float32); rank 1: all_reduce (number 1, round "
        "0, 4,096 bytes of int32); every rank"
    ) in str(failed.value)


def test_a_difference_is_found_on_hosts_that_hear_of_each_other_late(run: Run) -> None:
    workers = run.begin(2, hosts=2)
    workers[0].call()
    workers[1].call(nbytes=1)

    def go_on() -> None:
        for each in range(40):
            # Between two looks each calls more than is remembered, in turn first.
            for worker in workers[:: 1 if each % 2 else -1]:
                for _ in range(3 * REMEMBERED):
                    worker.call()
            run.pass_s(0.25)

    with pytest.raises(CollectiveFailed, match=r"up to number \d+\): rank 0: all_reduce \(number"):
        go_on()


def test_a_group_that_is_not_noted_on_a_rank_accuses_it_of_nothing(run: Run) -> None:
    workers = run.begin(2)
    for number in range(GROUPS):
        workers[1].watchdog.log((1,), b"%d" % number)
    pair = [worker.watchdog.log((0, 1), b"pair") for worker in workers]
    assert [log.watched for log in pair] == [True, False]
    pair[0].begin(b"send", 4)
    run.pass_s(2 * LIMIT_S)
    assert not workers[0].said


def test_calls_that_are_captured_wait_for_no_rank(run: Run) -> None:
    workers = run.begin(2)
    workers[0].call()
    workers[1].call()
    workers[0].log.captures = lambda: True
    workers[0].log.begin(b"all_reduce", 4096)
    workers[0].log.follow(Endless())
    run.pass_s(2 * LIMIT_S)
    assert workers[0].log.calls.number == 1
    assert not workers[1].said


def test_a_call_that_has_failed_ends_the_run_unless_a_lost_rank_explains_it(run: Run) -> None:
    workers = run.begin(2)
    result: torch.futures.Future[int] = torch.futures.Future()
    for worker in workers:
        worker.call()
    workers[1].log.follow(Done(result))
    run.pass_s(5)
    result.set_result(2)
    run.pass_s(2.5)
    run.lost = "killed"
    with pytest.raises(PeerLost):
        run.pass_s(0.25)
    run.lost = ""
    with pytest.raises(CollectiveFailed, match=r"^all_reduce \(number 1, .* failed on rank 1: its communicator has "):
        run.pass_s(1)
    # Also where no call comes after it.
    with pytest.raises(CollectiveFailed, match="has failed on rank 1"):
        workers[1].log.require_success()
    workers[0].log.require_success()


@pytest.mark.parametrize("value", [0, 100])
def test_a_call_that_has_not_failed(run: Run, value: int) -> None:
    (worker,) = run.begin(1)
    result: torch.futures.Future[int] = torch.futures.Future()
    worker.log.begin(b"all_reduce", 4)
    worker.log.follow(Done(result))
    worker.log.require_success()
    result.set_result(value)
    worker.log.require_success()


def test_a_difference_long_ago_is_noticed(run: Run) -> None:
    workers = run.begin(2)
    workers[0].call()
    workers[1].call(nbytes=1)
    for _ in range(5 * REMEMBERED):
        for worker in workers:
            worker.call()
    with pytest.raises(CollectiveFailed, match=r"\(or others before, up to number 130\): rank 0: all_reduce"):
        run.pass_s(3)


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_a_lost_rank_has_not_come_to_and_did_is_said(
    run: Run, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "activity_of", lambda _: "is in forward (model.py, line 3, in forward)")
    workers = run.begin(3, hosts)
    for worker in workers:
        worker.heartbeat.step = 4
        worker.call()
    run.pass_s(1)
    workers[0].call()
    workers[2].call()
    run.pass_s(1)
    for worker in workers[:1] if hosts == 2 else workers:
        assert missed([record.board for record in worker.records], 1) == (
            "; it has not come to all_reduce (number 2, round 4, 4,096 bytes), where rank 0 and rank 2 wait; rank 1: "
            "all_reduce (number 1, round 4, 4,096 bytes), is in forward (model.py, line 3, in forward)"
        )


def test_nothing_is_said_of_calls_where_there_are_none(run: Run) -> None:
    assert missed([record.board for record in ControlPage.create(2, "none").ranks], 1) == ""
    workers = run.begin(2)
    assert missed([record.board for record in workers[0].records], 1) == ""


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_loop_that_has_ended_is_not_waited_for(run: Run, hosts: int) -> None:
    workers = run.begin(2, hosts)
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
