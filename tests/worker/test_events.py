"""The hot path's line is the event's line; what was written before an end is there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.shared_memory.control_page import LastEvent
from headrace.spec.events import Failed, Notice, PipelineStepTimed, StagePass, Stepped, decode, encode
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import events_path

ZERO_OR_MORE = st.integers(0, 2**53)
LOSSES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
TIMES = st.floats(0, 1e6)


@given(st.integers(0, 999), ZERO_OR_MORE, ZERO_OR_MORE, ZERO_OR_MORE, LOSSES, st.floats(0, 1e12),
       st.integers(-1, 2**53), st.lists(TIMES, min_size=4, max_size=4), st.lists(ZERO_OR_MORE, max_size=3),
       st.sampled_from(["", "critic", "größe_2"]))  # fmt: skip
def test_a_step_is_written_as_its_event_would_be(
    tmp_path_factory: pytest.TempPathFactory, rank: int, step: int, epoch: int, examples: int, loss: float | None,
    weight: float, lease: int, times_s: list[float], pulled: list[int], turn: str,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("run")
    journal = EventWriter(folder, rank, monotonic())
    journal.stepped(step, epoch, examples, loss, weight, lease, *times_s, pulled=pulled, turn=turn)
    journal.close()
    (line,) = events_path(folder, rank).read_text().splitlines()
    event = decode(line)
    assert isinstance(event, Stepped)
    assert 0 <= event.time_s < 60
    parts_s = (event.wait_s, event.compute_s, event.exchange_s, event.update_s)
    assert parts_s == pytest.approx(times_s, rel=1e-15, abs=1e-7)
    expected = (rank, event.time_s, step, epoch, examples, loss, weight, *parts_s, lease, tuple(pulled), turn)
    assert event == Stepped(*expected)
    assert encode(event) == line
    # What goes without saying in every line of most runs is left out.
    assert ("lease" in line, "pulled" in line, "turn" in line) == (lease != -1, bool(pulled), bool(turn))
    assert all(len(f"{seconds:.9f}".rstrip("0").partition(".")[2]) <= 7 for seconds in parts_s)


def test_steps_come_before_what_is_written_after_them(tmp_path: Path) -> None:
    journal = EventWriter(tmp_path, 3, monotonic())
    for step in range(5):
        journal.stepped(step, 0, 8, 0.5, 8.0, -1, 0.1, 0.2, 0.3, 0.4)
    assert events_path(tmp_path, 3).read_text() == "", "not a system call a step"
    journal.write(Notice(3, journal.now(), "now"))
    events = [decode(line) for line in events_path(tmp_path, 3).read_text().splitlines()]
    assert [event.kind for event in events] == ["stepped"] * 5 + ["notice"]
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)
    journal.close()


@pytest.mark.parametrize(("rank", "name"), [(-1, "launcher.jsonl"), (0, "rank-0.jsonl"), (12, "rank-12.jsonl")])
def test_every_process_has_a_file_of_its_own(tmp_path: Path, rank: int, name: str) -> None:
    assert events_path(tmp_path, rank) == tmp_path / "events" / name


@pytest.mark.parametrize("number", [errno.EROFS, errno.EFBIG, errno.ENOSPC, errno.EIO])
def test_what_the_disk_does_not_take_waits_and_the_last_event_is_left_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    record, journal = LastEvent(), EventWriter(tmp_path, 1, monotonic())
    failed = Failed(1, 2.0, 3, "UnfitMachine: \u00e9" + 5000 * "\u00e9", "a traceback", 3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        journal.write_last(failed, record)
        assert journal.problem == os.strerror(number)
    (told,) = [decode(record.read())]
    assert isinstance(told, Failed)
    assert (told.exit_code, told.traceback, told.cause) == (3, "", failed.cause[:1000])
    assert events_path(tmp_path, 1).read_text() == ""
    journal.close()
    assert journal.problem == ""
    assert [decode(line) for line in events_path(tmp_path, 1).read_text().splitlines()] == [failed]
    record.clear()
    assert record.read() == ""


def test_another_error_of_the_system_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EBADF, "planted")

    journal = EventWriter(tmp_path, 1, monotonic())
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="planted"):
            journal.write(Notice(1, 0.0, "a line"))
    journal.close()


def test_passes_are_on_the_clock_of_the_run(tmp_path: Path) -> None:
    journal = EventWriter(tmp_path, 0, 100.0)
    for step in range(100):
        journal.passed(step, 2, [StagePass(0, 1, True, 101.5, 103.25, 0.5)])
    journal.close()
    told = [decode(line) for line in events_path(tmp_path, 0).read_text().splitlines()]
    assert [(each.step, each.in_flight) for each in told if isinstance(each, PipelineStepTimed)] == [(5, 2), (55, 2)]
    assert told[0].passes == (StagePass(0, 1, True, 1.5, 3.25, 0.5),)  # type: ignore[attr-defined]
