from __future__ import annotations

import dataclasses
import math

import pytest

from headrace.errors import DataError
from headrace.report.model.summary import summarize
from headrace.report.model.training import CURVE_POINTS
from headrace.report.model.verdict import References, verdict
from headrace.report.views.table import run_plain, run_rows
from headrace.spec.events import LAUNCHER, Evaluated, Failed, Notice, RunStarted, Stepped, WorkerEnded, WorkerStarted
from headrace.spec.plain import from_plain, to_plain


def _started(workers=1, examples=100):
    return RunStarted(LAUNCHER, 0.0, "mirrored", workers, "cpu", 1, 8, examples, "now", {}, {})


def _step(rank, time_s, step, loss=1.0, examples=8, weight=None, compute_s=0.1):
    weight = float(examples) if weight is None else weight
    return Stepped(rank, time_s, step, 0, examples, loss, weight, 0.0, compute_s, 0.0, 0.0)


def test_what_was_trained_and_how_fast(tmp_path, make_run):
    training = summarize(make_run(tmp_path / "mirrored")).training
    assert training.steps == 10
    assert training.examples == 2 * 2 * (4 * 8 + 4)
    assert training.epochs == 2.0
    # Steps pass from 1.0 s to 2.6 s, 0.5 s of it evaluation; the second evaluation comes after the last step.
    assert training.seconds == pytest.approx(1.1)
    # The window: from the end of step 4 at 1.5 s to 2.6 s, without the evaluation: steps 5 to 9 in 0.6 s.
    assert training.examples_per_s == pytest.approx(2 * 36 / 0.6)


def test_where_the_mean_step_goes(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "mirrored"))
    assert set(summary.times_by_rank) == {0, 1}
    for times in (summary.times, *summary.times_by_rank.values()):
        assert times.wait_s == pytest.approx(0.001)
        assert times.compute_s == pytest.approx(0.07)
        assert times.exchange_s == pytest.approx(0.02)
        assert times.update_s == pytest.approx(0.009)
        # 0.6 s for 5 steps are 0.12 s a step, 0.1 s of it spent inside.
        assert times.other_s == pytest.approx(0.02)
        assert times.total_s == pytest.approx(0.12)


def test_bytes_and_memory(tmp_path, make_run):
    cost = summarize(make_run(tmp_path / "mirrored")).cost
    assert cost.moved_bytes_per_step == 2 * 5000 / 10
    assert cost.peak_memory_bytes == 300_000_001
    assert (cost.parameter_bytes, cost.optimizer_bytes) == (8000, 16000)


def test_workers_on_devices_of_several_kinds_are_told_apart(tmp_path, make_run):
    alike = summarize(make_run(tmp_path / "alike"))
    assert (alike.outcome.devices, alike.mixed, alike.named_rank(1)) == ({0: "cpu", 1: "cpu"}, False, "rank 1")
    # In place of one that was lost.
    again = WorkerStarted(0, 0.95, "mill", 102, "cuda:0", 1)
    mixed = summarize(make_run(tmp_path / "mixed", extra=[again]))
    assert (mixed.outcome.devices, mixed.mixed, mixed.named_rank(0)) == (
        {0: "cuda:0", 1: "cpu"},
        True,
        "rank 0 (cuda:0)",
    )
    assert dict(run_rows(mixed))["processes"] == "2 workers on mill (cuda:0, cpu), 1 thread each"
    assert run_plain(mixed)["devices"] == {"0": "cuda:0", "1": "cpu"}


def test_names_and_notices(tmp_path, make_run):
    twice = [Notice(rank, 0.2, "said by two") for rank in (0, 1)]
    summary = summarize(make_run(tmp_path / "a", extra=twice))
    assert (summary.label, summary.strategy, summary.workers, summary.started.device, summary.started.threads) == (
        "a",
        "mirrored",
        2,
        "cpu",
        1,
    )
    assert summary.name == "a (mirrored)"
    assert summary.status == "ok"
    assert summary.outcome.notices == ("the batch is split", "said by two")
    assert summary.outcome.hosts == ("mill",)


