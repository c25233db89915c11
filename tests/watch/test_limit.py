"""What the page's sentence is made of: the same functions, and nearly the same numbers, as the report's."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.report.model.summary import brief_of, summarize
from headrace.spec.events import LAUNCHER, Evaluated, InputStageStats, InputStats, RunEnded
from headrace.watch.state import WatchedRun
from watch.made import Page, begun, read, started, steps, write


def fed(rank: int, time_s: float, busy_s: float) -> InputStats:
    stage = InputStageStats("source", busy_s, 0.0)
    return InputStats(rank, time_s, "inline", 1, time_s, busy_s, 0, 100, 800, 100, 0, (stage,))


def test_the_sentence_and_the_values_are_the_reports(tmp_path: Path) -> None:
    evaluated = Evaluated(0, 3.05, 20, 0, 9, {"loss": 0.5, "accuracy": 0.9}, 0.05)
    write(tmp_path, started(), begun(0), begun(1), *steps(0, range(40)), *steps(1, range(40)), evaluated)
    write(tmp_path, *(fed(rank, 4.9, 0.4) for rank in (0, 1)))
    run = WatchedRun(tmp_path)
    known = Page(read(run)).update()["run"]
    assert known["headline"].startswith("Running for 4 epochs, 40 steps in ")
    assert ["limited by", "compute"] in known["tiles"]
    write(tmp_path, RunEnded(LAUNCHER, 5.1, "ok"))
    known, brief = Page(read(run)).update()["run"], brief_of(summarize(tmp_path))
    assert brief.bottleneck is not None
    assert brief.bottleneck.because in known["headline"]
    assert known["headline"].split(" in ")[0] == brief.headline.split(" in ")[0] == "Done after 4 epochs, 40 steps"
    assert [name for name, _ in known["tiles"]] == [name for name, _ in brief.tiles]
    assert known["tiles"][0] == list(brief.tiles[0]) == ["accuracy", "0.900"]


def test_the_parts_of_a_step_are_means_without_first_steps_and_evaluations(tmp_path: Path) -> None:
    slow = [replace(each, compute_s=5.0) for each in steps(0, range(5), 0.5)]
    write(tmp_path, started(workers=1), begun(0, 0.4), *slow, *steps(0, range(5, 45), 1.0))
    # It stands still for an evaluation, which is no part of a step.
    write(tmp_path, *steps(0, range(45, 85), 7.0), Evaluated(0, 6.9, 45, 0, 9, {"loss": 1.0}, 2.0))
    parts = Page(read(WatchedRun(tmp_path))).update()["parts"]
    assert parts["ranks"] == [0]
    assert parts["seconds"][0] == pytest.approx([0.01, 0.05, 0.03, 0.01, 0.0], abs=1e-6)


def test_of_stages_nothing_is_said_that_is_not_known(tmp_path: Path) -> None:
    plan = {"partition": [["a"], ["b"]]}
    write(tmp_path, replace(started(), plan=plan), begun(0), *steps(0, range(20)), fed(0, 2.0, 0.1))
    assert ["limited by", "–"] in Page(read(WatchedRun(tmp_path))).update()["run"]["tiles"]
