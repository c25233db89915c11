"""What the page is told: the same as the report says, whichever way it was read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.report.model.summary import summarize
from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Failed,
    Lost,
    NonFinite,
    Notice,
    ParametersAveraged,
    RunEnded,
    Saved,
    ServerEnded,
    ServerStarted,
    ServerStats,
    ShardStats,
    SnapshotTaken,
    Stepped,
    WorkerEnded,
)
from headrace.watch import tail
from headrace.watch.bins import LossBins, RecentLanes, RunLanes
from headrace.watch.records import DriftCurve, Journal
from headrace.watch.state import WatchedRun
from headrace.watch.steps import Steps
from watch.made import NAN, Page, begun, read, read_lines, started, steps, write
from watch.test_tail import lines

EVIL = "<script>alert(1)</script>\x1b[2J"


def table(*events: object) -> Steps:
    found = read_lines(lines(*events), NAN).steps
    assert found is not None
    return found


def test_the_curves_are_those_of_the_report(tmp_path: Path) -> None:
    evaluated = [
        Evaluated(0, 1.1 + 0.1 * n + 0.05, n, 0, 9, {"loss": 1.0 / n, "accuracy": 0.5}, 0.05) for n in (10, 20)
    ]
    write(tmp_path, started(), begun(0), begun(1), *steps(0, range(30)), *steps(1, range(30)), *evaluated)
    write(tmp_path, RunEnded(LAUNCHER, 5.0, "ok"))
    known = Page(read(WatchedRun(tmp_path))).update()
    summary = summarize(tmp_path)
    assert known["loss"]["examples"] == [point.examples for point in summary.curves.loss]
    assert known["loss"]["losses"][""] == pytest.approx([point.loss for point in summary.curves.loss], rel=1e-6)
    assert known["loss"]["seconds"] == pytest.approx([point.seconds for point in summary.curves.loss], rel=1e-5)
    assert [each["seconds"] for each in known["evaluations"]] == pytest.approx(
        [each.seconds for each in summary.curves.evaluations]
    )
    assert [each["examples"] for each in known["evaluations"]] == [160, 320]
    assert known["run"]["epochs"] == pytest.approx(summary.training.epochs)
    assert known["run"]["status"] == "ok"


def test_a_page_that_is_told_changes_alone_knows_what_one_that_begins_now_knows(tmp_path: Path) -> None:
    """More steps than bins, so that bins are folded; a third worker comes late; one is lost and comes back."""
    run, rounds = WatchedRun(tmp_path), 1300
    page = Page(run)
    write(tmp_path, started(), begun(0), begun(1))
    for begin in range(0, rounds, 100):
        numbers, at = range(begin, begin + 100), 1.0 + 0.1 * begin
        write(tmp_path, *steps(0, numbers, at), *steps(1, numbers, at))
        if begin >= 500:
            write(tmp_path, *([begun(2, 50.9)] if begin == 500 else []), *steps(2, numbers, at))
        if begin == 700:
            write(tmp_path, Lost(LAUNCHER, 75.0, 1, 0, "killed", True), begun(1, 76.0))
        if begin == 900:
            write(tmp_path, Evaluated(0, 95.0, 900, 0, 9, {"loss": 0.5}, 0.0), Saved(0, 96.0, 910, 100, 0.1, 0.2))
        read(run)
        known = page.update()
    fresh = Page(run).update()
    assert known == fresh
    assert len(known["loss"]["losses"][""]) == 325
    assert known["loss"]["examples"][-1] == 8 * (2 * rounds + 800)
    assert known["processes"][1]["lost"] == [[75.0, 76.0]]
    assert known["lanes"]["ranks"] == [0, 1, 2]


def test_rounds_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    write(tmp_path, started(), *steps(0, range(20)), *steps(1, range(20)))
    write(tmp_path, Evaluated(0, 2.9, 19, 0, 9, {"loss": 9.0}, 0.0), Evaluated(0, 1.9, 8, 0, 9, {"loss": 8.0}, 0.0))
    live = WatchedRun(tmp_path)
    page = Page(read(live))
    assert page.update()["run"]["status"] == "running"
    write(tmp_path, started(10.0, resumed=10), *steps(0, range(10, 30), 11.0), *steps(1, range(10, 30), 11.0))
    read(live)
    known = page.update()
    assert known == Page(read(WatchedRun(tmp_path))).update()
    assert known["run"]["examples"] == 16 * 30 == summarize(tmp_path).training.examples
    assert known["run"]["attempts"] == 2
    # Rounds that are done again take no time, either.
    assert known["loss"]["seconds"][-1] == pytest.approx(3.0) == summarize(tmp_path).training.seconds
    assert [each["metrics"]["loss"] for each in known["evaluations"]] == [8.0]
    write(tmp_path, RunEnded(LAUNCHER, 20.0, "interrupted"))
    assert Page(read(live)).update()["run"]["status"] == "interrupted"


def test_leases_that_a_resumed_run_does_not_repeat_count(tmp_path: Path) -> None:
    leased = [replace(each, lease=each.step) for each in steps(0, range(20)) if isinstance(each, Stepped)]
    write(tmp_path, started(workers=1), *leased)
    live = read(WatchedRun(tmp_path))
    for begin, kept in ((10.0, ((12, 14), (17, 18))), (20.0, ((13, 14), (30, 31)))):
        again = started(begin, workers=1, resumed=10)
        write(tmp_path, replace(again, resumed_leases=kept))
        write(tmp_path, *(replace(each, time_s=each.time_s + begin, lease=each.step + 20) for each in leased[10:15]))
        read(live)
    known, summary = Page(live).update(), summarize(tmp_path)
    # Of the first attempt 10 and lease 13, of the second lease 30, of the third all.
    assert known["run"]["examples"] == 8 * (11 + 1 + 5) == summary.training.examples
    assert known["loss"]["seconds"][-1] == pytest.approx(summary.training.seconds)
    assert known["loss"]["losses"][""] == pytest.approx([point.loss for point in summary.curves.loss], rel=1e-6)


def test_a_start_behind_the_steps_of_its_file_has_the_run_read_anew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`read` would not end otherwise: no launcher writes such a file, and one that was changed may be so."""
    for name, value in (("_BLOCK", 1000), ("_GROWTH_A_POLL_S", 0.0)):
        monkeypatch.setattr(tail, name, value)
    write(tmp_path, started(workers=1), *steps(0, range(20)))
    write(tmp_path, replace(started(10.0, workers=1, resumed=10), rank=0))
    assert Page(read(WatchedRun(tmp_path))).update()["run"]["attempts"] == 2


