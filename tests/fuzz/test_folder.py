"""What fuzzing writes is gone when it has ended, however it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from belongings import OTHERS
from fuzz import main
from fuzz.inputs import GIVEN, folder


@pytest.mark.slow
def test_a_process_removes_its_folder() -> None:
    code = "from fuzz.inputs import folder; (folder() / 'a').write_bytes(b'1'); print(folder())"
    ended = subprocess.run([sys.executable, "-c", code], cwd=main.TESTS, capture_output=True, text=True, check=True)
    where = Path(ended.stdout.strip())
    # Tests that run beside it do not take it for something that they have left.
    assert where.name.startswith(OTHERS)
    assert where.parent == Path("/dev/shm")
    assert not where.exists()


def test_what_fuzzes_may_end_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def crash(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        seen.append(Path(env[GIVEN]))
        (seen[0] / "1.csv").write_bytes(b"left behind")
        return subprocess.CompletedProcess(command, 77, stderr="")

    monkeypatch.setattr(main, "RESULTS", tmp_path / "fuzz.jsonl")
    monkeypatch.setattr(main, "SCRATCH", tmp_path)
    monkeypatch.setattr(main.subprocess, "run", crash)
    assert main.run("settings", 1, 1, 0) == 77
    assert not seen[0].exists()


def test_a_folder_that_is_given_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GIVEN, str(tmp_path))
    assert folder.__wrapped__() == tmp_path
