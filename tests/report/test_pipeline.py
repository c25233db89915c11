"""A pipeline's step on the page: what its ranks worked on, what they waited for, and the schedule's own bubble."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headrace.report.model.events import Attempt
from headrace.report.model.pipeline import passed_of
from headrace.report.model.summary import summarize
from headrace.report.views.page import write_page
from headrace.report.views.table import run_plain, run_rows
from headrace.spec.events import LAUNCHER, PipelineStepTimed, RunEnded, RunStarted, StagePass, Stepped
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan, Role, StageCost

ROLES = tuple(Role(rank, "worker", "mill", "cpu", 1, rank // 2) for rank in range(4))
STAGES = tuple(StageCost(1, seconds, 8, 8, 8) for seconds in (2.9, 3.1))
PLAN = to_plain(Plan("pipeline", {}, ROLES, (1, 1), 8, (), (("a",), ("b",)), STAGES))
STARTED = RunStarted(LAUNCHER, 0.0, "pipeline", 4, "cpu", 1, 8, 80, "2026-11-22T05:00:00+00:00", PLAN, {})


def passes_of(rank: int, begin: float, stretch: float = 1.0) -> tuple[StagePass, ...]:
    """Two micro-batches through two stages: forward 1 s, backward 2 s; the second stage waits 1 s, the first 3 s.

    stage 0   0 1 . . . . 1 1 0 0
    stage 1   . 0 1 1 1 0 0 .           (1 s, 1 s, 2 s, 2 s)
    """
    spans = {
        0: [(0, False, 0, 1, 0), (1, False, 1, 2, 0), (1, True, 2, 7, 3), (0, True, 7, 9, 0)],
        1: [(0, False, 0, 2, 1), (1, False, 2, 3, 0), (1, True, 3, 5, 0), (0, True, 5, 7, 0)],
    }[rank]
    return tuple(
        StagePass(rank, micro_batch, backward, begin + stretch * began, begin + stretch * ended, stretch * waited)
        for micro_batch, backward, began, ended, waited in spans
    )


def told(step: int, stretch: float = 1.0, ranks: Sequence[int] = (0, 1)) -> list[PipelineStepTimed]:
    began = 100.0 * step
    return [
        PipelineStepTimed(rank, began + 10, step, 2, passes_of(rank % 2, began, stretch if rank < 2 else 50.0))
        for rank in ranks
    ]


def test_the_bubble_is_the_time_in_which_ranks_work_on_nothing() -> None:
    passed = passed_of([Attempt(STARTED, (*told(1),))])
    assert passed is not None
    assert passed.seconds == pytest.approx(9)
    assert passed.micro_batches == 2
    # Each rank works 6 s of 9 s.
    assert passed.bubble == pytest.approx(1 / 3)
    # Two micro-batches in two stages: (K - 1) / (M + K - 1).
    assert passed.scheduled_bubble == pytest.approx(1 / 3)
    assert [(span.rank, span.start, span.stop) for span in passed.scheduled if not span.action.backward] == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 1, 2),
        (1, 2, 3),
    ]


def test_waiting_for_transfers_makes_the_bubble_larger_than_the_schedules() -> None:
    slow = [replace(event, passes=(*event.passes[:3], _later(event.passes[3], 3.0))) for event in told(1)]
    passed = passed_of([Attempt(STARTED, tuple(slow))])
    assert passed is not None
    assert passed.bubble == pytest.approx(1 / 2)
    assert passed.scheduled_bubble == pytest.approx(1 / 3)


def test_a_backward_pass_in_two_parts_is_scheduled_as_two() -> None:
    """F 1 s, B 1 s, W 1 s: rank 0 waits for the gradient of rank 1, which makes its weights' gradient later."""
    spans = {
        0: [(False, 0, 1, 0, ""), (True, 1, 4, 2, "input"), (True, 4, 5, 0, "weights")],
        1: [(False, 0, 2, 1, ""), (True, 2, 3, 0, "input"), (True, 3, 4, 0, "weights")],
    }
    passes = {
        rank: tuple(StagePass(rank, 0, backward, *times, part) for backward, *times, part in each)
        for rank, each in spans.items()
    }
    passed = passed_of([Attempt(STARTED, tuple(PipelineStepTimed(rank, 9, 1, 1, passes[rank]) for rank in passes))])
    assert passed is not None
    assert [(span.rank, span.start, span.stop) for span in passed.scheduled] == [
        *[(0, 0, 1), (0, 3, 4), (0, 4, 5)],
        *[(1, 1, 2), (1, 2, 3), (1, 3, 4)],
    ]
    assert passed.bubble == passed.scheduled_bubble == pytest.approx(0.4)


def _later(last: StagePass, seconds: float) -> StagePass:
    return replace(last, ended_s=last.ended_s + seconds, waited_s=last.waited_s + seconds)


def test_the_step_of_median_length_is_shown_of_those_that_the_first_replica_has_told_wholly() -> None:
    events = [*told(1, 3.0), *told(2, 1.5, (0, 1, 2, 3)), *told(3, 1.0), *told(4, 9.0, (0, 2, 3))]
    passed = passed_of([Attempt(STARTED, tuple(events))])
    assert passed is not None
    assert (passed.step, passed.seconds) == (2, pytest.approx(13.5))
    assert passed.passes.keys() == {0, 1}
    assert passed_of([Attempt(STARTED, tuple(told(1, 1.0, (0, 2, 3))))]) is None


def test_the_page_has_a_chart_and_the_table_a_row(tmp_path, write_events):
    steps = [Stepped(rank, 109.0, 1, 0, 4, 2.0, 4.0, 0.0, 8.0, 0.5, 0.5) for rank in (0, 1)]
    run = write_events(tmp_path / "run", [STARTED, *steps, *told(1), RunEnded(LAUNCHER, 110.0, "ok")])
    summary = summarize(run)
    rows = dict(run_rows(summary))
    assert rows["bubble"] == "33 % of step 1; 33 % is the schedule's own with 2 micro-batches"
    assert rows["stages"] == "3000, 3000 ms a micro-batch; profiled: 2900, 3100 ms"
    assert rows["in flight"] == "at most 2 micro-batches a stage"
    plain = run_plain(summary)["passed"]
    assert plain["bubble"] == pytest.approx(1 / 3)
    assert plain["stage_s"] == {"0": pytest.approx(3), "1": pytest.approx(3)}
    assert plain["expected_s"] == (2.9, 3.1)
    assert plain["in_flight"] == {"0": 2, "1": 2}
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    assert "When does each stage work?" in page
    chart = page[page.index("When does each stage work?") :]
    chart = chart[: chart.index("</figure>")]
    assert "as measured in step 1: 33 % bubble" in chart
    # Eight passes and what two of them waited, and the schedule's eight.
    boxes = [colour for colour in re.findall(r"fill: var\(--(compute|update|other)\)", chart)]
    assert (boxes.count("compute"), boxes.count("update")) == (8, 8)
    assert boxes.count("other") == 2


def test_a_run_without_stages_has_none(tmp_path, make_run):
    summary = summarize(make_run(tmp_path / "run"))
    assert summary.passed is None
    assert "bubble" not in dict(run_rows(summary))
    assert "each stage" not in write_page(tmp_path / "page.html", [summary]).read_text()
