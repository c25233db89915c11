from __future__ import annotations

import io
import itertools

import pytest

from headrace.report import ProgressBar


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
    with ProgressBar(100, "mirrored", stream, clock=clock) as progress:
        for step in range(1, 101):
            clock.now = 100.0 + step * 0.25
            progress.update(step, 2.5, 4312.0)
        progress.close("mirrored: done")
    assert stream.getvalue().splitlines() == [
        "mirrored: step 40/100, loss 2.50, 4312 examples/s, 10.0 s",
        "mirrored: step 80/100, loss 2.50, 4312 examples/s, 20.0 s",
        "mirrored: done",
    ]


def test_an_unknown_end_and_missing_numbers():
    stream, clock = io.StringIO(), _Clock()
    progress = ProgressBar(None, "a\x1b[31m", stream, clock=clock)
    clock.now += 10
    progress.update(7)
    progress.line("a notice")
    assert stream.getvalue() == "a\ufffd[31m: step 7, loss –, – examples/s, 10.0 s\na notice\n"


def test_nothing_is_written_after_the_end():
    stream, clock = io.StringIO(), _Clock()
    with ProgressBar(5, "a", stream, clock=clock) as progress:
        progress.close("over")
        clock.now += 100
        progress.update(5)
        progress.close("again")
    assert stream.getvalue() == "over\n"


@pytest.mark.slow
def test_a_terminal_gets_a_bar_at_most_4_times_a_second_that_gives_way_to_the_last_line():
    stream, clock = _Terminal(), _Clock()
    drawn = []
    with ProgressBar(1000, "mirrored [red] {x}", stream, clock=clock) as progress:
        for step in range(1, 999):
            before = stream.tell()
            clock.now = 100.0 + step * 0.01
            progress.update(step, 2.5, 4312.0)
            if stream.tell() > before:
                drawn.append(step)
        progress.line("a [bold] notice")
        progress.close("mirrored: done")
    assert 2 <= len(drawn) <= 40
    assert min(after - before for before, after in itertools.pairwise(drawn)) >= 25
    text = stream.getvalue()
    assert "mirrored [red] {x}" in text
    assert "a [bold] notice" in text
    assert "4312 ex/s" in text
    assert text.endswith("mirrored: done\n")


def test_plain_is_obeyed_on_a_terminal():
    stream, clock = _Terminal(), _Clock()
    with ProgressBar(10, "a", stream, plain=True, clock=clock) as progress:
        clock.now += 11
        progress.update(3)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("a: step 3/10")


@pytest.mark.slow
def test_plain_false_draws_a_bar_into_a_file():
    stream = io.StringIO()
    with ProgressBar(10, "a", stream, plain=False):
        pass
    assert "\x1b" in stream.getvalue()