def test_evaluations_stand_at_the_examples_seen_by_then(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "mirrored"))
    points = summary.curves.evaluations
    assert [point.epochs for point in points] == [1.0, 2.0]
    assert [point.seconds for point in points] == [pytest.approx(0.5), pytest.approx(1.1)]
    assert summary.metrics == {"loss": 0.5, "accuracy": 0.7}


def test_the_loss_is_weighted_over_workers(tmp_path, write_events):
    steps = [_step(0, 1.0, 0, loss=1.0, weight=1.0), _step(1, 1.2, 0, loss=5.0, weight=3.0)]
    steps += [_step(0, 2.0, 1, loss=None, examples=0), _step(1, 2.1, 1, loss=2.0, examples=3)]
    summary = summarize(write_events(tmp_path, [_started(2), *steps]))
    first, second = summary.curves.loss
    assert (first.examples, first.loss) == (16, (1.0 * 1 + 5.0 * 3) / 4)
    assert first.seconds == pytest.approx(1.2 - 0.9)
    assert (second.examples, second.loss) == (19, 2.0)


def test_a_long_curve_is_thinned_without_losing_its_mean(tmp_path, write_events):
    count = 3 * CURVE_POINTS - 1
    steps = [_step(0, 1.0 + index, index, loss=float(index)) for index in range(count)]
    points = summarize(write_events(tmp_path, [_started(), *steps])).curves.loss
    assert len(points) == CURVE_POINTS
    assert points[0].loss == 1.0
    assert points[0].examples == 24
    assert points[-1].examples == 8 * count
    assert points[-1].loss == (count - 2 + count - 1) / 2


def test_a_loss_that_is_not_finite_is_left_out_of_the_curve(tmp_path, write_events):
    steps = [_step(0, 1.0, 0), _step(0, 2.0, 1, loss=math.nan), _step(0, 3.0, 2, loss=math.inf)]
    summary = summarize(write_events(tmp_path, [_started(), *steps]))
    assert [point.loss for point in summary.curves.loss] == [1.0]
    assert summary.steps == 3


def test_short_runs_leave_out_half_and_one_step_counts_whole(tmp_path, write_events):
    one = summarize(write_events(tmp_path / "one", [_started(), _step(0, 1.0, 0)]))
    assert one.examples_per_s == pytest.approx(8 / 0.1)
    assert one.times.compute_s == pytest.approx(0.1)
    steps = [_step(0, 1.0, 0, compute_s=1.0), *(_step(0, 1.0 + 0.1 * index, index) for index in (1, 2, 3))]
    four = summarize(write_events(tmp_path / "four", [_started(), *steps]))
    assert four.examples_per_s == pytest.approx(8 / 0.1)
    assert four.training.seconds == pytest.approx(1.3)


def test_the_window_opens_when_the_slowest_is_warm(tmp_path, write_events):
    fast = [_step(0, 0.1 * (index + 1), index) for index in range(20)]
    slow = [_step(1, 0.2 * (index + 1), index, compute_s=0.2) for index in range(10)]
    summary = summarize(write_events(tmp_path, [_started(2), *fast, *slow]))
    # Both end at 2.0 s; the slow one's fifth step ends at 1.0 s.
    assert summary.examples_per_s == pytest.approx((10 + 5) * 8 / 1.0)
    assert summary.steps == 20
    assert summary.times.compute_s == pytest.approx((10 * 0.1 + 5 * 0.2) / 15)


def test_a_run_that_failed_keeps_the_first_failure_and_hides_no_missing_worker(tmp_path, write_events):
    events = [
        _started(2),
        *(_step(rank, 1.0 + index, index) for rank in (0, 1) for index in range(4)),
        Failed(1, 4.5, 4, "ValueError: bad", "Traceback\nValueError: bad"),
        Failed(0, 4.6, 4, "rank 1 was lost"),
        WorkerEnded(0, 4.7, 4, 100, 5000, 10, 20),
    ]
    summary = summarize(write_events(tmp_path, events))
    assert summary.status == "unfinished"
    assert (summary.outcome.failure.rank, summary.outcome.failure.cause) == (1, "ValueError: bad")
    assert summary.cost.peak_memory_bytes == 5000
    assert summary.cost.moved_bytes_per_step is None
    assert summary.cost.parameter_bytes is None
    assert summary.steps == 4


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_the_launcher_says_how_it_ended(tmp_path, make_run, status):
    assert summarize(make_run(tmp_path / "a", status=status)).status == status


