"""A request to change the workers of a run ends no run, whatever its disk does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.engine.local import scaling
from headrace.engine.local.scaling import ScaleRequests


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_a_disk_that_takes_no_answer_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    requests = ScaleRequests(tmp_path)
    (tmp_path / "staffing").mkdir()
    wish = tmp_path / "staffing" / "a.wish"
    wish.write_text("2")
    changes: list[int] = []

    def change(count: int) -> str:
        changes.append(count)
        return "3 workers from now on"

    def fail(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as full:
        full.setattr(scaling, "_write", fail)
        requests.look(change, list)
    assert (changes, wish.exists()) == ([2], False)
    wish.write_text("1")
    requests.look(change, list)
    assert changes == [2, 1]
    assert "3 workers from now on" in wish.with_suffix(".answer").read_text()


def test_another_error_is_none_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = ScaleRequests(tmp_path)
    (tmp_path / "staffing").mkdir()
    (tmp_path / "staffing" / "a.wish").write_text("2")

    def forbid(path: Path, text: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(scaling, "_write", forbid)
    with pytest.raises(PermissionError):
        requests.look(lambda count: "", list)
