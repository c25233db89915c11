"""What a user sees of checkpoints: lists, verdicts, contents, and what is wrong with a bad one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import CheckpointFolder
from headrace.cli import run

Capture = pytest.CaptureFixture[str]

LR = {"float": "0.1"}
DESCRIPTION: dict[str, Any] = {
    "strategy": "mirrored",
    "workers": 2,
    "saved_at": "2026-10-03T14:05:11+02:00",
    "epoch": 5,
    "job": {
        "seed": 7,
        "global_batch_size": 64,
        "optimizer": {"class": "torch.optim.adam.Adam", "groups": [{"parameters": 2, "options": {"lr": LR}}]},
    },
    "settings": {
        "groups": [
            {"parameters": 3, "options": {"lr": {"float": "0.05"}, "betas": {"tuple": [{"float": "0.9"}, LR]}}},
            {"parameters": 1, "options": {"lr": {"tensor": {"float": "0.5"}, "dtype": "float32"}}},
            {"parameters": 2, "options": {"lr": {"float": "0.05"}}},
        ],
        "schedule": {"dict": [["milestones", {"counter": [[30, 1]]}]]},
    },
    "versions": {"headrace": "0.1.0"},
}


def save(folder: CheckpointFolder, step: int, description: dict[str, Any]) -> None:
    folder.begin(step)
    tensors = {f"state/layer/x{count}@0": torch.ones(count, dtype=torch.bfloat16) for count in range(1, 21)}
    tensors |= {"parameter/weight": torch.full((10, 64), float(step)), "buffer/count": torch.tensor(step)}
    own = {"random/torch": torch.zeros(100, dtype=torch.uint8)}
    folder.commit(step, [folder.write(step, 0, tensors | own), folder.write(step, 1, own)], description, keep=3)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two checkpoints, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder(Path("a/checkpoints"))
    for step in (100, 120):
        save(folder, step, DESCRIPTION)
    return Path("a")


def damage(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def answer(capsys: Capture, *arguments: str) -> Any:
    run(["checkpoint", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("place", ["a", "a/checkpoints", "link", "another link"])
def test_a_list(run_dir: Path, capsys: Capture, place: str) -> None:
    Path("link").symlink_to(run_dir)
    Path("another link").symlink_to(run_dir / "checkpoints")
    assert run(["checkpoint", "list", place]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "size", "strategy", "workers", "saved", "manifest,", "sizes"]
    assert [line[0] for line in lines[1:]] == ["100", "120"]
    assert lines[1][2:] == ["kB", "mirrored", "2", "2026-10-03", "14:05:11", "ok"]


def test_a_list_looks_at_manifests_and_sizes_alone(run_dir: Path, capsys: Capture) -> None:
    checkpoints = run_dir / "checkpoints"
    os.truncate(checkpoints / "step-00000100" / "rank-1.safetensors", 7)
    damage(checkpoints / "step-00000120" / "rank-1.safetensors", -1)
    first, second = answer(capsys, "list", "a")["checkpoints"]
    assert first["wrong"].startswith("rank-1.safetensors: it has 7 bytes")
    assert (first["step"], first["bytes"]) == (100, None)
    size = sum(file.stat().st_size for file in (checkpoints / "step-00000120").glob("rank-*"))
    assert second == {
        **{key: DESCRIPTION[key] for key in ("strategy", "workers", "saved_at")},
        "step": 120,
        "wrong": None,
        "bytes": size,
    }
    assert run(["checkpoint", "list", "a"]) == 0
    assert "100  " in capsys.readouterr().out


def test_sound_checkpoints_are_verified(run_dir: Path, capsys: Capture) -> None:
    assert run(["checkpoint", "verify", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step 100: sound", "step 120: sound"]
    assert answer(capsys, "verify", "a")["sound"] is True


def test_a_bad_file_is_named_and_the_exit_code_is_5(run_dir: Path, capsys: Capture) -> None:
    bad = run_dir / "checkpoints" / "step-00000120" / "rank-0.safetensors"
    damage(bad, -1)
    assert run(["checkpoint", "verify", "a"]) == 5
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 100: sound")
    assert second.startswith(f"step 120: damaged: {bad}: its content has changed: SHA-256 ")
    assert last == "1 of 2 damaged; resuming goes on from step 100"
    result = answer(capsys, "verify", "a")
    assert result["sound"] is False
    assert [(row["step"], row["sound"], row["path"]) for row in result["checkpoints"]] == [
        (100, True, None),
        (120, False, str(bad)),
    ]
    assert run(["checkpoint", "verify", "a/checkpoints/step-00000100"]) == 0
    assert run(["checkpoint", "verify", "a/checkpoints/step-00000120"]) == 5


def test_nothing_is_left_to_resume_from(run_dir: Path, capsys: Capture) -> None:
    for manifest in run_dir.rglob("manifest.json"):
        damage(manifest, 20)
    assert run(["checkpoint", "verify", "a"]) == 5
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 damaged; there is nothing to resume from"
    assert run(["checkpoint", "show", "a"]) == 5
    assert "step-00000100/manifest.json" in capsys.readouterr().err


def test_what_is_in_one(run_dir: Path, capsys: Capture) -> None:
    assert run(["checkpoint", "show", "a"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:8] == [
        "checkpoint a/checkpoints/step-00000120",
        "step 120, epoch 5",
        "saved 2026-10-03 14:05:11 by headrace 0.1.0",
        lines[3],
        "strategy mirrored, workers: 2",
        "job global_batch_size 64, seed 7",
        "optimizer torch.optim.adam.Adam, lr 0.05 for 5 parameters, lr 0.5 for 1",
        "parameter",
    ]
    assert lines[3].endswith("kB in 2 files")
    assert lines[9:13] == [
        "tensors, largest first shape type size",
        "parameter/weight 10 × 64 float32 2.56 kB",
        "random/torch 100 uint8 100 B",
        "random/torch (rank 1) 100 uint8 100 B",
    ]
    # 24 tensors, 16 of them shown; the others are x1 to x7 and the count, which has 8 bytes as x4 has.
    assert lines[-1] == f"... and 8 more, {2 * sum(range(1, 8)) + 8} B; --json has all"
    assert len(lines) == 10 + 16 + 1


def test_json_has_all_and_readable_numbers(run_dir: Path, capsys: Capture) -> None:
    result = answer(capsys, "show", "a/checkpoints/step-00000100")
    assert (result["step"], len(result["tensors"])) == (100, 24)
    assert result["bytes"] == sum(file["bytes"] for file in result["files"])
    assert {"name": "buffer/count", "rank": 0, "shape": [], "dtype": "int64", "bytes": 8} in result["tensors"]
    groups = result["description"]["settings"]["groups"]
    assert groups[0]["options"] == {"lr": 0.05, "betas": [0.9, 0.1]}
    assert groups[1]["options"]["lr"] == 0.5
    assert result["description"]["settings"]["schedule"] == {"milestones": {"30": 1}}


def test_a_newer_one_that_is_damaged_is_passed_over_and_named(run_dir: Path, capsys: Capture) -> None:
    save(CheckpointFolder(run_dir / "checkpoints"), 140, DESCRIPTION)
    damage(run_dir / "checkpoints" / "step-00000140" / "manifest.json", 20)
    assert run(["checkpoint", "show", "a"]) == 0
    said = capsys.readouterr()
    assert "step-00000140/manifest.json" in said.err
    assert "a/checkpoints/step-00000120" in said.out


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"job": 3, "settings": [], "versions": {"torch": None}, "strategy": ["x"], "workers": "\x1b[31m"},
        {"settings": {"groups": [1, {"options": {"lr": {"float": "no number"}}}]}, "saved_at": 5},
        {"strategy": "x" * 5000, "job": {"optimizer": {"class": "y\n" * 500, "groups": "z"}}},
    ],
)
def test_a_description_may_be_anything(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, description: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(CheckpointFolder(Path("a/checkpoints")), 3, description)
    for action in ("list", "show"):
        assert run(["checkpoint", action, "a"]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert max(map(len, shown.splitlines())) < 200
        assert answer(capsys, action, "a")


def test_what_is_shown_of_one_fits_80_columns(run_dir: Path, capsys: Capture) -> None:
    plan = {f"number_{number}": number for number in range(20)}
    save(CheckpointFolder(run_dir / "checkpoints"), 140, {**DESCRIPTION, "plan": plan})
    assert run(["checkpoint", "show", "a"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\nplan        number_0 0, number_1 1," in shown
    assert "number_19 19" in shown


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("nowhere", 2, "nowhere is no directory"),
        ("a/events", 2, "a/events holds no checkpoint"),
        ("file", 2, "file is no directory"),
        ("a/checkpoints/step-00000007", 5, "step-00000007/manifest.json: cannot be read: No such file"),
        ("stuffed", 5, "stuffed/checkpoints"),
    ],
)
def test_nothing_there(run_dir: Path, capsys: Capture, place: str, code: int, words: str) -> None:
    for folder in ("events", "checkpoints/step-00000007"):
        (run_dir / folder).mkdir()
    Path("file").touch()
    Path("stuffed").mkdir()
    # A link, where a folder of checkpoints is a folder.
    Path("stuffed/checkpoints").symlink_to(run_dir.resolve() / "checkpoints")
    assert run(["checkpoint", "verify" if "/step" in place else "list", place]) == code
    said = capsys.readouterr()
    assert words in said.err + said.out


def test_what_may_not_be_read(run_dir: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CheckpointFolder) -> tuple[int, ...]:
        raise PermissionError(13, "Permission denied", "a/checkpoints")

    monkeypatch.setattr(CheckpointFolder, "steps", refuse)
    assert run(["checkpoint", "list", "a"]) == 3
    assert "a/checkpoints cannot be read: Permission denied" in capsys.readouterr().err


def test_an_unknown_action(run_dir: Path, capsys: Capture) -> None:
    assert run(["checkpoint", "lst", "a"]) == 2
    assert "'list', 'verify', 'show'" in capsys.readouterr().err


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
@pytest.mark.parametrize("action", ["list", "verify", "show"])
def test_no_torch_for_an_answer(run_dir: Path, action: str) -> None:
    program = f"import sys; from headrace.cli import run; run(['checkpoint', '{action}', 'a']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich"} & set(done.stdout.splitlines()[-1].split())