def test_a_run_without_a_step_has_no_rates(tmp_path, write_events):
    summary = summarize(write_events(tmp_path, [_started()]))
    assert (summary.steps, summary.examples_per_s, summary.times) == (0, None, None)
    assert summary.training.seconds == 0.0
    assert summary.curves.loss == ()
    assert summary.metrics == {}


def test_evaluations_before_the_first_step_cost_no_training_time(tmp_path, write_events):
    events = [_started(), Evaluated(0, 0.5, 0, 0, 10, {"loss": 3.0}, 0.5), _step(0, 1.0, 0), _step(0, 1.1, 1)]
    summary = summarize(write_events(tmp_path, events))
    assert summary.training.seconds == pytest.approx(0.2)
    assert summary.curves.evaluations[0].seconds == 0.0
    assert summary.curves.evaluations[0].epochs == 0.0


def test_a_run_that_never_began_is_an_error(tmp_path, write_events):
    with pytest.raises(DataError, match="run_started"):
        summarize(write_events(tmp_path, [Notice(LAUNCHER, 0.0, "hm")]))


def test_a_summary_has_a_json_form(tmp_path, make_run):
    plain = to_plain(summarize(make_run(tmp_path / "mirrored")))
    assert plain["training"]["steps"] == 10
    assert plain["times_by_rank"]["1"]["compute_s"] == pytest.approx(0.07)
    started = from_plain(RunStarted, plain["started"])
    assert started.workers == 2


@pytest.fixture
def run(tmp_path, make_run):
    """A run of 120 examples/s for two workers, 60 for one."""
    return lambda strategy, **options: summarize(make_run(tmp_path / strategy, strategy, **options))


def test_ratios(run):
    mirrored, one = run("mirrored"), run("one_device", workers=1)
    references = References(100.0, {1: 70.0, 2: 150.0})
    assert references.to_one_device(mirrored) == pytest.approx(1.2)
    assert references.to_ceiling(mirrored) == pytest.approx(0.8)
    assert references.to_ceiling(one) is None
    assert References(None, {}).to_one_device(mirrored) is None
    assert References(None, {3: 1.0}).to_ceiling(mirrored) is None


@pytest.mark.parametrize(
    ("one", "rate", "advice"),
    [
        (100.0, "mirrored 1.20 ×", "distribution pays here; mirrored is what to pick"),
        (117.0, "mirrored 1.03 ×", "as good as equal; one process is what to pick"),
        (125.0, "mirrored 0.96 ×", "as good as equal; one process is what to pick"),
        (150.0, "mirrored 0.80 ×", "does not pay here; one process is what to pick"),
    ],
)
def test_the_verdict_follows_the_ratio(run, one, rate, advice):
    sentence = verdict([run("one_device", workers=1), run("mirrored")], References(one, {}))
    assert rate in sentence
    assert advice in sentence
    assert "one_device" not in sentence


def test_the_verdict_without_anything_to_compare(run):
    assert "not known" in verdict([run("mirrored")], References(None, {}))
    assert "more than one worker" in verdict([run("one_device", workers=1)], References(60.0, {}))


def test_the_verdict_counts_no_run_that_failed(run):
    runs = [run("mirrored", status="failed"), run("central_storage")]
    sentence = verdict(runs, References(100.0, {}))
    assert "central_storage 1.20 ×" in sentence
    assert "mirrored 1.20" not in sentence
    assert "not finished: mirrored" in sentence


def test_the_verdict_warns_of_a_faster_run_that_learns_less(run):
    one, mirrored = run("one_device", workers=1), run("mirrored")
    (*_, last) = one.curves.evaluations
    better = dataclasses.replace(last, metrics={"loss": 0.25})
    one = dataclasses.replace(one, curves=dataclasses.replace(one.curves, evaluations=(better,)))
    assert "loss of 0.500 against 0.250" in verdict([one, mirrored], References(100.0, {}))
