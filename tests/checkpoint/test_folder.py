"""Beginning, committing, keeping, abandoning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from checkpoint.states import equal, save, small_state
from headrace.checkpoint import CheckpointFolder
from headrace.errors import CorruptCheckpoint, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_a_folder_that_does_not_exist_has_no_checkpoint(folder: CheckpointFolder) -> None:
    assert folder.steps() == ()
    assert folder.latest() == (None, ())
    with pytest.raises(CorruptCheckpoint, match=r"step-00000005/manifest.json: cannot be read: No such file"):
        folder.open(5)


def test_the_last_ones_are_kept(folder: CheckpointFolder) -> None:
    for step in (0, 5, 100_000_000, 123_456_789_012):
        save(folder, step, keep=3)
    assert folder.steps() == (5, 100_000_000, 123_456_789_012)
    assert sorted(os.listdir(folder.path)) == ["step-00000005", "step-100000000", "step-123456789012"]
    with pytest.raises(UsageError, match="keep 1 or more"):
        save(folder, 6, keep=0)


def test_names_that_are_not_ours_are_left_alone(folder: CheckpointFolder) -> None:
    save(folder, 1)
    names = ["notes.txt", "step-1", "step-000000009", "STEP-00000009", "step-00000009.parts", "step-00000009 "]
    for name in names:
        (folder.path / name).mkdir()
    save(folder, 2, keep=1)
    assert folder.steps() == (2,)
    assert sorted(os.listdir(folder.path)) == sorted([*names, "step-00000002"])


def test_what_is_being_written_is_not_a_checkpoint_and_can_be_abandoned(folder: CheckpointFolder) -> None:
    save(folder, 1)
    folder.begin(2)
    folder.write(2, 0, small_state(2))
    assert folder.steps() == (1,)
    folder.abandon(2)
    assert os.listdir(folder.path) == ["step-00000001"]
    folder.abandon(2)


def test_beginning_clears_what_a_crash_left(folder: CheckpointFolder) -> None:
    save(folder, 1)
    folder.begin(2)
    folder.write(2, 0, small_state(2))
    (folder.path / "step-00000009.old").mkdir()
    (folder.path / "step-00000007.part").write_text("a file in a folder's place")
    (folder.path / "step-00000008.old").symlink_to(folder.path / "step-00000001")
    save(folder, 2)
    assert sorted(os.listdir(folder.path)) == ["step-00000001", "step-00000002"]
    folder.open(1).verify()


def test_what_others_put_into_an_old_one_goes_with_it_but_not_what_it_links_to(folder: CheckpointFolder) -> None:
    path = save(folder, 1)
    elsewhere = folder.path.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (path / "notes" / "deeper").mkdir(parents=True)
    (path / "notes" / "deeper" / "link").symlink_to(elsewhere)
    (path / "link").symlink_to(elsewhere)
    save(folder, 2, keep=1)
    assert os.listdir(folder.path) == ["step-00000002"]
    assert os.listdir(elsewhere) == ["kept"]


def test_the_same_again_replaces_nothing_and_says_so(folder: CheckpointFolder) -> None:
    inode = save(folder, 3).stat().st_ino
    folder.begin(3)
    files = [folder.write(3, rank, small_state(3, rank)) for rank in (1, 0)]
    assert folder.commit(3, files, {"step": 3}, 2) is False
    assert save(folder, 3).stat().st_ino == inode
    assert os.listdir(folder.path) == ["step-00000003"]


@pytest.mark.parametrize("how", ["damaged", "another"])
def test_a_damaged_or_another_one_of_the_same_step_gives_way(folder: CheckpointFolder, how: str) -> None:
    path = save(folder, 3)
    if how == "damaged":
        os.truncate(path / "rank-1.safetensors", 10)
    folder.begin(3)
    state = {"new": torch.ones(1)}
    assert folder.commit(3, [folder.write(3, 0, state)], {}, 2)
    newest, wrong = folder.latest()
    assert newest is not None
    assert equal(newest.read(0), state)
    assert wrong == ()
    assert os.listdir(folder.path) == ["step-00000003"]


def test_newer_ones_belong_to_a_history_that_was_left(folder: CheckpointFolder) -> None:
    for step in (10, 20, 30):
        save(folder, step, keep=3)
    save(folder, 15, keep=2)
    assert folder.steps() == (10, 15)


def test_the_newest_sound_one_is_found_and_what_is_wrong_with_newer_ones_is_told(folder: CheckpointFolder) -> None:
    paths = [save(folder, step, keep=4) for step in (1, 2, 3, 4)]
    (paths[1] / "manifest.json").write_bytes(b"{}")
    (paths[2] / "rank-0.safetensors").unlink()
    data = bytearray((paths[3] / "rank-1.safetensors").read_bytes())
    data[-1] ^= 1
    (paths[3] / "rank-1.safetensors").write_bytes(data)
    newest, wrong = folder.latest()
    assert newest is not None
    assert (newest.step, newest.path) == (1, paths[0])
    assert [error.path for error in wrong] == [
        paths[3] / "rank-1.safetensors", paths[2] / "rank-0.safetensors", paths[1] / "manifest.json"
    ]  # fmt: skip
    assert "its content has changed: SHA-256" in wrong[0].reason
    assert str(wrong[1]).startswith(f"{wrong[1].path}: cannot be read: No such file or directory; ")
    assert all(str(error).endswith("resume from an older checkpoint, or restore it from a copy") for error in wrong)


def test_a_rank_that_saved_nothing_is_told(folder: CheckpointFolder) -> None:
    save(folder, 1)
    with pytest.raises(CorruptCheckpoint, match=r"rank 2 has no file in it, only ranks \(0, 1\)"):
        folder.open(1).read(2)


def test_a_rank_writes_its_file_once(folder: CheckpointFolder) -> None:
    folder.begin(1)
    record = folder.write(1, 0, small_state(1))
    with pytest.raises(FileExistsError):
        folder.write(1, 0, small_state(1))
    with pytest.raises(UsageError, match="a rank has two files"):
        folder.commit(1, [record, record], {}, 1)
