"""Curves of workers that do not go in step: rounds are missing, come twice, and come out of order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headrace.report.model.summary import summarize
from headrace.report.model.training import TrainingClock, curves_of
from headrace.report.model.verdict import References
from headrace.report.views.page import write_page
from headrace.report.views.table import comparison_table, run_plain, run_rows
from headrace.spec.events import Evaluated, ParametersAveraged, RunEnded, RunStarted, SharesBalanced, Stepped
from report.test_server_text import _render


def _step(rank, time_s, step, loss=1.0, examples=8):
    return Stepped(rank, time_s, step, 0, examples, loss, float(examples), 0.0, 0.1, 0.0, 0.0)


def _curves(steps, evaluated=(), examples_per_epoch=16):
    by_rank = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)
    return curves_of(steps, evaluated, TrainingClock([by_rank], evaluated), examples_per_epoch)


def test_a_round_is_all_workers_that_took_part_in_it():
    # Worker 0 computes both portions of rounds 0 and 2; worker 1, slower, those of round 1.
    steps = [
        *(_step(0, 1.1, 0, 8.0), _step(0, 1.2, 0, 6.0), _step(0, 1.3, 2, 4.0), _step(0, 1.4, 2, 2.0)),
        *(_step(1, 1.5, 1, 7.0), _step(1, 1.9, 1, 5.0)),
    ]
    first, second, third = _curves(steps).loss
    assert [(point.examples, point.loss) for point in (first, second, third)] == [(16, 7.0), (32, 6.0), (48, 3.0)]
    # The third round was over before the second: the curve goes forward.
    assert [point.seconds for point in (first, second, third)] == pytest.approx([0.2, 0.9, 0.9])


def test_an_evaluation_stands_at_the_rounds_before_it_though_some_are_missing():
    # Rounds 1 and 3 were left out.
    steps = [_step(0, 1.1, 0), _step(0, 1.2, 2), _step(0, 1.3, 4), _step(0, 1.4, 5)]
    evaluated = [Evaluated(0, 1.0 + done / 10, done, 1, 5, {"loss": 1.0}, 0.0) for done in (0, 1, 2, 3, 4, 6, 9)]
    points = _curves(steps, evaluated).evaluations
    assert [point.epochs for point in points] == [0.0, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]


def _paced(*seconds_a_round, rounds=10):
    """The steps of two workers whose rounds take so long, `rounds` of each pace, after a warm-up of five."""
    paces = [seconds_a_round[0]] * 5 + [pace for pace in seconds_a_round for _ in range(rounds)]
    ends = list(itertools.accumulate(paces, initial=1.0))[1:]
    return {rank: [_step(rank, end, step) for step, end in enumerate(ends)] for rank in (0, 1)}


def test_the_last_to_come_to_an_exchange_waits_for_no_other():
    def late(rank, step, wait_s):
        # Of a round of 1 s whoever waits less for data waits for the other.
        return Stepped(rank, 1.0 + step, step, 0, 8, 1.0, 8.0, wait_s, 0.1, 0.9 - wait_s, 0.0)

    by_rank = {rank: [late(rank, step, 0.8 if step % 2 == rank else 0.2) for step in range(20)] for rank in (0, 1)}
    clock = TrainingClock([by_rank], ())
    last = clock.times_of_last()
    assert last is not None
    assert (last.wait_s, last.exchange_s, last.compute_s) == pytest.approx((0.8, 0.1, 0.1))
    assert clock.times(0).wait_s == pytest.approx(0.5, abs=0.03)
    assert TrainingClock([{0: by_rank[0]}], ()).times_of_last() is None


def test_the_spread_is_between_the_parts_of_the_steady_state():
    assert TrainingClock([_paced(0.1, 0.1, 0.1, 0.1)], ()).spread() == pytest.approx(0.0)
    # Rates of 160 and of 80 examples a second: 80 over their mean of 140.
    assert TrainingClock([_paced(0.1, 0.1, 0.2, 0.1)], ()).spread() == pytest.approx(80 / 140)


def test_rounds_that_are_done_again_count_once_in_the_rate():
    # Rank 1 is lost in round 9; rank 0 does the rounds from 6 on again, alone.
    lone = [_step(0, 1.0 + round_ / 10, round_) for round_ in range(9)]
    lone += [_step(0, 2.0 + again / 10, 6 + again, examples=16) for again in range(12)]
    lost = [_step(1, 1.0 + round_ / 10, round_) for round_ in range(9)]
    clock = TrainingClock([{0: lone, 1: lost}], ())
    # It begins after four rounds of each: rounds 4 to 17, of 16 examples each.
    assert clock.rate() == pytest.approx(14 * 16 / (lone[-1].time_s - lone[3].time_s))


def test_an_evaluation_is_no_spread():
    evaluated = [Evaluated(0, 3.5, 25, 1, 5, {"loss": 1.0}, 0.5)]
    by_rank = {
        rank: [_step(rank, step.time_s + 0.5 * (step.time_s > 3.01), step.step) for step in steps]
        for rank, steps in _paced(0.1, 0.1, 0.1, 0.1).items()
    }
    assert TrainingClock([by_rank], evaluated).spread() == pytest.approx(0.0, abs=1e-6)


def test_a_steady_state_too_short_for_a_spread():
    assert TrainingClock([_paced(0.01, 0.01, 0.03, 0.01)], ()).spread() is None
    assert TrainingClock([_paced(0.5, 0.5, 0.9, 0.5, rounds=3)], ()).spread() is None
    assert TrainingClock([], ()).spread() is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 8), st.floats(-5, 5), st.floats(0.1, 1)),
        min_size=1,
        max_size=60,
    )
)
def test_any_order_of_any_rounds_gives_a_curve_that_goes_forward(drawn):
    clock = dict.fromkeys(range(4), 1.0)
    steps = []
    for rank, step, examples, loss, seconds in drawn:
        clock[rank] += seconds
        steps.append(_step(rank, clock[rank], step, loss if examples else None, examples))
    curves = _curves(steps)
    for before, after in itertools.pairwise(curves.loss):
        assert before.examples <= after.examples
        assert before.seconds <= after.seconds
    counted = [step for step in steps if step.examples]
    if counted:
        assert curves.loss[-1].examples == sum(step.examples for step in steps)
        total = sum(step.loss * step.examples for step in counted)
        gained = [point.examples for point in curves.loss]
        widths = [after - before for before, after in itertools.pairwise([0, *gained])]
        assert sum(point.loss * width for point, width in zip(curves.loss, widths, strict=True)) == pytest.approx(
            total, abs=1e-9
        )
    again = _curves(sorted(steps, key=lambda step: step.time_s)).loss
    assert [point.examples for point in again] == [point.examples for point in curves.loss]


def test_a_run_of_uneven_workers_has_whole_curves_and_a_rate(tmp_path, make_served_run):
    summary = summarize(make_served_run(tmp_path / "run", 4, 2))
    assert summary.curves.loss[-1].examples == summary.training.examples
    # 10 + 5 + 3.3 + 2.5 steps a second of 8 examples.
    assert summary.examples_per_s == pytest.approx(8 * (10 + 5 + 10 / 3 + 2.5), rel=0.03)
    assert {rank: times.total_s for rank, times in summary.times_by_rank.items()} == {
        rank: pytest.approx(0.1 * (rank + 1)) for rank in range(4)
    }


BECAUSE = "the exchange takes 3.1% of the time, at most 5% is allowed"
MEETINGS = (
    ParametersAveraged(0, 1.2, 2, 2, 4, "as asked for", 0.02, 0.004),
    ParametersAveraged(0, 2.2, 6, 4, 4, "as asked for", 0.06, 0.006),
    ParametersAveraged(0, 3.0, 10, 4, 8, BECAUSE, 0.04, 0.005, (1,)),
)


def test_a_run_without_meetings_says_nothing_of_them(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run"))
    assert summary.averaging is None
    assert run_plain(summary)["averaging"] is None
    assert "averaging" not in dict(run_rows(summary))
    assert "How far do workers drift apart?" not in write_page(tmp_path / "page.html", [summary]).read_text()


def test_the_meetings_of_one_run_in_words_and_pictures(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run", "parameter_averaging", extra=MEETINGS))
    rows = dict(run_rows(summary))
    assert rows["averaging"] == "3 meetings, one in 3.33 rounds, 5.00 ms each; the last period is 8 rounds"
    assert rows["period because"] == BECAUSE
    assert rows["drift"] == "mean 0.04, largest 0.06 of the parameters' norm, after 6 rounds"
    assert rows["left out"] == "rank 1 1 ×: parameters that were not finite; they went on from the others' mean"
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "How far do workers drift apart?" in page
    assert "How long do workers go on by themselves?" in page
    plain = run_plain(summary)["averaging"]
    assert plain["left_out"] == {"1": 1}
    assert [meeting["step"] for meeting in plain["meetings"]] == [2, 6, 10]


def test_a_period_that_does_not_change_has_no_picture(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run", "parameter_averaging", extra=MEETINGS[:2]))
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "How far do workers drift apart?" in page
    assert "How long do workers go on by themselves?" not in page


def test_a_comparison_says_one_sentence(tmp_path, make_run):
    runs = [
        summarize(make_run(tmp_path / "mirrored")),
        summarize(make_run(tmp_path / "mean", "parameter_averaging", extra=MEETINGS)),
    ]
    lines = _render(comparison_table(runs, References()))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    sentence = f"3 meetings, one in 3.33 rounds, the last period 8 rounds ({BECAUSE}); drift mean 0.04, largest 0.06."
    assert f"mean (parameter_averaging): {sentence}" in text
    assert text.count("meetings, one in") == 1


def test_what_was_done_again_counts_once(tmp_path, make_run, write_events):
    run_dir = make_run(tmp_path / "run", "parameter_averaging", status="interrupted", extra=MEETINGS)
    first = summarize(run_dir).started
    again = RunStarted(-1, 4.0, *(getattr(first, name) for name in RunStarted.__match_args__[2:11]), resumed_step=6)
    last = ParametersAveraged(0, 5.0, 9, 3, 3, "as asked for", 0.01, 0.004)
    write_events(run_dir, [again, last, RunEnded(-1, 6.0, "ok")])
    meetings = summarize(run_dir).averaging.meetings
    assert [(meeting.step, meeting.time_s) for meeting in meetings] == [(2, 1.2), (6, 2.2), (9, 5.0)]


def test_meetings_that_a_third_attempt_does_again_count_once(tmp_path, make_run, write_events):
    run_dir = make_run(tmp_path / "run", "parameter_averaging", status="interrupted", extra=MEETINGS)
    first = summarize(run_dir).started
    for time_s, resumed in ((4.0, 10), (5.0, 4)):
        write_events(run_dir, [structs.replace(first, time_s=time_s, resumed_step=resumed)])
    write_events(run_dir, [ParametersAveraged(0, 6.0, 8, 4, 4, "as asked for", 0.01, 0.004)])
    assert [meeting.step for meeting in summarize(run_dir).averaging.meetings] == [2, 8]


def test_shares_of_a_run_that_is_resumed_with_more_workers_have_a_picture(tmp_path, make_run, write_events):
    change = SharesBalanced(0, 1.2, 4, (20, 12), (0.1, 0.2))
    run_dir = make_run(tmp_path / "run", status="interrupted", extra=(change,))
    first = summarize(run_dir).started
    again = [_step(rank, 4.2 + 0.1 * step, step) for rank in range(4) for step in (8, 9)]
    write_events(run_dir, [structs.replace(first, time_s=4.0, resumed_step=8, workers=4), *again])
    summary = summarize(run_dir)
    assert summary.balance.splits == ((0, (8, 8)), (4, (20, 12)), (8, (4, 4, 4, 4)))
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    for name, boxes in (("rank 0", 3), ("rank 3", 1)):
        assert page.count(f"<title>{name}, ") == boxes


def test_shares_over_time_in_words_and_a_picture(tmp_path, make_run, write_events):
    changes = (SharesBalanced(0, 1.2, 4, (20, 12), (0.1, 0.2)), SharesBalanced(0, 2.2, 8, (22, 10), (0.1, 0.2)))
    run_dir = make_run(tmp_path / "run", status="interrupted", extra=changes)
    summary = summarize(run_dir)
    batch = summary.started.global_batch_size
    assert summary.balance.splits == ((0, (batch // 2, batch // 2)), (4, (20, 12)), (8, (22, 10)))
    assert dict(run_rows(summary))["shares"] == "22 + 10 examples of a batch, after 2 changes"
    assert run_plain(summary)["balance"]["last"] == (22, 10)
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "How is a batch shared?" in page
    assert (
        "How is a batch shared?"
        not in write_page(tmp_path / "b.html", [summarize(make_run(tmp_path / "b"))]).read_text()
    )
    # A resumed run begins with equal shares.
    first = summary.started
    again = RunStarted(-1, 4.0, *(getattr(first, name) for name in RunStarted.__match_args__[2:11]), resumed_step=6)
    write_events(run_dir, [again, RunEnded(-1, 6.0, "ok")])
    assert [step for step, _ in summarize(run_dir).balance.splits] == [0, 4, 6]
