"""The files of a run that lasts for days are looked at without being held in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.api.run_directory import RunDirLock
from headrace.spec.events import LAUNCHER
from headrace.worker.run_spec import events_path, last_line, lines_of_kind

STEP = b'{"kind":"stepped","rank":0,"time_s":0.25}\n'
LONG = 200_000
MOST_BYTES = 1 << 20


@contextmanager
def in_little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "last"),
    [
        (b"", ""),
        (b"\n", ""),
        (b"a\n", "a"),
        (b"a\nb", "b"),
        (b"a\nb\n", "b"),
        (b"a\n" + b"x" * 200_000 + b"\n", "x" * 200_000),
        (b"x" * 200_000, "x" * 200_000),
        (b"y" * 65_535 + b"\n" + b"x" * 65_535 + b"\n", "x" * 65_535),
    ],
)
def test_the_last_line_is_that_which_a_reader_of_all_would_find(content: bytes, last: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(content)
    assert last_line(path) == last
    assert [last] == (content.decode().splitlines() or [""])[-1:]


def test_a_long_file_is_searched_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(STEP * LONG + b'{"kind":"failed"}\n' + b'{"kind":"worker_ended"')
    with in_little_memory():
        assert last_line(path) == '{"kind":"worker_ended"'
        assert lines_of_kind(path, "failed") == ['{"kind":"failed"}\n']
    assert lines_of_kind(tmp_path / "none", "failed") == []


def test_a_line_that_a_full_disk_has_cut_off_is_no_event(tmp_path: Path) -> None:
    # Found by scripts/storm, seed 4103.
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind":"stepped"}\n{"kind":"failed","cause":"rank 0 cannot sa')
    assert lines_of_kind(path, "failed") == []


@pytest.mark.slow
def test_a_long_run_is_resumed_in_little_memory(tmp_path: Path) -> None:
    path = events_path(tmp_path, LAUNCHER)
    path.parent.mkdir()
    path.write_bytes(STEP * LONG + b'{"kind":"notice","rank":-1,"time_s":7.5,"text":"a"}\n' + STEP + b'{"kind":"st')
    with in_little_memory():
        lock = RunDirLock(tmp_path, continues=True)
    lock.close()
    assert lock.attempt_s == pytest.approx(7.501)
    assert path.read_bytes().endswith(STEP)
