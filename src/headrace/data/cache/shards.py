"""The records of a cache: in the memory of this process, or in files of a folder.

    manifest.json                      what the cache is of; written whole, before anything else
    lock                               shared by the users of the folder, exclusive while it is made
    NANOSECONDS-PROCESS.records        records, one after the other; only its process appends to it
    NANOSECONDS-PROCESS.entries        32 bytes a record: index, offset, generation, checksum; written after it

A process may be killed at any instant: an unfinished record or entry is at the end of its own files, where no other
process appends. Records without an entry are found by their fronts.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.data.cache.record import front_at, front_of, is_sound
from headrace.errors import DataError
from headrace.machine import disk

_CHUNK = 64 << 20
_REMEMBERED = 16
"""Bytes that a record takes in the index."""
RECORDS, ENTRIES = ".records", ".entries"
ENTRY = np.dtype([("index", "<u8"), ("offset", "<u8"), ("generation", "<u8"), ("checksum", "<u8")])
"""A record's example, its first byte in the shard, its generation, and the checksum of these."""


class Shards(ABC):
    """Records one after the other, in pieces. `append` and `new_entries` are not for several threads at once."""

    @abstractmethod
    def append(self, records: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
        """Adds records; returns shard and offset of each. An OSError if there is no room for them."""

    @abstractmethod
    def new_entries(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yields by shard the entries, `(records,)` of `ENTRY`, that other processes added since the last call."""

    @abstractmethod
    def buffer(self, shard: int, end: int) -> NDArray[np.uint8]:
        """Returns a shard's bytes, read-only: at least `end` of them, if it has so many."""

    @abstractmethod
    def name(self, shard: int) -> str:
        """Returns the name of a shard for messages."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all records and of their index."""


class MemoryShards(Shards):
    """Records in memory, `limit` bytes at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: list[NDArray[np.uint8]] = []
        self._used = 0
        self._full = 0
        self._count = 0

    def append(self, records: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
        places = []
        for record in records:
            if not self._chunks or self._used + len(record) > len(self._chunks[-1]):
                left = self._limit - self.nbytes
                # Memory is allocated when it is written to, so that a chunk costs what it holds.
                self._full += self._used
                self._used = 0
                self._chunks.append(np.empty(max(len(record), min(_CHUNK, left)), dtype=np.uint8))
            self._chunks[-1][self._used : self._used + len(record)] = record
            places.append((len(self._chunks) - 1, self._used))
            self._used += len(record)
            self._count += 1
        return places

    def new_entries(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        return iter(())

    def buffer(self, shard: int, end: int) -> NDArray[np.uint8]:
        return self._chunks[shard]

    def name(self, shard: int) -> str:
        return "memory"

    @property
    def nbytes(self) -> int:
        return self._full + self._used + self._count * _REMEMBERED


class AppendFile:
    """A new file to append to; an OSError if it exists."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: Sequence[NDArray[np.uint8]]) -> None:
        """Writes all of it, or raises an OSError."""
        for piece in data:
            left = piece.data
            while left:
                left = left[os.write(self._descriptor, left) :]


class _Shard:
    """A file of records and the file of its entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries_path = path.with_suffix(ENTRIES)
        self.bytes = np.empty(0, dtype=np.uint8)
        self._read = 0
        self._seen = False

    def map(self, length: int | None = None) -> NDArray[np.uint8]:
        """Returns the file's present bytes, or its first `length`; several threads may call it."""
        with open(self.path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size if length is None else length
            # An older mapping stays valid as long as it is used.
            held = self.bytes
            if size > len(held):
                held = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), dtype=np.uint8)
                if len(held) > len(self.bytes):
                    self.bytes = held
        return held

    def listed(self) -> NDArray[np.void]:
        """Returns the entries that have been added, up to the first damaged one."""
        try:
            with open(self.entries_path, "rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            content = b""
        entries = np.frombuffer(content, dtype=ENTRY, count=len(content) // ENTRY.itemsize)
        wrong = np.flatnonzero(entries["checksum"] != _checksums(entries))
        entries = entries[: wrong[0]] if len(wrong) else entries
        self._read += len(entries) * ENTRY.itemsize
        return entries

    def unlisted(self, last: int) -> NDArray[np.void]:
        """Returns entries for the whole records after the one at offset `last`; -1 for all."""
        buffer, begin = self.map(), 0
        if last >= 0:
            front = front_at(buffer, last)
            begin = len(buffer) if front is None else last + front.record_bytes
        entries = []
        while (front := front_at(buffer, begin)) is not None and begin + front.record_bytes <= len(buffer):
            if not is_sound(buffer[begin : begin + front.record_bytes]):
                break
            entries.append((front.index, begin, front.generation, 0))
            begin += front.record_bytes
        return _signed(np.array(entries, dtype=ENTRY))

    def new_entries(self) -> NDArray[np.void]:
        """Returns the entries that have been added; the first time, also of records without an entry."""
        entries = self.listed()
        if not self._seen:
            self._seen = True
            last = int(entries["offset"][-1]) if len(entries) else -1
            entries = np.concatenate([entries, self.unlisted(last)])
        return entries


class FileShards(Shards):
    """Records in files of an existing folder; `lock` keeps the folder from being made anew meanwhile."""

    def __init__(
        self, folder: Path, create: Callable[[Path], AppendFile] = AppendFile, lock: object | None = None
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._create = create
        self._shards: list[_Shard] = []
        self._known: set[str] = set()
        self._own = -1
        self._files: tuple[AppendFile, AppendFile] | None = None
        self._end = 0

    def append(self, records: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
        if self._files is None:
            path = self._folder / f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}{RECORDS}"
            self._files = self._create(path), self._create(path.with_suffix(ENTRIES))
            self._known.add(path.name)
            self._shards.append(_Shard(path))
            self._own = len(self._shards) - 1
        entries = np.zeros(len(records), dtype=ENTRY)
        end = self._end
        for entry, record in zip(entries, records, strict=True):
            front = front_of(record)
            entry["index"], entry["offset"], entry["generation"] = front.index, end, front.generation
            end += len(record)
        self._files[0].append(records)
        self._end = end
        self._files[1].append([_signed(entries).view(np.uint8)])
        return [(self._own, int(offset)) for offset in entries["offset"]]

    def new_entries(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        with _readable(self._folder):
            for name in sorted(os.listdir(self._folder)):
                if name.endswith(RECORDS) and name not in self._known:
                    self._known.add(name)
                    self._shards.append(_Shard(self._folder / name))
            for number, shard in enumerate(self._shards):
                if number != self._own and len(entries := shard.new_entries()):
                    yield number, entries

    def buffer(self, shard: int, end: int) -> NDArray[np.uint8]:
        held = self._shards[shard]
        mapped = held.bytes
        if end <= len(mapped):
            return mapped
        with _readable(self._folder):
            # Of its own shard, only whole records: another thread may be writing the next.
            return held.map(self._end if shard == self._own else None)

    def name(self, shard: int) -> str:
        return self._shards[shard].path.name

    @property
    def nbytes(self) -> int:
        with _readable(self._folder):
            return sum(shard.path.stat().st_size for shard in self._shards)


def repair(folder: Path) -> None:
    """Rewrites entries that a killed process left unfinished; deletes files without a record. For one process."""
    for path in folder.glob(f"*{RECORDS}"):
        shard = _Shard(path)
        entries = shard.new_entries()
        # After a power cut, there may be entries of records that never reached the disk.
        entries = entries[entries["offset"] < path.stat().st_size]
        if not len(entries):
            path.unlink()
            shard.entries_path.unlink(missing_ok=True)
        elif not disk.exists(shard.entries_path) or shard.entries_path.stat().st_size != entries.nbytes:
            part = path.with_suffix(".part")
            part.write_bytes(entries.tobytes())
            os.replace(part, shard.entries_path)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache in {folder} cannot be read any more: {error}; leave its files alone while it is used"
        ) from error


def _signed(entries: NDArray[np.void]) -> NDArray[np.void]:
    entries["checksum"] = _checksums(entries)
    return entries


def _checksums(entries: NDArray[np.void]) -> NDArray[np.uint64]:
    # Each factor is odd, so that any change of one of the three numbers changes it; the first term, so that zeros
    # are not a valid entry.
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    total = np.full(len(entries), 0x27D4EB2F165667C5, dtype=np.uint64)
    for name, factor in zip(("index", "offset", "generation"), factors, strict=True):
        total = (total ^ entries[name]) * np.uint64(factor)
    return total
