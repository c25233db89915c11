import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.watch import Watch, check_tensorboard, is_live
from headrace.errors import UnfitMachine
from headrace.spec.event import Event, Notice
from headrace.spec.job import Job

Events = Callable[..., dict[int, list[Event]]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def job(**what: Any) -> Job:
    return Job(model=dict, optimizer=dict, data=None, global_batch_size=8, loss=dict, **what)


def play(watch: Watch, events: dict[int, list[Event]]) -> None:
    for event in [events[-1][0], *events[0], events[-1][1]]:
        watch(event)


@pytest.mark.parametrize(
    ("environment", "live"),
    [({}, True), ({"CI": "true"}, False), ({"CI": "0"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm"}, True)],
)
def test_a_bar_needs_a_terminal_that_can(
    environment: dict[str, str], live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_live(Terminal()) is live
    assert not is_live(io.StringIO())


def test_plain_lines_say_what_came_out_and_what_to_notice(events: Events) -> None:
    stream = io.StringIO()
    with Watch(job(epochs=2), stream=stream) as watch:
        play(watch, events("mirrored", 2))
        watch(Notice(-1, 9.0, "the job's batch size replaces the DataLoader's"))
    assert stream.getvalue().splitlines() == [
        "mirrored: accuracy 0.875, loss 0.25 after 6 steps",
        "the job's batch size replaces the DataLoader's",
    ]


def test_other_ranks_are_quiet(events: Events, tmp_path: Path) -> None:
    stream = io.StringIO()
    with Watch(job(steps=6), log_dir=tmp_path, stream=stream, quiet=True) as watch:
        play(watch, events("mirrored", 2))
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("what", "total"), [({"epochs": 2}, 6), ({"steps": 17}, 17)])
def test_the_bar_knows_how_many_rounds_there_will_be(
    what: dict[str, int], total: int, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    script = events("mirrored", 2)
    last = script[0][6]
    with Watch(job(**what), stream=stream) as watch:
        watch(script[-1][0])
        watch(dataclasses.replace(last, step=total - 1))  # type: ignore[call-arg]
    assert f"{total}/{total}" in stream.getvalue()


def test_nothing_is_painted_after_the_end(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    script = events("mirrored", 2)
    with Watch(job(epochs=2), stream=stream) as watch:
        play(watch, script)
        before = stream.getvalue()
        watch(script[0][1])
        assert stream.getvalue() == before


@pytest.mark.slow
def test_tensorboard_gets_one_log_a_run(tmp_path: Path, events: Events) -> None:
    pytest.importorskip("tensorboard")
    with Watch(job(epochs=2), log_dir=tmp_path, stream=io.StringIO()) as watch:
        play(watch, events("one_device", 1))
        play(watch, events("mirrored", 2))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mirrored-2", "one_device-1"]
    assert all(list(folder.glob("events.out.tfevents.*")) for folder in tmp_path.iterdir())


def test_a_missing_tensorboard_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tensorboard(None)
    with pytest.raises(UnfitMachine, match=r"pip install 'headrace\[tensorboard\]'"):
        check_tensorboard(tmp_path)