def test_all_evaluations_are_left_out_of_the_time_though_not_all_are_shown(tmp_path: Path) -> None:
    events = [started(workers=1), *steps(0, range(1500), seconds=1.0)]
    # A step is 1 s from the end of the one before: 0.1 s of training after 0.9 s of evaluation.
    events = [replace(each, compute_s=0.07, exchange_s=0.01, update_s=0.01, wait_s=0.01) if isinstance(each, Stepped)
              else each for each in events]  # fmt: skip
    events += [Evaluated(0, 1.9 + number, number, 0, 9, {"loss": 1.0}, 0.9) for number in range(1500)]
    write(tmp_path, *events, RunEnded(LAUNCHER, 1501.0, "ok"))
    run = read(WatchedRun(tmp_path))
    known = Page(run).update()
    summary = summarize(tmp_path)
    assert len(known["evaluations"]) <= 1000
    assert known["loss"]["seconds"][-1] == pytest.approx(summary.training.seconds, rel=1e-4)
    assert known["run"]["rate"] == pytest.approx(80.0, rel=0.01)


def test_a_lane_says_where_the_time_went(tmp_path: Path) -> None:
    lanes = RunLanes()
    # A second of steps, half a second of nothing, half a second of steps.
    lanes.add(table(begun(0), *steps(0, range(10)), *steps(0, range(10, 15), 2.5)), 1)
    told = lanes.changed(0)
    assert told is not None
    assert told["width_s"] == 0.25
    shares = dict(zip(told["bins"].tolist(), told["parts"].tolist(), strict=True))
    assert min(shares) == 4
    for bin_ in (10, 11):
        assert shares[bin_] == pytest.approx([50, 30, 10, 10, 0], abs=10)
    assert shares[8] == shares[9] == [0, 0, 0, 0, 100]
    assert lanes.shares()[0] == pytest.approx([37.5, 22.5, 7.5, 7.5, 25.0])
    bins, rates = lanes.rates(True, 3.0)
    assert bins.tolist() == list(range(12))
    # The first step after the pause is as long as the pause, for nothing tells when its data were asked for.
    assert sum(rates) * 0.25 == pytest.approx(15 * 8)


