"""Copies on other file systems: whole ones count, what is cut off at any operation does not."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint.services import Breakable, files_at, local_files, spoil
from checkpoint.states import equal, save, small_state
from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.copier import CheckpointCopier
from headrace.checkpoint.remote import RemoteFolder
from headrace.errors import CorruptCheckpoint, UnfitMachine, UsageError

RANKS = 2
URL = "memory://runs/a"


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def own(tmp_path: Path) -> CheckpointFolder:
    """A run's checkpoints of steps 10 and 20."""
    folder = CheckpointFolder(tmp_path / "own")
    for step in (10, 20):
        save(folder, step, RANKS)
    return folder


def copy(folder: CheckpointFolder, url: str, keep: int = 2) -> RemoteFolder:
    """Copies all checkpoints in order."""
    remote = RemoteFolder(url)
    for step in folder.steps():
        remote.send(folder.open(step))
        remote.prune(step, keep)
    return remote


@pytest.mark.parametrize("where", ["memory", "file"])
def test_there_and_back(own: CheckpointFolder, tmp_path: Path, where: str) -> None:
    url = URL if where == "memory" else f"file://{tmp_path}/elsewhere/runs/a"
    remote = copy(own, f"{url}/")
    remote.require_writable()
    assert files_at(url) == local_files(own.path)
    assert remote.steps() == (10, 20)
    back = CheckpointFolder(tmp_path / "back")
    assert remote.receive(back) == (20, ())
    assert back.steps() == (20,)
    for rank in range(RANKS):
        assert equal(back.open(20, verify=True).read(rank), small_state(20, rank))
    assert remote.receive(CheckpointFolder(tmp_path / "older"), 10) == (10, ())


def test_only_the_last_ones_are_kept_and_a_left_history_goes(own: CheckpointFolder) -> None:
    remote = copy(own, URL, keep=1)
    assert remote.steps() == (20,)
    older = own.open(10)
    remote.send(older)
    remote.prune(10, keep=2)
    assert remote.steps() == (10,)


def test_another_history_replaces_a_step(own: CheckpointFolder, tmp_path: Path) -> None:
    remote = copy(own, URL)
    other = CheckpointFolder(tmp_path / "other")
    save(other, 20, ranks=1, numbers=9)
    remote.send(other.open(20))
    assert {path: data for path, data in files_at(URL).items() if "20" in path} == local_files(other.path)


