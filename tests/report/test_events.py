from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import DataError, UsageError
from headrace.report import Tail, read_events, read_log
from headrace.spec.events import LAUNCHER, Notice, encode


def _append(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(text)


def test_events_of_all_processes_come_by_time_and_ties_by_process(tmp_path, write_events):
    events = [
        Notice(10, 2.0, "rank 10"),
        Notice(2, 1.0, "early"),
        Notice(2, 2.0, "rank 2"),
        Notice(2, 2.0, "rank 2 again"),
        Notice(LAUNCHER, 2.0, "launcher"),
    ]
    write_events(tmp_path, events)
    texts = [event.text for event in read_events(tmp_path)]
    assert texts == ["early", "launcher", "rank 2", "rank 2 again", "rank 10"]


@pytest.mark.parametrize("tail", ['{"kind":"notice","ra', "\xff", "{"])
def test_half_a_last_line_is_left_out_and_counted(tmp_path, write_events, tail):
    write_events(tmp_path, [Notice(0, 1.0, "whole"), Notice(1, 2.0, "whole too")])
    _append(tmp_path / "events/rank-0.jsonl", tail)
    log = read_log(tmp_path)
    assert [event.text for event in log.events] == ["whole", "whole too"]
    assert log.torn_lines == 1


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path, write_events):
    write_events(tmp_path, [Notice(0, 1.0, "a")])
    _append(tmp_path / "events/rank-0.jsonl", encode(Notice(0, 2.0, "b")))
    log = read_log(tmp_path)
    assert [event.text for event in log.events] == ["a", "b"]
    assert log.torn_lines == 0


@pytest.mark.parametrize("bad", ["nonsense", "", '{"kind":"nothing"}', "[]", '{"kind":"notice","rank":0}'])
def test_any_other_bad_line_is_an_error_with_file_and_line(tmp_path, write_events, bad):
    write_events(tmp_path, [Notice(0, 1.0, "a")])
    _append(tmp_path / "events/rank-0.jsonl", bad + "\n" + encode(Notice(0, 2.0, "b")) + "\n")
    with pytest.raises(DataError, match=r"rank-0\.jsonl, line 2"):
        read_events(tmp_path)


def test_a_directory_without_events_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        read_events(tmp_path / "nowhere")


def test_the_tail_reads_what_is_new_whole_lines_only_and_new_files(tmp_path):
    tail = Tail(tmp_path)
    assert tail.read() == ()
    first, second, third = (Notice(rank, time_s, "ö") for rank, time_s in ((0, 1.0), (0, 3.0), (1, 2.0)))
    line = encode(second)
    file = tmp_path / "events/rank-0.jsonl"
    _append(file, encode(first) + "\n" + line[:9])
    assert tail.read() == (first,)
    assert tail.read() == ()
    _append(file, line[9:])
    assert tail.read() == ()
    _append(file, "\n")
    _append(tmp_path / "events/rank-1.jsonl", encode(third) + "\n")
    assert tail.read() == (third, second)
    assert tail.read() == ()


def test_the_tail_survives_any_cut_of_the_file(tmp_path):
    events = tuple(Notice(0, float(index), f"line {index}") for index in range(3))
    whole = "".join(encode(event) + "\n" for event in events).encode()
    file = tmp_path / "events/rank-0.jsonl"
    file.parent.mkdir()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        tail = Tail(tmp_path)
        before = tail.read()
        file.write_bytes(whole)
        assert before + tail.read() == events


def test_the_tail_names_the_line_of_the_whole_file(tmp_path, write_events):
    write_events(tmp_path, [Notice(0, 1.0, "a"), Notice(0, 2.0, "b")])
    tail = Tail(tmp_path)
    assert len(tail.read()) == 2
    _append(tmp_path / "events/rank-0.jsonl", encode(Notice(0, 3.0, "c")) + "\nnonsense\n")
    with pytest.raises(DataError, match=r"rank-0\.jsonl, line 4"):
        tail.read()