def test_bins_of_time_are_folded_and_keep_their_sums() -> None:
    lanes = RunLanes()
    events = steps(0, range(2000), 0.0)
    for part in range(0, 2000, 250):
        lanes.add(table(*events[part : part + 250]), part)
    assert lanes.width_s == 1.0
    bins, rates = lanes.rates(True, 200.0)
    assert bins.tolist() == list(range(200))
    assert rates == pytest.approx([80.0] * 200)
    long = Stepped(1, 500.0, 0, 0, 8, 1.0, 8.0, 0.0, 400.0, 0.0, 0.0)
    lanes.add(table(long), 2001)
    told = lanes.changed(2000)
    assert told is not None
    assert told["ranks"] == [0, 1]
    assert told["width_s"] == 2.0
    # A step of minutes fills all its bins.
    assert [parts[5] for parts in told["parts"].tolist()[50:250]] == [100] * 200


def test_the_last_minute_moves_on() -> None:
    recent = RecentLanes()
    recent.add(table(*steps(0, range(300), 0.0)), 1)
    recent.add(table(*steps(0, range(900), 30.0)), 2)
    told = recent.changed(-1)
    assert told is not None
    assert told["bins"].tolist() == list(range(121, 241))
    # Steps that are older than that are left out.
    recent.add(table(*steps(1, range(10), 0.0)), 3)
    later = recent.changed(2)
    assert later is None or not any(any(parts[5:]) for parts in later["parts"].tolist())


def test_sets_that_take_turns_have_a_loss_each(tmp_path: Path) -> None:
    turns = [replace(each, turn=("critic", "generator")[each.step % 3 == 2]) for each in steps(0, range(30))]
    write(tmp_path, started(), begun(0), *turns, RunEnded(LAUNCHER, 5.0, "ok"))
    known = Page(read(WatchedRun(tmp_path))).update()
    for name, points in summarize(tmp_path).curves.set_losses.items():
        drawn = [each for each in known["loss"]["losses"][name] if each is not None]
        assert drawn == pytest.approx([point.loss for point in points], rel=1e-6)
    assert sorted(known["loss"]["losses"]) == ["critic", "generator"]
    assert known["run"]["loss"] is None
    assert known["loss"]["examples"][-1] == 240


def test_no_more_sets_are_kept_than_can_be_drawn() -> None:
    bins = LossBins()
    bins.add(table(*(replace(each, turn=str(each.step)) for each in steps(0, range(50)))), 1)
    changed = bins.changed(0, None)
    assert changed is not None
    assert len(changed["losses"]) == 8
    assert bins.examples == 400


def test_what_is_not_finite_is_left_out_of_the_loss() -> None:
    bins = LossBins()
    nan = Stepped(0, 1.0, 1, 0, 8, math.inf, 8.0, 0.0, 0.1, 0.0, 0.0)
    bins.add(table(*steps(0, [0]), nan), 1)
    changed = bins.changed(0, None)
    assert changed is not None
    assert changed["losses"][""][0] == pytest.approx(10.0)
    assert math.isnan(changed["losses"][""][1])
    assert bins.ends()[1] == pytest.approx(10.0)


def served(time_s: float, moved: int, counts: dict[str, int], busy_s: float) -> ServerStats:
    shard = ShardStats(EVIL, 40, 1, 1, 1, 0.1, moved, moved)
    return ServerStats(2, time_s, busy_s, 1.5, 7, {"0": counts}, {"0": 0.1}, {"late": 3}, (shard,))


