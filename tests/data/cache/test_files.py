"""A cache's files: what others wrote, what was left half-written, what a disk does."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.data.cache.shards import AppendFile, FileShards, repair
from headrace.data.cache.store import Store
from headrace.data.pipeline.steps import Absent
from headrace.errors import DataError

COUNT = 12


def example(index: int) -> torch.Tensor:
    return torch.full((100,), index, dtype=torch.uint8)


def opened(folder: Path) -> Store:
    return Store(FileShards(folder), COUNT, None, "the cache")


def filled(folder: Path, indices: Sequence[int] = range(COUNT), pieces: int = 4) -> tuple[Path, Path]:
    store = opened(folder)
    for start in range(0, len(indices), pieces):
        store.put([(index, example(index)) for index in indices[start : start + pieces]])
    (records,) = folder.glob("*.records")
    (entries,) = folder.glob("*.entries")
    return records, entries


def right(store: Store) -> list[int]:
    """Returns the indices that are found; all of them are what was put."""
    found = [index for index, absent in enumerate(store.find(range(COUNT))) if absent is None]
    for index in found:
        assert torch.equal(store.example(index), example(index))
    return found


def test_another_process_finds_it(tmp_path: Path) -> None:
    filled(tmp_path)
    assert right(opened(tmp_path)) == list(range(COUNT))


def test_what_others_append_meanwhile_is_seen(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.find([0]) == [Absent.MISSING]
    for index in range(0, COUNT, 2):
        one.put([(index, example(index))])
        assert other.find([index]) == [None]
        other.put([(index + 1, example(index + 1))])
        assert one.find([index + 1]) == [None]
    assert right(one) == right(other) == right(opened(tmp_path)) == list(range(COUNT))
    assert len(list(tmp_path.glob("*.records"))) == 2


def test_entries_that_are_gone_are_made_anew_from_the_records(tmp_path: Path) -> None:
    records, entries = filled(tmp_path)
    before = entries.read_bytes()
    entries.unlink()
    assert right(opened(tmp_path)) == list(range(COUNT))
    repair(tmp_path)
    assert entries.read_bytes() == before
    assert records.exists()


@pytest.mark.parametrize("length", range(0, COUNT * 32, 37))
def test_entries_that_were_left_undone_are_finished(tmp_path: Path, length: int) -> None:
    _, entries = filled(tmp_path)
    before = entries.read_bytes()
    os.truncate(entries, length)
    assert right(opened(tmp_path)) == list(range(COUNT))
    repair(tmp_path)
    assert entries.read_bytes() == before


def test_a_damaged_entry_hides_nothing(tmp_path: Path) -> None:
    _, entries = filled(tmp_path)
    before = entries.read_bytes()
    for bit in range(0, 8 * len(before), 61):
        damaged = bytearray(before)
        damaged[bit // 8] ^= 1 << (bit % 8)
        entries.write_bytes(damaged)
        assert right(opened(tmp_path)) == list(range(COUNT))


def test_a_record_that_was_left_undone_is_made_anew(tmp_path: Path) -> None:
    records, _ = filled(tmp_path)
    length = records.stat().st_size // COUNT
    for left in range(records.stat().st_size - 1, 0, -97):
        os.truncate(records, left)
        store = opened(tmp_path)
        whole = left // length
        assert right(store) == list(range(whole))
        store.put([(index, example(index)) for index in range(whole, COUNT)])
        assert right(store) == right(opened(tmp_path)) == list(range(COUNT))
        for path in sorted(tmp_path.glob("*.*"))[2:]:
            path.unlink()


def test_a_flipped_bit_is_noticed_and_the_example_made_anew_once_for_all(tmp_path: Path) -> None:
    records, _ = filled(tmp_path)
    before = records.read_bytes()
    length = len(before) // COUNT
    dice = np.random.default_rng(0)
    for trial in range(COUNT):
        damaged = bytearray(before)
        damaged[trial * length + int(dice.integers(length))] ^= 1 << int(dice.integers(8))
        records.write_bytes(damaged)
        store = opened(tmp_path)
        assert right(store) == [index for index in range(COUNT) if index != trial]
        (line,) = store.take_notices()
        assert f"the record of example {trial} in {records.name} at byte {trial * length:,} is damaged" in line
        store.put([(trial, example(trial))])
        # The damaged one is still there, and comes first.
        for again in (store, opened(tmp_path)):
            assert right(again) == list(range(COUNT))
            assert again.take_notices() == ()
        for path in sorted(tmp_path.glob("*.*"))[2:]:
            path.unlink()


@pytest.mark.parametrize("with_entries", [True, False])
def test_files_without_a_record_are_deleted(tmp_path: Path, with_entries: bool) -> None:
    records, entries = filled(tmp_path)
    os.truncate(records, 0)
    os.truncate(entries, 32 * with_entries)
    repair(tmp_path)
    assert not records.exists()
    assert not entries.exists()


class FullDisk(AppendFile):
    """Writes so many bytes, of a record maybe a part, and then no more."""

    def __init__(self, path: Path, room: list[int]) -> None:
        self._file = AppendFile(path)
        self._room = room

    def append(self, data: Sequence[NDArray[np.uint8]]) -> None:
        for piece in data:
            fits = piece[: self._room[0]]
            self._file.append([fits])
            self._room[0] -= len(fits)
            if len(fits) < len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("room", [0, 1, 255, 256, 300, 1024, 1500, 256 * 4 + 32 * 3])
def test_a_full_disk_is_told_and_what_was_kept_stays(tmp_path: Path, room: int) -> None:
    left = [room]
    store = Store(FileShards(tmp_path, lambda path: FullDisk(path, left)), COUNT, None, "the cache")
    for start in range(0, COUNT, 4):
        store.put([(index, example(index)) for index in range(start, start + 4)])
    kept = right(store)
    assert kept == list(range(len(kept)))
    (line,) = store.take_notices()
    assert f"keeps {len(kept)} of 12 examples, nothing can be added to it: No space left on device" in line
    # Complete records without an entry are found by the next process.
    later = opened(tmp_path)
    assert set(right(later)) >= set(kept)
    later.put([(index, example(index)) for index in range(COUNT)])
    assert right(later) == list(range(COUNT))


def test_files_that_are_deleted_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    filled(folder)
    store = opened(folder)
    right(store)
    for path in folder.iterdir():
        path.unlink()
    # They are mapped.
    assert right(store) == list(range(COUNT))
    folder.rmdir()
    with pytest.raises(DataError, match="cannot be read any more"):
        opened(folder).find([0])


def test_records_of_another_length_of_the_data_are_not_mistaken(tmp_path: Path) -> None:
    filled(tmp_path)
    store: Any = Store(FileShards(tmp_path), 5, None, "the cache")
    assert store.find(range(5)) == [None] * 5
