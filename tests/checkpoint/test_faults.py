"""A disk that fails at the k-th operation, for every k: the old checkpoint lives, the next save goes through."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.faulty import FaultyStorage
from checkpoint.model_disk import ModelDisk
from checkpoint.states import equal, save, small_state
from headrace.checkpoint import CheckpointFolder, Storage

RANKS = 2


def sound(storage: Storage, path: Path, steps: set[int]) -> int:
    """Returns the newest step; all of `steps` must be there, and all that is there must be whole."""
    folder = CheckpointFolder(path, storage)
    newest, wrong = folder.latest()
    assert newest is not None
    assert wrong == ()
    assert steps <= set(folder.steps())
    for step in folder.steps():
        assert all(equal(folder.open(step).read(rank), small_state(step, rank)) for rank in range(RANKS))
    return newest.step


def try_with(make: Callable[[], Storage], path: Path, number: int, first: int, lasting: bool) -> bool:
    """Lets the `first` operation of a save fail; returns whether there was one."""
    storage = make()
    for step in (10, 20):
        save(CheckpointFolder(path, storage), step, RANKS)
    faulty = FaultyStorage(storage, number, first, lasting)
    folder = CheckpointFolder(path, faulty)
    try:
        save(folder, 30, RANKS)
        assert sound(storage, path, {20, 30}) == 30
    except OSError as error:
        assert error.errno == number  # noqa: PT017
        folder.abandon(30)
        assert sound(storage, path, {20}) in (20, 30)
    faulty.repair()
    save(folder, 40, RANKS)
    assert sound(storage, path, {40}) == 40
    assert {name for name in storage.entries("") if not name.endswith("0")} == set(), "nothing is left behind"
    return faulty.struck


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
def test_an_error_at_every_operation(number: int, lasting: bool) -> None:
    hits = sum(1 for _ in itertools.takewhile(bool, _tries(ModelDisk, Path("model"), number, lasting)))
    assert hits > 30


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_an_error_at_every_operation_on_a_real_disk(tmp_path: Path, lasting: bool) -> None:
    for first in itertools.count():
        path = tmp_path / str(first)
        if not try_with(lambda path=path: Storage(path), path, errno.ENOSPC, first, lasting):
            break
    assert first > 30


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "always"])
def test_a_short_write_goes_on(lasting: bool) -> None:
    disk = ModelDisk()
    for first in range(12):
        storage = FaultyStorage(disk, 0, first, lasting)
        save(CheckpointFolder(Path("model"), storage), 10 + first, RANKS)
        assert sound(disk, Path("model"), {10 + first}) == 10 + first


def test_a_short_read_goes_on() -> None:
    disk = ModelDisk()
    save(CheckpointFolder(Path("model"), disk), 10, RANKS)
    assert sound(FaultyStorage(disk, 0, 0, lasting=True), Path("model"), {10}) == 10


def test_a_disk_that_cannot_read_makes_the_checkpoint_before_count() -> None:
    disk = ModelDisk()
    for step in (10, 20):
        save(CheckpointFolder(Path("model"), disk), step, RANKS)
    newest, wrong = CheckpointFolder(Path("model"), FaultyStorage(disk, errno.EIO, 1)).latest()
    assert newest is not None
    assert newest.step == 10
    assert [str(error.path) for error in wrong] == ["model/step-00000020/manifest.json"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_is_not_the_checkpoints_fault_is_not_called_corrupt(number: int) -> None:
    disk = ModelDisk()
    save(CheckpointFolder(Path("model"), disk), 10, RANKS)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        CheckpointFolder(Path("model"), FaultyStorage(disk, number, 1)).latest()
    assert caught.value.errno == number


def _tries(make: Callable[[], Storage], path: Path, number: int, lasting: bool) -> list[bool]:
    found = []
    while not found or found[-1]:
        found.append(try_with(make, path, number, len(found), lasting))
    return found
