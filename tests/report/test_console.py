"""What a run shows while it goes on, and the log that is followed for it."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.report.model import events
from headrace.report.model.events import DiskMonitor, LogTail, Tail
from headrace.report.views.live import Console, ProgressBar, RunLength
from headrace.spec.events import Evaluated, NonFinite, Notice, ParametersAveraged, Saved
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import events_path


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
        "mirrored: step  5  val loss 0.250   val accuracy 0.500",
        "mirrored: step  1  val loss 0.250",
        "printed by rank 0",
    ]


def test_notices_that_were_shown_before_are_not_shown_again() -> None:
    stream = io.StringIO()
    show = Console("gossip", 10, plain=True, stream=stream, told={"the loss is a mean over tokens"})
    for text in ("the loss is a mean over tokens", "2 workers"):
        show.event(Notice(-1, 0.0, text))
    show.close()
    assert stream.getvalue() == "gossip: 2 workers\n"


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


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_plain_line_every_10_seconds():
    stream, clock = io.StringIO(), _Clock()
    with closing(ProgressBar(100, "mirrored", stream, plain=True, clock=clock)) as progress:
        for step in range(1, 101):
            clock.now = 100.0 + step * 0.25
            progress.update(step, 2.5, 4312.0)
    assert stream.getvalue().splitlines() == [
        "mirrored: step  40/100  train loss 2.50      4312 examples/s  10.0 s  15.0 s left",
        "mirrored: step  80/100  train loss 2.50      4312 examples/s  20.0 s  5.0 s left",
    ]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_lines_have_the_width_that_there_is(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = _Terminal(), _Clock()
    rounds = RunLength(460, 20)
    with closing(ProgressBar(460, "mirrored", stream, plain=False, clock=clock, rounds=rounds)) as progress:
        clock.now += 1.0
        progress.update(69, 0.2, 4312.0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert max(map(len, re.split(r"[\r\n]", text))) <= columns
    assert "epoch  3/20  step  69" in text
    assert ("4312 ex/s" in text) == (columns == 120)


def test_an_evaluation_is_a_line_of_columns() -> None:
    stream = io.StringIO()
    show = Console("mirrored", 460, plain=True, stream=stream, epochs=20)
    for epoch in (3, 20):
        show.event(Evaluated(0, 1.0, 23 * epoch, epoch, 100, {"loss": 0.253, "accuracy": 0.936}, 0.1))
    assert stream.getvalue().splitlines() == [
        "mirrored: epoch  3/20  step  69  val loss 0.253   val accuracy 0.936",
        "mirrored: epoch 20/20  step 460  val loss 0.253   val accuracy 0.936",
    ]


def test_an_unknown_end_and_missing_numbers():
    stream, clock = io.StringIO(), _Clock()
    progress = ProgressBar(None, "a\x1b[31m", stream, plain=True, clock=clock)
    clock.now += 10
    progress.update(7)
    progress.line("a notice")
    assert stream.getvalue() == "a\ufffd[31m: step 7  train loss –            – examples/s  10.0 s\na notice\n"


def test_nothing_is_written_after_the_end():
    stream, clock = io.StringIO(), _Clock()
    progress = ProgressBar(5, "a", stream, plain=True, clock=clock)
    progress.close()
    clock.now += 100
    progress.update(5)
    progress.close()
    assert stream.getvalue() == ""


@pytest.mark.slow
def test_a_terminal_gets_a_bar_at_most_4_times_a_second():
    stream, clock = _Terminal(), _Clock()
    drawn = []
    with closing(ProgressBar(1000, "mirrored [red] {x}", stream, plain=False, clock=clock)) as progress:
        for step in range(1, 999):
            before = stream.tell()
            clock.now = 100.0 + step * 0.01
            progress.update(step, 2.5, 4312.0)
            if stream.tell() > before:
                drawn.append(step)
        progress.line("a [bold] notice")
    assert 2 <= len(drawn) <= 40
    assert min(after - before for before, after in itertools.pairwise(drawn)) >= 25
    text = stream.getvalue()
    assert "mirrored [red] {x}" in text
    assert "a [bold] notice" in text
    # Of 80 columns.
    assert "train loss   2.50" in text
    assert "ex/s" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stream", "plain", "draws"),
    [(_Terminal, None, True), (_Terminal, True, False), (io.StringIO, None, False), (io.StringIO, False, True)],
)
def test_a_terminal_gets_a_bar_unless_it_is_said_otherwise(stream: type[io.StringIO], plain: bool | None, draws: bool):
    told = stream()
    Console("a", 10, plain=plain, stream=told).close()
    assert ("\x1b" in told.getvalue()) is draws


class _Unread(io.StringIO):
    """A stream that takes nothing any more."""

    number: int | None = None

    def write(self, text: str) -> int:
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.mark.parametrize(
    ("number", "plain"),
    [
        (errno.EPIPE, True),
        (errno.ENOSPC, True),
        (errno.EIO, True),
        pytest.param(errno.EIO, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_that_nobody_reads_of(number: int, plain: bool) -> None:
    stream, clock = _Unread(), _Clock()
    with closing(ProgressBar(10, "a", stream, plain, clock)) as progress:
        stream.number = number
        clock.now += 11
        progress.update(3)
        progress.line("a notice")
        stream.number = None
        progress.line("it is read again")
        stream.number = number
    assert "it is read again" in stream.getvalue()
    assert ("a notice" in stream.getvalue()) <= (not plain), "a bar may keep it until then"
    stream.number = errno.EBADF
    with pytest.raises(OSError, match="Bad file"):
        progress.line("another error is none of those")


def test_a_full_disk_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_CHECK_PERIOD_S", 0.0)
    # Where there is room again, it is asked for the bytes, too.
    free = iter((10, 0, 0, 5, 5, 0))
    real = os.statvfs(tmp_path)

    def found(place: Path) -> os.statvfs_result:
        assert place == tmp_path
        blocks = next(free)
        return os.statvfs_result((*real[:1], 4096, *real[2:3], blocks, blocks, *real[5:]))

    monkeypatch.setattr(os, "statvfs", found)
    said: list[str] = []
    looked = DiskMonitor(tmp_path, said.append)
    for _ in range(5):
        looked.check()
    assert [line.partition(": ")[0].removeprefix(f"the disk of {tmp_path} ") for line in said] == [
        "is full",
        "has room again",
        "is full",
    ]
    assert said[1].endswith("has room again: 20,480 bytes")


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What the test puts in is of a disk that fails."""
    places: set[str] = set()
    real = os.stat

    def stat(place: Any, **options: Any) -> os.stat_result:
        if str(place) in places:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(place))
        return real(place, **options)

    monkeypatch.setattr(os, "stat", stat)
    return places


