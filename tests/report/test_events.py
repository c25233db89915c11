"""Runs that were resumed: one curve, one outcome, and no time without training."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from msgspec import structs

from headrace.errors import DataError, UsageError
from headrace.report.model.events import Tail, attempts, of_kind, read_events, read_log
from headrace.report.model.summary import summarize
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Failed,
    NonFinite,
    Notice,
    RunEnded,
    RunStarted,
    Saved,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)


def _append(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(text)


def test_events_of_all_processes_come_by_time_and_ties_by_process(tmp_path, write_events):
    events = [
        Notice(10, 2.0, "rank 10"),
        Notice(2, 1.0, "early"),
        Notice(2, 2.0, "rank 2"),
        Notice(2, 2.0, "rank 2 again"),
        Notice(LAUNCHER, 2.0, "launcher"),
    ]
    write_events(tmp_path, events)
    texts = [event.text for event in read_events(tmp_path)]
    assert texts == ["early", "launcher", "rank 2", "rank 2 again", "rank 10"]


@pytest.mark.parametrize("tail", ['{"kind":"notice","ra', "\xff", "{"])
def test_half_a_last_line_is_left_out_and_counted(tmp_path, write_events, tail):
    write_events(tmp_path, [Notice(0, 1.0, "whole"), Notice(1, 2.0, "whole too")])
    _append(tmp_path / "events/rank-0.jsonl", tail)
    log = read_log(tmp_path)
    assert [event.text for event in log.events] == ["whole", "whole too"]
    assert log.torn_lines == 1


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path, write_events):
    write_events(tmp_path, [Notice(0, 1.0, "a")])
    _append(tmp_path / "events/rank-0.jsonl", encode(Notice(0, 2.0, "b")))
    log = read_log(tmp_path)
    assert [event.text for event in log.events] == ["a", "b"]
    assert log.torn_lines == 0


@pytest.mark.parametrize("bad", ["nonsense", "", '{"kind":"nothing"}', "[]", '{"kind":"notice","rank":0}'])
def test_any_other_bad_line_is_an_error_with_file_and_line(tmp_path, write_events, bad):
    write_events(tmp_path, [Notice(0, 1.0, "a")])
    _append(tmp_path / "events/rank-0.jsonl", bad + "\n" + encode(Notice(0, 2.0, "b")) + "\n")
    with pytest.raises(DataError, match=r"rank-0\.jsonl, line 2"):
        read_events(tmp_path)


def test_a_line_of_another_version_is_an_error_that_names_it(tmp_path, write_events):
    versions = {"torch": "2.13.0", "headrace": "9.1.0"}
    write_events(tmp_path, [RunStarted(LAUNCHER, 0.0, "a", 1, "cpu", 1, 8, 80, "2026-01-01", {}, versions)])
    _append(tmp_path / "events/rank-0.jsonl", '{"kind":"teleported","rank":0,"time_s":1.0}\n')
    with pytest.raises(DataError, match=r"rank-0\.jsonl, line 1: .*; headrace 9\.1\.0 wrote it, and this is \d"):
        read_events(tmp_path)


def test_pipes_and_devices_are_no_event_files(tmp_path, write_events):
    run_dir = write_events(tmp_path, [Notice(0, 1.0, "the only one")])
    os.mkfifo(run_dir / "events" / "launcher.jsonl")
    (run_dir / "events" / "rank-7.jsonl").symlink_to("/dev/zero")
    assert len(read_events(run_dir)) == 1
    assert len(Tail(run_dir).read()) == 1
    (run_dir / "events" / "rank-1.jsonl").write_text("no event\n")
    with pytest.raises(DataError, match=r"rank-1\.jsonl, line 1"):
        read_events(run_dir)


def test_a_line_without_an_end_is_refused_and_not_kept(tmp_path):
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "rank-0.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for read in (read_log, lambda run_dir: Tail(run_dir).read()):
        with pytest.raises(DataError, match=r"rank-0\.jsonl: after 0 lines comes one of more than 16,777,216 bytes"):
            read(tmp_path)


def test_a_directory_without_events_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        read_events(tmp_path / "nowhere")


def test_the_tail_reads_what_is_new_whole_lines_only_and_new_files(tmp_path):
    tail = Tail(tmp_path)
    assert tail.read() == ()
    first, second, third = (Notice(rank, time_s, "ö") for rank, time_s in ((0, 1.0), (0, 3.0), (1, 2.0)))
    line = encode(second)
    file = tmp_path / "events/rank-0.jsonl"
    _append(file, encode(first) + "\n" + line[:9])
    assert tail.read() == (first,)
    assert tail.read() == ()
    _append(file, line[9:])
    assert tail.read() == ()
    _append(file, "\n")
    _append(tmp_path / "events/rank-1.jsonl", encode(third) + "\n")
    assert tail.read() == (third, second)
    assert tail.read() == ()


def test_the_tail_survives_any_cut_of_the_file(tmp_path):
    events = tuple(Notice(0, float(index), f"line {index}") for index in range(3))
    whole = "".join(encode(event) + "\n" for event in events).encode()
    file = tmp_path / "events/rank-0.jsonl"
    file.parent.mkdir()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        tail = Tail(tmp_path)
        before = tail.read()
        file.write_bytes(whole)
        assert before + tail.read() == events


def test_the_tail_names_the_line_of_the_whole_file(tmp_path, write_events):
    write_events(tmp_path, [Notice(0, 1.0, "a"), Notice(0, 2.0, "b")])
    tail = Tail(tmp_path)
    assert len(tail.read()) == 2
    _append(tmp_path / "events/rank-0.jsonl", encode(Notice(0, 3.0, "c")) + "\nnonsense\n")
    with pytest.raises(DataError, match=r"rank-0\.jsonl, line 4"):
        tail.read()


def _started(time_s=0.0, resumed=0, workers=1, strategy="mirrored"):
    return RunStarted(LAUNCHER, time_s, strategy, workers, "cpu", 1, 8, 80, "now", {}, {}, resumed_step=resumed)


def _steps(start_s, first, stop, rank=0, seconds=0.1, offset=0.0, examples=8):
    """Steps that follow each other from `start_s` on; step i has the loss i + `offset`."""
    return [
        Stepped(rank, start_s + seconds * (at + 1), step, 0, examples, step + offset, 1.0, 0.0, seconds, 0.0, 0.0)
        for at, step in enumerate(range(first, stop))
    ]


# Killed in step 27, 20 of which a checkpoint held: rounds 20 to 26 were done again.
KILLED = [
    _started(),
    WorkerStarted(0, 0.5, "old", 1, "cpu", 1),
    *_steps(1.0, 0, 27, offset=100.0),
    Notice(LAUNCHER, 0.1, "1 worker"),
    Evaluated(0, 2.05, 10, 1, 5, {"loss": 3.0}, 0.05),
    Saved(0, 2.2, 10, 500, 0.02, 0.01),
    NonFinite(0, 2.25, 12, (0,), "skip"),
    Saved(0, 3.2, 20, 600, 0.04, 0.3),
    Evaluated(0, 3.05, 20, 2, 5, {"loss": 2.0}, 0.05),
    NonFinite(0, 3.3, 22, (0,), "skip"),
    Saved(0, 3.6, 25, 700, 5.0, 0.01),
    Evaluated(0, 3.65, 26, 2, 5, {"loss": 1.5}, 0.05),
    Failed(LAUNCHER, 3.7, 27, "killed by signal 9", exit_code=4),
    WorkerEnded(0, 3.8, 27, 9999, 9999, 9999, 9999),
    RunEnded(LAUNCHER, 3.9, "failed"),
]
RESUMED = [
    _started(4.0, resumed=20, workers=2),
    Notice(LAUNCHER, 4.1, "2 workers"),
    *(WorkerStarted(rank, 8.0, "new", 2 + rank, "cpu", 1) for rank in (0, 1)),
    *(step for rank in (0, 1) for step in _steps(9.0, 20, 40, rank, seconds=0.05, examples=4)),
    Saved(0, 10.1, 40, 800, 0.06, 0.01),
    Evaluated(0, 10.2, 40, 4, 5, {"loss": 1.0}, 0.1),
    *(WorkerEnded(rank, 10.3, 40, 300, 1000 + rank, 50, 60) for rank in (0, 1)),
    RunEnded(LAUNCHER, 10.4, "ok"),
]


@pytest.fixture
def resumed(tmp_path, write_events):
    return summarize(write_events(tmp_path, [*KILLED, *RESUMED]))


def test_what_was_done_again_counts_once(tmp_path, write_events):
    first, second = attempts(read_log(write_events(tmp_path, [*KILLED, *RESUMED])).events)
    assert [step.step for step in first.steps[0]] == list(range(20))
    assert {rank: len(steps) for rank, steps in second.steps.items()} == {0: 20, 1: 20}
    assert [event.step for event in of_kind(Evaluated, first.events)] == [10, 20]
    assert [event.step for event in of_kind(Saved, first.events)] == [10, 20]
    assert [event.step for event in of_kind(NonFinite, first.events)] == [12]


def test_how_it_ended_says_the_last_attempt(resumed):
    assert (resumed.status, resumed.outcome.failure, resumed.workers) == ("ok", None, 2)
    assert (resumed.outcome.attempts, resumed.started.resumed_step) == (2, 20)
    assert resumed.outcome.notices == ("2 workers",)
    assert resumed.outcome.hosts == ("new",)


def test_an_attempt_that_goes_on_hides_the_failure_before_it(tmp_path, write_events):
    summary = summarize(write_events(tmp_path, [*KILLED, *RESUMED[:5]]))
    assert (summary.status, summary.outcome.failure) == ("unfinished", None)


def test_the_work_is_that_of_all_attempts(resumed):
    training = resumed.training
    assert (training.steps, training.examples, training.epochs) == (40, 320, 4.0)
    # 20 steps in 2 s, one evaluation of 0.05 s among them, one after them; then 20 in 1 s. 6 s pass between.
    assert training.seconds == pytest.approx(2.0 - 0.05 + 1.0)
    # Windows: steps 5 to 19 and 25 to 39, without the evaluation.
    assert training.examples_per_s == pytest.approx((15 * 8 + 15 * 8) / (1.5 - 0.05 + 0.75))


def test_the_mean_step_is_that_of_all_attempts(resumed):
    # Rank 0: 15 steps of 0.1 s and 15 of 0.05 s; 0.05 s of evaluation lie inside a step here.
    assert resumed.times_by_rank[0].compute_s == pytest.approx(0.075)
    assert resumed.times_by_rank[1].compute_s == pytest.approx(0.05)
    assert resumed.times_by_rank[1].other_s == pytest.approx(0.0)
    assert resumed.times.compute_s == pytest.approx((15 * 0.1 + 30 * 0.05) / 45)


def test_the_cost_is_that_of_the_last(resumed):
    assert resumed.cost.moved_bytes_per_step == 600 / 20
    assert resumed.cost.peak_memory_bytes == 1001
    assert (resumed.cost.parameter_bytes, resumed.cost.optimizer_bytes) == (100, 120)


def test_curves_go_on(resumed):
    loss = resumed.curves.loss
    assert [point.loss for point in loss] == [step + 100.0 * (step < 20) for step in range(40)]
    assert [point.examples for point in loss] == [8 * (step + 1) for step in range(40)]
    assert loss[19].seconds == pytest.approx(1.95)
    assert loss[20].seconds == pytest.approx(2.0)
    assert [(point.step, point.epochs) for point in resumed.curves.evaluations] == [(10, 1.0), (20, 2.0), (40, 4.0)]
    assert resumed.curves.evaluations[1].seconds == pytest.approx(1.95)


def test_saves_and_rounds_that_were_not_finite(resumed):
    saves = resumed.saves
    assert (saves.count, saves.last_step, saves.bytes) == (3, 40, 800)
    assert (saves.mean_stall_s, saves.longest_stall_s) == (pytest.approx(0.04), 0.06)
    # The last save came after the last step: no training waited for it.
    assert saves.share == pytest.approx((0.02 + 0.04) / 2.95)
    assert (resumed.non_finite.skipped, resumed.non_finite.rolled_back) == (1, 0)


def test_a_run_without_saves_says_nothing_of_them(tmp_path, write_events):
    summary = summarize(write_events(tmp_path, [_started(), *_steps(1.0, 0, 3), NonFinite(0, 2.0, 3, (), "raise")]))
    assert (summary.saves, summary.non_finite) == (None, None)


def test_an_older_checkpoint_takes_back_more_than_the_last_attempt(tmp_path, write_events):
    runs = [_started(), *_steps(1.0, 0, 10), _started(3.0, resumed=8), *_steps(4.0, 8, 12)]
    runs += [_started(6.0, resumed=5), *_steps(7.0, 5, 14, offset=50.0)]
    begun = attempts(read_log(write_events(tmp_path, runs)).events)
    assert [[step.step for step in attempt.steps.get(0, ())] for attempt in begun] == [
        [0, 1, 2, 3, 4],
        [],
        [5, 6, 7, 8, 9, 10, 11, 12, 13],
    ]
    summary = summarize(tmp_path)
    assert (summary.outcome.attempts, summary.steps) == (3, 14)
    assert [point.loss for point in summary.curves.loss] == [*range(5), *(50.0 + step for step in range(5, 14))]
    assert summary.training.seconds == pytest.approx(0.5 + 0.9)


def test_a_run_that_begins_with_another_runs_checkpoint(tmp_path, write_events):
    summary = summarize(write_events(tmp_path, [_started(0.0, resumed=30), *_steps(1.0, 30, 40)]))
    assert (summary.outcome.attempts, summary.started.resumed_step, summary.steps) == (1, 30, 10)
    assert summary.training.seconds == pytest.approx(1.0)


def test_a_run_that_was_killed_and_not_resumed_keeps_everything(tmp_path, write_events):
    summary = summarize(write_events(tmp_path, KILLED))
    assert (summary.status, summary.outcome.failure.cause, summary.steps) == ("failed", "killed by signal 9", 27)
    assert summary.saves.count == 3
    assert dataclasses.replace(summary.outcome, attempts=1) == summary.outcome


def test_leases_that_a_snapshot_held_are_not_done_again(tmp_path, write_events):
    killed = [_started(), *(structs.replace(step, lease=step.step) for step in _steps(1.0, 0, 27))]
    started = structs.replace(_started(4.0, resumed=20), resumed_leases=((20, 23), (25, 26)))
    first, _ = attempts(read_log(write_events(tmp_path, [*killed, started, *_steps(9.0, 23, 40)])).events)
    assert [step.step for step in first.steps[0]] == [*range(23), 25]
