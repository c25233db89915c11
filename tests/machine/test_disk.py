"""What is on a disk, and a disk that fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.machine import disk


def test_what_is_there(tmp_path: Path) -> None:
    file, folder, pipe = tmp_path / "file", tmp_path / "folder", tmp_path / "pipe"
    file.write_text("")
    folder.mkdir()
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(folder)
    found = {path.name: (disk.exists(path), disk.is_folder(path), disk.is_file(path)) for path in tmp_path.iterdir()}
    assert found == {
        "file": (True, False, True),
        "folder": (True, True, False),
        "pipe": (True, False, False),
        "link": (True, True, False),
    }


@pytest.mark.parametrize("name", ["nothing", "file/below", "loop", "dangling", "a\0b"])
def test_what_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    assert not disk.exists(tmp_path / name)
    assert not disk.is_folder(tmp_path / name)
    assert not disk.is_file(tmp_path / name)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_cannot_be_told_is_an_error(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def stat(path: object) -> os.stat_result:
        raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(os, "stat", stat)
    for ask in (disk.exists, disk.is_folder, disk.is_file):
        with pytest.raises(OSError, match=os.strerror(error)):
            ask(Path("runs"))
