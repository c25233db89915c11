"""A process's view of a cache: locks its folder, finds the examples that it has, and adds others."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.cache.record import FRONT_BYTES, data_of, front_at, front_of, gathered, is_sound, pack
from headrace.data.cache.shards import ENTRIES, RECORDS, FileShards, MemoryShards, Shards, repair
from headrace.data.encoding import ValueDecoder, decoder
from headrace.data.pipeline.steps import Absent, Cache
from headrace.errors import UnfitMachine, UsageError

FORMAT = 1
"""The version of records, entries and manifest; a folder of another version is made anew."""
_MANIFEST, _LOCK_FILE, _PART = "manifest.json", "lock", ".part"
_PATIENCE_S, _PAUSE_S = 10.0, 0.02


class CacheFolderLock:
    """This process's lock of a cache folder, held until the object or the process ends; a fork does not inherit it.

    It is lost when the process closes the file by any descriptor, so that a process may lock a folder only once.
    """

    def __init__(self, folder: Path) -> None:
        self.process = os.getpid()
        self._descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._descriptor)

    def lock(self, exclusive: bool) -> bool:
        """Tries to take the lock, exclusive or shared; returns whether it did."""
        with suppress(BlockingIOError, PermissionError):  # POSIX allows both
            fcntl.lockf(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        return False


_CLAIMS: weakref.WeakValueDictionary[Path, CacheFolderLock] = weakref.WeakValueDictionary()


def claim(folder: Path, key: str, about: str, patience_s: float = _PATIENCE_S) -> tuple[CacheFolderLock, list[str]]:
    """Locks a folder as the cache of a pipeline, made if needed; returns the lock and lines for the user.

    `key` identifies source and steps, `about` describes them. A cache of this process for another pipeline in that
    folder is made anew; one of another process is a UsageError after `patience_s`. For one thread at a time.
    """
    deadline = time.monotonic() + patience_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = _CLAIMS.get(folder)
        if held is None or held.process != os.getpid():
            held = _CLAIMS[folder] = CacheFolderLock(folder)
        notices: list[str] = []
        while True:
            if held.lock(exclusive=True):
                notices += _make(folder, key, about)
            # The manifest is written under the exclusive lock only.
            if held.lock(exclusive=False) and _differs(folder, key) is None:
                return held, notices
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
    except OSError as error:
        raise UnfitMachine(f"{folder} cannot be a cache: {error.strerror or error}; give another folder") from error
    raise UsageError(
        f"another process uses the cache in {folder}, and {_differs(folder, key)}; this is {about}: "
        "give each pipeline a folder of its own"
    )


def _make(folder: Path, key: str, about: str) -> list[str]:
    if (difference := _differs(folder, key)) is None:
        repair(folder)
        return []
    old = [path for path in folder.iterdir() if path.suffix in (RECORDS, ENTRIES, _PART)]
    # The manifest first: without it, no process uses the rest.
    (folder / _MANIFEST).unlink(missing_ok=True)
    for path in old:
        path.unlink()
    part = folder / f"{_MANIFEST}{_PART}"
    part.write_text(json.dumps({"format": FORMAT, "key": key, "about": about}) + "\n", encoding="utf-8")
    os.replace(part, folder / _MANIFEST)
    return [f"the cache in {folder} is made anew, because {difference}"] if old else []


def _differs(folder: Path, key: str) -> str | None:
    """Returns why a folder is not the cache with that key; None if it is."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):
        return "it has no manifest that can be read"
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        return f"it is of version {version!r}, and this is {FORMAT}"
    return None if manifest.get("key") == key else f"it is of other data or other code ({manifest.get('about')})"


_UNSEEN, _STRANGE, _LEFT_OUT = 0, -1, -2
_MOST_LAYOUTS = 4096
"""Examples of different lengths have different layouts; so many are remembered."""