def test_servers_averaging_checkpoints_and_memory(tmp_path: Path) -> None:
    write(tmp_path, started(strategy="parameter_server"), ServerStarted(2, 0.5, "weir", 9, 1, 40), *steps(0, range(9)))
    write(tmp_path, *(served(1.0 + n, 1000 * n, {"0": 10 * n, "2": 10 * n}, 0.5 * n) for n in range(1, 5)))
    write(tmp_path, ParametersAveraged(0, 3.0, 5, 5, 4, "steady", 0.1, 0.2, meeting=1))
    write(tmp_path, ParametersAveraged(1, 3.1, 5, 5, 4, "steady", 0.3, 0.2, meeting=1))
    write(tmp_path, Saved(0, 4.0, 8, 1234, 0.1, 0.2), SnapshotTaken(2, 4.0, 99, 0.01))
    write(tmp_path, WorkerEnded(0, 9.0, 9, 5, 300, 40, 80), ServerEnded(2, 9.0, 1, 200, 40, 0))
    known = Page(read(WatchedRun(tmp_path))).update()
    (server,) = known["servers"]["servers"]
    assert server["traffic"] == [[3.0, 2000.0], [4.0, 2000.0], [5.0, 2000.0]]
    assert server["busy"] == 0.5
    assert known["servers"]["histogram"] == [[0, 40], [2, 40]]
    assert {value for _, value in known["servers"]["staleness"]} == {1.0}
    assert known["servers"]["refused"] == {"late": 3}
    assert known["averaging"]["drift"] == [0.3]
    assert known["saves"]["saved"][0]["step"] == 8
    assert known["saves"]["snapshots"][0]["bytes"] == 99
    assert [(each["rank"], each["role"], each["peak"]) for each in known["processes"]] == [
        (0, "worker", 300),
        (2, "server", 200),
    ]
    assert known["run"]["peak"] == "300 B"


def test_a_server_that_was_replaced_counts_with_its_replacement(tmp_path: Path) -> None:
    first, second = (ServerStarted(2, time_s, "weir", 9, 1, 40) for time_s in (0.5, 3.5))
    write(tmp_path, started(strategy="parameter_server"), first)
    write(tmp_path, *(served(float(n), 1000 * n, {"0": 10 * n}, 0.1 * n) for n in (1, 2, 3)), second)
    # The replacement has been busier than the first one ever was before it says so.
    write(tmp_path, *(served(3.0 + n, 500 * n, {"2": 10 * n}, 0.5 * n) for n in (1, 2)))
    known = Page(read(WatchedRun(tmp_path))).update()["servers"]
    (server,) = known["servers"]
    assert server["moved"] == 2 * (3000 + 1000)
    assert server["traffic"] == [[2.0, 2000.0], [3.0, 2000.0], [5.0, 1000.0]]
    assert server["busy"] == 0.5
    assert known["histogram"] == [[0, 30], [2, 20]]
    assert known["refused"] == {"late": 6}


def test_what_was_lost_or_failed_is_told_with_its_words_made_harmless(tmp_path: Path) -> None:
    write(tmp_path, started(strategy=EVIL), begun(0, host=EVIL), Notice(0, 1.0, EVIL))
    write(tmp_path, Failed(0, 2.0, 7, EVIL, f"Traceback {EVIL}"), Lost(LAUNCHER, 3.0, 1, 0, EVIL, False))
    write(tmp_path, NonFinite(0, 4.0, 3, (1,), "skip"))
    known = Page(read(WatchedRun(tmp_path))).update()
    assert "\x1b" not in str(known)
    assert [line["kind"] for line in known["journal"]["lines"]] == ["not finite", "lost", "failed", "notice", "started"]
    assert known["journal"]["lines"][2]["detail"].startswith("Traceback <script>")
    assert known["processes"][0]["state"] == "failed"
    assert known["processes"][1]["state"] == "lost"


def test_of_too_many_lines_the_most_frequent_kind_goes() -> None:
    journal = Journal()
    journal.add(Failed(0, 0.5, 1, "first"))
    for index in range(1000):
        journal.add(NonFinite(0, 1.0 + index, index, (), "skip"))
    message = journal.message()
    assert len(message["lines"]) == 300
    assert message["lines"][-1]["text"] == "first (at step 1)"
    assert message["lines"][0]["text"].startswith("the gradient is not finite at step 999")
    assert message["counts"] == {"failed": 1, "not finite": 1000}


def test_too_many_meetings_are_thinned_and_the_largest_drift_stays() -> None:
    curve = DriftCurve()
    for index in range(3001):
        drift = 9.0 if index == 1500 else 0.1
        curve.add(ParametersAveraged(0, float(index), index, 1, 1, "", drift, 0.1))
    message = curve.message()
    assert len(message["drift"]) <= 400
    assert max(message["drift"]) == 9.0
    assert message["time_s"][-1] == 3000.0