def test_it_tells_that_the_disk_fails_and_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: set[str]
) -> None:
    monkeypatch.setattr(events, "_CHECK_PERIOD_S", 0.0)
    said: list[str] = []
    looked = DiskMonitor(tmp_path, said.append)
    for broken in (False, True, True, False, False, True):
        (fails.add if broken else fails.discard)(str(tmp_path))
        looked.check()
    begin = f"the disk of {tmp_path} "
    assert [line.removeprefix(begin).partition(": training goes on,")[0] for line in said] == [
        "fails (Input/output error)",
        "works again",
        "fails (Input/output error)",
    ]


def test_what_a_failing_disk_does_not_give_is_read_later(tmp_path: Path, fails: set[str]) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("first\n")
    lines, followed = LogTail(log, until="end"), Tail(tmp_path)
    journal = EventWriter(tmp_path, 0, 0.0)
    journal.write(Notice(0, 1.0, "a notice"))
    fails |= {str(log), str(events_path(tmp_path, 0))}
    assert (lines.read(), followed.read()) == ([], ())
    fails.clear()
    assert (lines.read(), followed.read()) == (["first"], (Notice(0, 1.0, "a notice"),))
    assert (lines.read(), followed.read()) == ([], ())
    journal.close()


def test_it_looks_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    looks: list[float] = []
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(events, "monotonic", lambda: now)
    monkeypatch.setattr(os, "statvfs", lambda place: (looks.append(now), real)[1])
    looked = DiskMonitor(tmp_path, lambda line: None)
    for tenth in range(35):
        now = tenth / 10
        looked.check()
    assert looks == [1.0, 2.0, 3.0]