class Store:
    """One process's view of a cache; for any number of threads.

    Examples are handed out as copies, which may be changed in place. A record is checked when this process first reads
    it. Nothing is evicted: an epoch visits every example, so that an evicted one would be needed before the new one.
    `limit` is in bytes, None for no limit; `where` names the cache in messages.
    """

    def __init__(
        self, shards: Shards, examples: int, limit: int | None, where: str, notices: Sequence[str] = ()
    ) -> None:
        self._shards = shards
        self._limit = limit
        self._where = where
        # The shard's number plus 1, so that fresh memory means "not there".
        self._shard = np.zeros(examples, dtype=np.int32)
        self._offset = np.zeros(examples, dtype=np.int64)
        self._layout = np.zeros(examples, dtype=np.int32)
        self._generations: dict[int, int] = {}
        self._layouts: list[ValueDecoder] = []
        self._numbers: dict[bytes, int] = {}
        self._full = False
        self._notices = list(notices)
        self._lock = threading.Lock()
        self._layouts_lock = threading.Lock()

    def find(self, indices: Sequence[int]) -> list[Absent | None]:
        """Returns for each example how it is `Absent`, or None if the cache has it."""
        self._find_records(np.asarray(indices, dtype=np.int64))
        absent = {_UNSEEN: Absent.MISSING, _LEFT_OUT: Absent.LEFT_OUT}
        return [absent.get(int(self._layout[index])) for index in indices]

    def example(self, index: int) -> Any:
        """Returns a copy of an example that was found."""
        number = int(self._layout[index])
        record = self._record(int(self._shard[index]) - 1, int(self._offset[index]))
        assert record is not None, "it was found"
        form = self._layouts[number - 1] if number > 0 else decoder(front_of(record).header(record))
        # A copy, which may be changed in place.
        return form.build(record[data_of(form) :].copy())

    def gather(self, indices: NDArray[np.int64]) -> tuple[Any, int] | None:
        """Returns the batch of examples and how many are not left out; None if one is missing or they do not stack."""
        self._find_records(indices)
        forms = self._layout[indices]
        if not forms.all():
            return None
        present = indices[forms != _LEFT_OUT]
        form = self._layout[present[0]] if len(present) else _STRANGE
        if form < 1 or (self._layout[present] != form).any() or self._layouts[form - 1].batch is None:
            return None
        known = self._layouts[form - 1]
        # The whole record: a mapping may end in the middle of one that was being written.
        length = data_of(known) + max((leaf.end for leaf in known.leaves), default=0)
        places = zip((self._shard[present] - 1).tolist(), self._offset[present].tolist(), strict=True)
        records = [self._shards.buffer(shard, offset + length)[offset:] for shard, offset in places]
        return gathered(known, records), len(present)

    def put(self, examples: Sequence[tuple[int, Any]]) -> None:
        """Adds examples, each with its index, while there is room; a DataError for a type that cannot be cached."""
        if self._full:
            return
        packed = {}
        for index, value in examples:
            if not self._shard[index]:
                generation = self._generations.get(index, 0)
                packed[index] = generation, pack(index, value, generation)
        with self._lock:
            # Another thread may have been faster.
            self._append([(index, *packed[index]) for index in packed if not self._shard[index]])

    def take_notices(self) -> tuple[str, ...]:
        """Returns lines for the user, each once."""
        if not self._notices:
            return ()
        with self._lock:
            notices, self._notices = tuple(self._notices), []
        return notices

    def _append(self, packed: Sequence[tuple[int, int, NDArray[np.uint8]]]) -> None:
        room = math.inf if self._limit is None else self._limit - self._shards.nbytes
        lengths = np.cumsum([len(record) for _, _, record in packed])
        fitting = 0 if self._full else int(np.searchsorted(lengths, room, side="right"))
        try:
            places = self._shards.append([record for _, _, record in packed[:fitting]]) if fitting else []
        except OSError as error:
            self._end(f"nothing can be added to it: {error.strerror or error}", "make room")
            return
        for (index, generation, record), (shard, offset) in zip(packed[:fitting], places, strict=True):
            self._add(index, shard, offset, generation)
            # This process has just made it, so that it needs no check.
            self._layout[index] = self._number(record)
        if fitting < len(packed):
            self._end(f"it is full with {self._shards.nbytes:,} bytes", "raise its limit")

    def _end(self, why: str, remedy: str) -> None:
        if not self._full:
            self._notices.append(
                f"{self._where} keeps {np.count_nonzero(self._shard):,} of {len(self._shard):,} examples, {why}; "
                f"the rest is made anew in every epoch; {remedy}"
            )
        self._full = True

    def _find_records(self, indices: NDArray[np.int64]) -> None:
        """Finds the records of examples, and checks those that were not read before."""
        if not self._shard[indices].all():
            with self._lock:
                for shard, entries in self._shards.new_entries():
                    self._learn(shard, entries)
        unseen = indices[(self._shard[indices] > 0) & (self._layout[indices] == _UNSEEN)]
        for index in dict.fromkeys(unseen.tolist()):
            self._check(index)

    def _learn(self, shard: int, entries: NDArray[np.void]) -> None:
        entries = entries[entries["index"] < len(self._shard)]
        # There may be millions, nearly all the first of their example.
        indices = entries["index"].astype(np.int64)
        first = (self._shard[indices] == 0) & (entries["generation"] == 0)
        if self._generations:
            first &= ~np.isin(indices, list(self._generations))
        self._offset[indices[first]] = entries["offset"][first]
        self._shard[indices[first]] = shard + 1
        for index, offset, generation, _ in entries[~first].tolist():
            self._add(index, shard, offset, generation)

    def _add(self, index: int, shard: int, offset: int, generation: int) -> None:
        known, before = self._shard[index], self._generations.get(index, 0)
        # A record that was checked stays: threads may be reading it.
        if self._layout[index] != _UNSEEN or generation < before or (known and generation == before):
            return
        if generation:
            self._generations[index] = generation
        self._offset[index] = offset
        self._shard[index] = shard + 1

    def _check(self, index: int) -> None:
        while self._shard[index] and self._layout[index] == _UNSEEN:
            with self._lock:
                shard, offset = int(self._shard[index]) - 1, int(self._offset[index])
            if shard < 0:
                return
            record = self._record(shard, offset)
            sound = record is not None and front_of(record).index == index and is_sound(record)
            number = self._number(record) if record is not None and sound else _UNSEEN
            with self._lock:
                # Another thread may have found a newer record meanwhile.
                if (self._shard[index], self._offset[index]) != (shard + 1, offset):
                    continue
                self._layout[index] = number
                if sound:
                    continue
                self._shard[index] = 0
                self._generations[index] = self._generations.get(index, 0) + 1
                self._notices.append(
                    f"{self._where}: the record of example {index} in {self._shards.name(shard)} at byte {offset:,} is "
                    "damaged, and is made anew"
                )

    def _record(self, shard: int, offset: int) -> NDArray[np.uint8] | None:
        """Returns an unchecked record; None if there is none."""
        front = front_at(self._shards.buffer(shard, offset + FRONT_BYTES), offset)
        if front is None:
            return None
        buffer = self._shards.buffer(shard, offset + front.record_bytes)
        return buffer[offset : offset + front.record_bytes] if offset + front.record_bytes <= len(buffer) else None

    def _number(self, record: NDArray[np.uint8]) -> int:
        """Returns the number of a record's layout, counted from 1."""
        front = front_of(record)
        if front.left_out:
            return _LEFT_OUT
        header = front.header(record)
        with self._layouts_lock:
            number = self._numbers.get(header, 0)
            if not number and len(self._layouts) < _MOST_LAYOUTS:
                self._layouts.append(decoder(header))
                number = self._numbers.setdefault(header, len(self._layouts))
        return number or _STRANGE


_OPEN: weakref.WeakKeyDictionary[Cache, tuple[int, Store]] = weakref.WeakKeyDictionary()
"""The caches that are open, each with the process that opened it."""
_OPENING = threading.Lock()
# A fork must not wait for a thread that it does not have.
os.register_at_fork(before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_OPENING.release)


def store_of(cache: Cache, examples: int) -> Store:
    """Returns this process's store of a cache, the same for all readers, as long as the cache's definition lives."""
    with _OPENING:
        opened = _OPEN.get(cache)
        # A fork appends to files of its own.
        if opened is None or opened[0] != os.getpid():
            if cache.folder is None:
                store = Store(MemoryShards(cache.limit or 0), examples, cache.limit or 0, "the cache in memory")
            else:
                folder = Path(cache.folder)
                lock, notices = claim(folder, cache.key, cache.about)
                for other in [other for other in _OPEN if other.folder == cache.folder and other.key != cache.key]:
                    del _OPEN[other]  # its files are gone
                store = Store(FileShards(folder, lock=lock), examples, cache.limit, f"the cache in {folder}", notices)
            opened = _OPEN[cache] = os.getpid(), store
    return opened[1]