def test_what_is_there_is_not_sent_again(own: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = copy(own, URL)
    service = Breakable(monkeypatch)
    remote.send(own.open(20))
    assert service.done == 1, "its manifest is read"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("half", "it has no manifest.json: it was not copied to its end"),
        ("gone", "rank-0.safetensors is missing"),
        ("short", "bytes, saved were"),
        ("bit", "its content has changed"),
        ("other", "its own digest does not fit"),
        ("exchanged", "it is of step 10, its folder of step 20"),
    ],
)
def test_a_damaged_copy_is_left_out(own: CheckpointFolder, tmp_path: Path, how: str, reason: str) -> None:
    remote = copy(own, URL)
    spoil(URL, 20, how)
    back = CheckpointFolder(tmp_path / "back")
    step, (wrong,) = remote.receive(back)
    assert step == 10
    assert back.steps() == (10,)
    assert str(wrong.path) == "memory://runs/a/step-00000020"
    assert reason in wrong.reason
    with pytest.raises(CorruptCheckpoint, match="memory://runs/a/step-00000020: "):
        remote.receive(CheckpointFolder(tmp_path / "one"), 20)
    assert not [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    # The next copy clears what does not count.
    save(own, 30, RANKS)
    remote.send(own.open(30))
    remote.prune(30, keep=1)
    assert files_at(URL) == {path: data for path, data in local_files(own.path).items() if "30" in path}


@pytest.mark.slow
def test_a_service_that_fails_at_any_operation(own: CheckpointFolder, tmp_path: Path) -> None:
    """Whatever it interrupts, the newest that counts is whole; and the next copy goes through."""
    for first in itertools.count():
        MemoryFileSystem.store.clear()
        remote = copy(own, URL)
        fresh = CheckpointFolder(Path(shutil.copytree(own.path, tmp_path / f"fresh{first}")))
        save(fresh, 30, RANKS)
        with pytest.MonkeyPatch.context() as patch:
            service = Breakable(patch)
            service.left = first
            try:
                remote.send(fresh.open(30))
                remote.prune(30, keep=2)
            except UnfitMachine as error:
                assert "memory://runs/a cannot be written: the service is down; check the" in str(error)  # noqa: PT017
            went_through = service.left > 0
        back = CheckpointFolder(tmp_path / f"back{first}")
        step, _ = remote.receive(back)
        assert step in (20, 30)
        assert all(equal(back.open(step).read(rank), small_state(step, rank)) for rank in range(RANKS))
        remote.send(fresh.open(30))
        remote.prune(30, keep=2)
        assert files_at(URL) == local_files(fresh.path)
        if went_through:
            break
    assert first > 10


def test_a_checkpoint_that_is_deleted_while_it_is_copied(
    own: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, checkpoint = RemoteFolder(URL), own.open(20)
    with checkpoint.contents() as files:
        own.discard(20)
        assert [b"".join(map(bytes, chunks)) != b"" for _, chunks in files] == [True, True]
    with pytest.raises(CorruptCheckpoint, match="cannot be read: No such file"):
        remote.send(checkpoint)
    assert files_at(URL) == {}


def test_a_checkpoint_that_has_changed_on_its_own_disk_is_not_copied(own: CheckpointFolder) -> None:
    file = own.path / "step-00000020" / "rank-1.safetensors"
    content = file.read_bytes()
    checkpoint = own.open(20)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    remote = RemoteFolder(URL)
    with pytest.raises(CorruptCheckpoint, match=r"rank-1\.safetensors: its content has changed"):
        remote.send(checkpoint)
    with pytest.raises(CorruptCheckpoint, match=r"it has no manifest\.json"):
        remote.receive(CheckpointFolder(own.path.parent / "back"))


def test_addresses_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ("runs/a", "s3:/bucket", "s3://", "s3:///", "memory://a\nb"):
        with pytest.raises(UsageError, match="must be a URL, for example 's3://bucket/runs/a'"):
            RemoteFolder(wrong)
    with pytest.raises(UsageError, match="holds a password"):
        RemoteFolder("sftp://me:secret@host/runs")
    with pytest.raises(UnfitMachine, match=r"nowhere://a need a package .* pip install"):
        RemoteFolder("nowhere://a")
    with pytest.raises(UsageError, match="there is no checkpoint at memory://runs/a; begin without resume"):
        RemoteFolder(URL).receive(CheckpointFolder(tmp_path))


def copied(copier: CheckpointCopier) -> list[str]:
    """Ends the copying; returns what it has to say."""
    copier.finish()
    while not copier.wait(10):
        pass
    return list(copier.lines())


def test_the_newest_is_copied_in_the_background(own: CheckpointFolder) -> None:
    copier = CheckpointCopier(own, RemoteFolder(URL), keep=2)
    copier.start()
    assert copied(copier) == ["the checkpoint of step 20 is at memory://runs/a, too"]
    assert RemoteFolder(URL).steps() == (20,), "those that were saved before it are left out"


def test_a_run_without_a_checkpoint_copies_none(tmp_path: Path) -> None:
    copier = CheckpointCopier(CheckpointFolder(tmp_path / "none"), RemoteFolder(URL), keep=2)
    copier.start()
    assert copied(copier) == []


def test_a_service_that_fails_costs_one_line_and_is_tried_again(
    own: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, down = Breakable(monkeypatch), float("-inf")
    copier = CheckpointCopier(own, RemoteFolder(URL), keep=2)
    service.left = down
    copier._copy_newest()
    copier._copy_newest()
    assert list(copier.lines()) == [
        "the checkpoint of step 20 was not copied: memory://runs/a cannot be written: the service is down; check the "
        "address, the credentials and the network. Training goes on, and the next checkpoint is tried again"
    ]
    service.left = float("inf")
    save(own, 30, RANKS)
    copier._copy_newest()
    assert list(copier.lines()) == ["checkpoints are copied to memory://runs/a again, from step 30 on"]
    save(own, 40, RANKS)
    service.left = down
    copier.start()
    (line,) = copied(copier)[-1:]
    assert line.startswith("THE LAST CHECKPOINT IS NOT AT memory://runs/a: ")
    assert f"It is in {own.path}; copy it from there, or go on with resume=True" in line


def test_a_fault_of_ours_is_raised_at_the_end(own: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteFolder(URL)
    monkeypatch.setattr(remote, "prune", None)
    copier = CheckpointCopier(own, remote, keep=2)
    copier.start()
    with pytest.raises(TypeError, match="not callable"):
        copied(copier)
