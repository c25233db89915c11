"""Whose a cache's folder is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from belongings import descriptors
from headrace.data.cache.shards import FileShards
from headrace.data.cache.store import FORMAT, Store, claim
from headrace.data.pipeline.steps import Absent
from headrace.errors import UnfitMachine, UsageError


def put(folder: Path) -> None:
    Store(FileShards(folder), 1, None, "the cache").put([(0, torch.zeros(3))])


def has(folder: Path) -> bool:
    return Store(FileShards(folder), 1, None, "the cache").find([0]) == [None]


def test_a_folder_is_made_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    held, notices = claim(folder, "a", "1 example")
    assert notices == []
    put(folder)
    del held
    _, notices = claim(folder, "a", "1 example")
    assert notices == []
    assert has(folder)


def test_a_process_has_one_claim_and_nothing_stays_open(tmp_path: Path) -> None:
    before = descriptors()
    claims = [claim(tmp_path, "a", "1 example")[0] for _ in range(5)]
    put(tmp_path)
    assert has(tmp_path)
    assert len(descriptors() - before) == 1
    claims.pop()
    assert len(descriptors() - before) == 1
    claims.clear()
    assert descriptors() <= before


def test_what_is_of_other_data_or_code_is_made_anew_and_said(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("the user's")
    held, _ = claim(tmp_path, "a", "1 example, map(old)")
    put(tmp_path)
    del held
    _, (line,) = claim(tmp_path, "b", "1 example, map(new)")
    assert line == (
        f"the cache in {tmp_path} is made anew, because it is of other data or other code (1 example, map(old))"
    )
    assert not has(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "manifest.json", "mine.txt"]


HOLD = """
import pathlib, sys
from headrace.data.cache.store import claim
held = claim(pathlib.Path(sys.argv[1]), "a", "1 example, map(old)")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["itself", "killed"])
def test_a_folder_in_use_is_not_taken_from_its_user(tmp_path: Path, ends: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == b"held\n"
            put(tmp_path)
            said = (
                r"another process uses the cache in .*, and it is of other .* \(1 example, map\(old\)\); this is 1 ex"
            )
            with pytest.raises(UsageError, match=said):
                claim(tmp_path, "b", "1 example, map(new)", patience_s=0.05)
            assert has(tmp_path)
            shared, notices = claim(tmp_path, "a", "1 example, map(old)", patience_s=0.05)
            assert notices == []
            del shared
        finally:
            if ends == "killed":
                process.kill()
            process.stdin.close()
            process.wait(60)
    # A warm program ends a moment after the process that stands in for it.
    claim(tmp_path, "b", "1 example, map(new)", patience_s=30.0)
    assert not has(tmp_path)


@pytest.mark.slow
def test_a_fork_keeps_no_claim(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
from headrace.data.cache.store import claim
folder = pathlib.Path(sys.argv[1])
held = claim(folder, "a", "x")
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("left", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"left\n"
        assert process.wait(60) == 0
        claim(tmp_path, "b", "x", patience_s=0.05)


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (json.dumps({"format": FORMAT + 1, "key": "a"}), f"it is of version {FORMAT + 1}, and this is {FORMAT}"),
        (json.dumps({"key": "a"}), "it is of version None"),
        ("[1]", "it is of version None"),
        ('{"format": 1, "ke', "it has no manifest that can be read"),
        (b"\xff\xfe", "it has no manifest that can be read"),
        ("", "it has no manifest that can be read"),
        (None, "it has no manifest that can be read"),
    ],
)
def test_another_version_and_what_was_left_undone_is_made_anew_and_said(
    tmp_path: Path, manifest: str | bytes | None, why: str
) -> None:
    held, _ = claim(tmp_path, "a", "1 example")
    put(tmp_path)
    del held
    path = tmp_path / "manifest.json"
    if manifest is None:
        path.unlink()
    else:
        path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    _, (line,) = claim(tmp_path, "a", "1 example")
    assert line.startswith(f"the cache in {tmp_path} is made anew, because {why}")
    assert Store(FileShards(tmp_path), 1, None, "the cache").find([0]) == [Absent.MISSING]
    assert claim(tmp_path, "a", "1 example")[1] == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UnfitMachine, match=r"file cannot be a cache: .*; give another folder"):
        claim(tmp_path / "file", "a", "1 example")
