"""Numbers of one's own, of a callback, a strategy and a loop: in events, the report, its page, trackers and watch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import UsageError
from headrace.report.model.summary import summarize
from headrace.report.model.training import rank_of
from headrace.report.trackers.curves import Tracked, TrackedValue
from headrace.report.trackers.tracker import Tracker
from headrace.report.views.page import write_page
from headrace.report.views.table import run_plain, run_rows
from headrace.spec.events import RunStarted, ValuesLogged
from headrace.testing.jobs import Case, dense
from headrace.watch.state import WatchedRun
from strategies.test_declared_state import Anchored
from watch.made import Page, read, started, write


class Steps(hr.Callback):
    def on_step(self, moment: hr.Moment) -> None:
        moment.log({"of a callback": moment.step / 2})


def loop(worker: hr.Worker) -> None:
    for number, batch in enumerate(worker.batches(), 1):
        worker.step(batch)
        worker.log("loop/own", torch.tensor(float(number + worker.rank), requires_grad=True))
        if worker.rank:
            worker.log("loop/nan", math.nan if number == 1 else number)


class Kept(Tracker):
    def __init__(self) -> None:
        super().__init__("Kept", every_s=0)
        self.values: dict[str, dict[int, float]] = {}

    def begin(self, started: RunStarted) -> None:
        pass

    def write(self, entries: tuple[Tracked, ...]) -> None:  # type: ignore[override]
        for each in entries:
            if isinstance(each, TrackedValue):
                self.values.setdefault(each.tag, {})[each.step] = each.value

    def end(self, status: str) -> None:
        pass


@pytest.mark.slow
def test_each_place_shows_the_numbers_of_each_source(tmp_path: Path) -> None:
    with Kept() as kept:
        run = hr.launch(
            loop,
            Case(dense).job(12),
            Anchored(2),
            callbacks=[Steps()],
            device="cpu",
            engine=hr.ThreadEngine(),
            run_dir=tmp_path / "run",
            on_event=kept,
        )
    assert sum(isinstance(event, ValuesLogged) for event in run.events) == 9 * 6
    last = {
        "anchors/rank": 0.5,
        "anchors/rank/rank-1": 1.5,
        "loop/nan/rank-1": 9.0,
        "loop/own": 9.0,
        "loop/own/rank-1": 10.0,
        "of a callback": 4.5,
    }
    assert {name: values[9] for name, values in kept.values.items() if name in last} == last
    assert math.isnan(kept.values["loop/nan/rank-1"][1])

    summary = summarize(tmp_path / "run")
    assert run_plain(summary)["logged"] == last
    (line,) = (text for name, text in run_rows(summary) if name == "logged")
    assert line.endswith("loop/nan/rank-1 9.00, loop/own 9.00, loop/own/rank-1 10.0, of a callback 4.50")
    page = write_page(tmp_path / "page.html", [summary]).read_text()
    for text in ("Last: rank 0 9.00, rank 1 10.0.", "How does of a callback go?", "How does anchors/rank go?"):
        assert text in page
    assert "How does loop/own go?" in write_page(tmp_path / "both.html", [summary, summary]).read_text()

    watched = WatchedRun(tmp_path / "run")
    watched.apply(watched.poll())
    told: list[dict[str, Any]] = watched.details(-1)["numbers"]
    assert {each["name"]: each["values"][-1] for each in told} == last


def test_what_an_attempt_repeats_counts_once(tmp_path: Path) -> None:
    def logged(time_s: float, step: int) -> ValuesLogged:
        return ValuesLogged(1, time_s, step, {"drift": time_s})

    write(tmp_path, started(), *(logged(float(step), step) for step in (1, 2, 3)))
    write(tmp_path, started(4.0, resumed=2), logged(5.0, 3))
    points = ((1, 1.0), (2, 2.0), (3, 5.0))
    assert summarize(tmp_path).numbers == {"drift/rank-1": points}
    (curve,) = Page(read(WatchedRun(tmp_path))).update()["numbers"]
    assert curve["values"] == [value for _, value in points]


def test_a_number_of_another_rank_is_told_apart_by_the_end_of_its_curve() -> None:
    assert rank_of("drift/rank-1") == ("drift", "rank 1")
    assert rank_of("drift") == ("drift", "rank 0")
    assert rank_of("ranks/rank-x") == ("ranks/rank-x", "rank 0")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("a\nb", 1.0, "a name has letters, digits, spaces"),
        ("", 1.0, "a name has letters, digits, spaces"),
        (3, 1.0, "a name has letters, digits, spaces"),
        ("x", "high", "log takes numbers by name, got 'high' for 'x'"),
        ("x", None, "log takes numbers by name, got None for 'x'"),
        ("x", torch.ones(2), "log takes numbers by name, got tensor"),
    ],
)
def test_what_no_curve_can_have_is_refused(name: Any, value: Any, said: str) -> None:
    def logs(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            worker.log(name, value)

    with pytest.raises(UsageError, match=said):
        hr.launch(logs, Case(dense).job(8), device="cpu", engine=hr.ThreadEngine())
