"""Runs and their progress as HTML inside another document."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.report.views.live import ProgressBar
from headrace.report.views.notebook import notebook_display, progress_html
from headrace.report.views.page import page_fragment
from headrace.spec.events import Notice
from watch.test_page import hostile_run


def parsed(fragment: str) -> ElementTree.Element:
    """Returns a fragment as XML, which it must be to be one element."""
    return ElementTree.fromstring(fragment)


def texts(element: ElementTree.Element) -> str:
    return " ".join(element.itertext())


@pytest.mark.slow
def test_a_run_is_a_list_and_a_picture_whose_style_stays_inside(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    summary = summarize(make_run(tmp_path / "<script>x", extra=[Notice(0, 1.0, "<script>alert(1)</script>")]))
    element = parsed(page_fragment([summary]))
    assert "examples/s" in texts(element)
    assert "accuracy" in texts(element)
    (picture,) = element.iter("figure")
    assert "Does the loss fall?" in texts(picture)
    style = next(element.iter("style")).text or ""
    for rule in style.splitlines():
        assert not rule or rule.startswith((".headrace", "@media (prefers-color-scheme: dark) { .headrace {")), rule
    assert not list(element.iter("script"))


@pytest.mark.slow
def test_a_comparison_is_a_table_with_the_loss_and_the_rates(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    runs = [
        summarize(make_run(tmp_path / "one_device", strategy="one_device", workers=1)),
        summarize(make_run(tmp_path / "mirrored", status="interrupted")),
    ]
    element = parsed(page_fragment(runs, References(one_device_examples_per_s=80.0)))
    rows = [texts(row) for row in element.iter("tr")]
    assert len(rows) == 3
    assert "mirrored (interrupted)" in rows[2]
    questions = [texts(figure.find("h3")) for figure in element.iter("figure")]  # type: ignore[arg-type]
    assert questions == ["Which loss falls first?", "How many examples a second?"]
    assert "mirrored: interrupted after 10 steps" in texts(element)


@pytest.mark.parametrize("count", [1, 2])
def test_hostile_texts_of_runs_are_text(tmp_path: Path, count: int) -> None:
    runs = [summarize(hostile_run(tmp_path / f"<img src=x>{number}")) for number in range(count)]
    element = parsed(page_fragment(runs, References(80.0)))
    assert not [each.tag for each in element.iter() if each.tag in ("script", "img")]
    # Of strategy, host and error.
    assert texts(element).count("<script>alert(1)</script>") > 2


def test_progress_is_one_line_with_a_bar_where_the_end_is_known() -> None:
    known = progress_html("<b>mirrored", 25, 100, 0.5, 1234.0, 10.0, 30.0)
    element = parsed(known)
    assert texts(element).strip() == "<b>mirrored: 25/100, loss 0.500, 1234 examples/s, 10.0 s, 30.0 s left"
    bar = element.find("progress")
    assert bar is not None
    assert bar.attrib == {"value": "25", "max": "100"}
    open_end = parsed(progress_html("a", 25, None, None, None, 10.0, None))
    assert (open_end.find("progress"), texts(open_end)) == (None, "a: step 25, loss –, – examples/s, 10.0 s")


def test_it_is_drawn_four_times_a_second_and_at_the_end_and_other_lines_stay_lines() -> None:
    shown: list[str] = []
    stream, now = io.StringIO(), [0.0]
    with closing(ProgressBar(100, "a", stream, True, lambda: now[0], shown.append)) as progress:
        for step in range(1, 101):
            now[0] += 0.1
            progress.update(step, 1.0, 10.0)
        progress.line("saved step 50")
    assert [int(texts(parsed(text)).split()[1].partition("/")[0]) for text in shown] == [*range(3, 100, 3), 100]
    assert stream.getvalue() == "saved step 50\n"


def test_what_is_left_of_a_resumed_run_is_told_from_its_own_rounds() -> None:
    shown: list[str] = []
    now = [0.0]
    with closing(ProgressBar(2000, "a", io.StringIO(), True, lambda: now[0], shown.append)) as progress:
        for step in range(1001, 1012):
            now[0] += 1.0
            progress.update(step, 1.0)
    # 10 rounds took 10 s, and 989 are left.
    assert shown[-1].count("16 min 29 s left") == 1
    assert "left" not in shown[0]


def test_outside_of_a_kernel_nothing_is_displayed() -> None:
    assert notebook_display() is None
