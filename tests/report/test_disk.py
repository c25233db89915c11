"""A disk that is full is told of, once, and so is the room that there is again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.report.views import disk
from headrace.report.views.console import DiskMonitor


def test_a_full_disk_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LOOK_EVERY_S", 0.0)
    free = iter((10, 0, 0, 5, 0))
    real = os.statvfs(tmp_path)

    def found(place: Path) -> os.statvfs_result:
        assert place == tmp_path
        blocks = next(free)
        return os.statvfs_result((*real[:1], 4096, *real[2:3], blocks, blocks, *real[5:]))

    monkeypatch.setattr(os, "statvfs", found)
    said: list[str] = []
    looked = DiskMonitor(tmp_path, said.append)
    for _ in range(5):
        looked.look()
    assert [line.partition(": ")[0].removeprefix(f"the disk of {tmp_path} ") for line in said] == [
        "is full",
        "has room again",
        "is full",
    ]
    assert said[1].endswith("has room again: 20,480 bytes")


def test_it_looks_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    looks: list[float] = []
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(disk, "monotonic", lambda: now)
    monkeypatch.setattr(os, "statvfs", lambda place: (looks.append(now), real)[1])
    looked = DiskMonitor(tmp_path, lambda line: None)
    for tenth in range(35):
        now = tenth / 10
        looked.look()
    assert looks == [1.0, 2.0, 3.0]
