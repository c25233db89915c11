"""What a run shows while it goes on, and the log that is followed for it."""

from __future__ import annotations

import io
from pathlib import Path

from headrace.report.model.events import LogTail
from headrace.report.views.console import Console
from headrace.spec.events import Evaluated, NonFinite, Notice, ParametersAveraged, Saved


def test_lines_that_are_worth_one() -> None:
    stream = io.StringIO()
    show = Console("mirrored", 10, plain=True, stream=stream)
    show.event(Notice(-1, 0.0, "2 workers"))
    show.event(Evaluated(0, 1.0, 5, 1, 100, {"loss": 0.25, "accuracy": 0.5}, 0.1))
    show.event(Evaluated(0, 1.0, 1, 1, 100, {"loss": 0.25}, 0.1))
    show.line("printed by rank 0")
    show.close()
    assert stream.getvalue().splitlines() == [
        "mirrored: 2 workers",
        "mirrored: loss 0.25, accuracy 0.5 after 5 steps",
        "mirrored: loss 0.25 after 1 step",
        "printed by rank 0",
    ]


def test_a_save_has_a_line_where_there_is_no_bar() -> None:
    saved = Saved(0, 1.0, 120, 84_000_000, 0.01, 0.2)
    stream = io.StringIO()
    show = Console("mirrored", 10, plain=True, stream=stream)
    show.event(saved)
    show.close()
    assert stream.getvalue() == "mirrored: saved step 120, 84.0 MB\n"
    stream = io.StringIO()
    show = Console("mirrored", 10, plain=False, stream=stream)
    show.event(saved)
    show.close()
    assert "saved" not in stream.getvalue()


def test_rounds_that_are_not_finite_do_not_fill_the_screen() -> None:
    stream = io.StringIO()
    show = Console("mirrored", 2000, plain=True, stream=stream)
    for step, ranks in ((3, (1,)), (4, (0, 1)), (5, ())):
        show.event(NonFinite(0, 1.0, step, ranks, "rollback" if not ranks else "skip"))
    for step in range(6, 1206):
        show.event(NonFinite(0, 1.0, step, (0,), "skip"))
    show.event(NonFinite(0, 1.0, 1206, (0,), "raise"))
    show.close()
    assert stream.getvalue().splitlines() == [
        "mirrored: the loss of rank 1 is not finite at step 3: the round is left out",
        "mirrored: the loss of 2 ranks is not finite at step 4: the round is left out",
        "mirrored: the gradient is not finite at step 5: the round is left out, the last checkpoint comes back",
        "mirrored: 10 rounds were not finite so far, the last at step 12",
        "mirrored: 100 rounds were not finite so far, the last at step 102",
        "mirrored: 1000 rounds were not finite so far, the last at step 1002",
    ]


def test_copies_that_were_left_out_are_told() -> None:
    stream = io.StringIO()
    show = Console("mean", 100, plain=True, stream=stream)
    for left_out in ((), (1,), (0, 2)):
        show.event(ParametersAveraged(0, 1.0, 16, 16, 16, "as asked for", 0.1, 0.01, left_out))
    show.close()
    assert stream.getvalue().splitlines() == [
        "mean: the parameters of rank 1 are not finite after 16 steps: left out of the mean, from which it goes on",
        "mean: the parameters of 2 ranks are not finite after 16 steps: left out of the mean, from which they go on",
    ]


def test_nothing_is_said_before_the_first_step() -> None:
    stream = io.StringIO()
    show = Console("mirrored", None, plain=True, stream=stream)
    show.update(0, 0.0, 0)
    show.close()
    assert stream.getvalue() == ""


def test_a_log_is_followed_by_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.log"
    tail = LogTail(file, until="the end")
    assert tail.read() == []
    file.write_text("one\ntwo\nthr")
    assert tail.read() == ["one", "two"]
    assert tail.read() == []
    with file.open("a") as stream:
        stream.write("ee\n")
    assert tail.read() == ["three"]


def test_a_log_is_followed_until_the_rank_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.log"
    tail = LogTail(file, until="the end")
    file.write_text("one\nthe end\nTraceback\n")
    assert tail.read() == ["one"]
    with file.open("a") as stream:
        stream.write("more\n")
    assert tail.read() == []


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.log"
    file.write_bytes(b"\xff\xfe\n")
    assert LogTail(file, until="x").read() == ["��"]
