"""Finds the examples that a cache has, and keeps those that it has not."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.cache.folder import claim
from headrace.data.cache.record import (
    FRONT_BYTES,
    Absent,
    RecordLayout,
    front_at,
    front_of,
    gathered,
    is_sound,
    layout_of,
    pack,
)
from headrace.data.cache.shards import FileShards, MemoryShards, Shards
from headrace.data.pipeline.steps import Cache

_UNSEEN, _STRANGE, _LEFT_OUT = 0, -1, -2
_MOST_FORMS = 4096
"""Examples of every length have a form each; of more than so many, none is remembered."""


class Store:
    """What one process has of a cache. Any number of threads may use it at the same time.

    What is found is handed out as a copy, so that whatever is done to it in place is done to the copy. A record is
    checked when this process first reads it. What was kept is never thrown out: an epoch visits every example, so that
    whatever made room for another would be missed before that one is used again.
    """

    def __init__(self, shards: Shards, examples: int, limit: int | None, where: str) -> None:
        self._shards = shards
        self._limit = limit
        self._where = where
        # One more than the shard's number, so that memory which was never written to says "not there".
        self._shard = np.zeros(examples, dtype=np.int32)
        self._offset = np.zeros(examples, dtype=np.int64)
        self._form = np.zeros(examples, dtype=np.int32)
        self._generations: dict[int, int] = {}
        self._forms: list[RecordLayout] = []
        self._numbers: dict[bytes, int] = {}
        self._full = False
        self._notices: list[str] = []
        self._lock = threading.Lock()
        self._forms_lock = threading.Lock()

    def find(self, indices: Sequence[int]) -> list[Absent | None]:
        """Returns what is `Absent` of each example; None where there is a sound one, which stays."""
        self._look(np.asarray(indices, dtype=np.int64))
        absent = {_UNSEEN: Absent.MISSING, _LEFT_OUT: Absent.LEFT_OUT}
        return [absent.get(int(self._form[index])) for index in indices]

    def example(self, index: int) -> Any:
        """Returns a copy of an example that was found."""
        number, offset = int(self._form[index]), int(self._offset[index])
        shard = int(self._shard[index]) - 1
        front = front_at(self._shards.buffer(shard, offset + FRONT_BYTES), offset)
        assert front is not None, "it was found"
        record = self._shards.buffer(shard, offset + front.record_bytes)[offset:]
        form = self._forms[number - 1] if number > 0 else layout_of(front_of(record).header(record))
        return form.build(record[form.data :])

    def gather(self, indices: NDArray[np.int64]) -> tuple[Any, int] | None:
        """Returns the batch of some examples, without those that are left out, and how many it has.

        None where one of them is missing, none is left, or they do not make a batch by being stacked.
        """
        self._look(indices)
        forms = self._form[indices]
        if not forms.all():
            return None
        kept = indices[forms != _LEFT_OUT]
        form = self._form[kept[0]] if len(kept) else _STRANGE
        if form < 1 or (self._form[kept] != form).any() or self._forms[form - 1].batch is None:
            return None
        known = self._forms[form - 1]
        # All of a record: what is mapped may end in the middle of one that was being written then.
        length = known.data + max((leaf.end for leaf in known.leaves), default=0)
        places = zip((self._shard[kept] - 1).tolist(), self._offset[kept].tolist(), strict=True)
        records = [self._shards.buffer(shard, offset + length)[offset:] for shard, offset in places]
        return gathered(known, records), len(kept)

    def put(self, examples: Sequence[tuple[int, Any]]) -> None:
        """Keeps examples, each with its index, where there is room."""
        if self._full:
            return
        packed = [
            (index, generation, pack(index, value, generation))
            for index, value in examples
            if not self._shard[index]
            for generation in (self._generations.get(index, 0),)
        ]
        with self._lock:
            # Another thread may have been faster.
            fresh = {index: (generation, record) for index, generation, record in packed if not self._shard[index]}
            self._append([(index, *fresh[index]) for index in fresh])

    def news(self) -> tuple[str, ...]:
        """Returns lines for the user, each once."""
        if not self._notices:
            return ()
        with self._lock:
            told, self._notices = tuple(self._notices), []
        return told

    def tell(self, notices: Sequence[str]) -> None:
        """Adds lines for the user."""
        self._notices += notices

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
            # It is what this process has just made.
            self._form[index] = self._number(record)
        if fitting < len(packed):
            self._end(f"it is full with {self._shards.nbytes:,} bytes", "raise its limit")

    def _end(self, why: str, remedy: str) -> None:
        if not self._full:
            self._notices.append(
                f"{self._where} keeps {np.count_nonzero(self._shard):,} of {len(self._shard):,} examples, {why}; "
                f"the rest is made anew in every epoch; {remedy}"
            )
        self._full = True

    def _look(self, indices: NDArray[np.int64]) -> None:
        """Finds what there is of some examples, and checks what has not been read yet."""
        if not self._shard[indices].all():
            with self._lock:
                for shard, entries in self._shards.news():
                    self._learn(shard, entries)
        unseen = indices[(self._shard[indices] > 0) & (self._form[indices] == _UNSEEN)]
        for index in dict.fromkeys(unseen.tolist()):
            self._check(index)

    def _learn(self, shard: int, entries: NDArray[np.void]) -> None:
        entries = entries[entries["index"] < len(self._shard)]
        # Nearly all are the first of their example, and there may be millions of them.
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
        # What has been found to be sound stays: threads may be reading it.
        if self._form[index] != _UNSEEN or generation < before or (known and generation == before):
            return
        if generation:
            self._generations[index] = generation
        self._offset[index] = offset
        self._shard[index] = shard + 1

    def _check(self, index: int) -> None:
        while self._shard[index] and self._form[index] == _UNSEEN:
            with self._lock:
                shard, offset = int(self._shard[index]) - 1, int(self._offset[index])
            if shard < 0:
                return
            record = self._record(shard, offset)
            sound = record is not None and front_of(record).index == index and is_sound(record)
            number = self._number(record) if record is not None and sound else _UNSEEN
            with self._lock:
                # Another thread may have found a newer one meanwhile.
                if (self._shard[index], self._offset[index]) != (shard + 1, offset):
                    continue
                self._form[index] = number
                if not sound:
                    self._lose(index, shard, offset)

    def _record(self, shard: int, offset: int) -> NDArray[np.uint8] | None:
        """Returns a record that nobody has checked; None if there is none."""
        front = front_at(self._shards.buffer(shard, offset + FRONT_BYTES), offset)
        if front is None:
            return None
        buffer = self._shards.buffer(shard, offset + front.record_bytes)
        return buffer[offset : offset + front.record_bytes] if offset + front.record_bytes <= len(buffer) else None

    def _lose(self, index: int, shard: int, offset: int) -> None:
        self._shard[index] = 0
        self._generations[index] = self._generations.get(index, 0) + 1
        self._notices.append(
            f"{self._where}: the record of example {index} in {self._shards.name(shard)} at byte {offset:,} is "
            "damaged, and is made anew"
        )

    def _number(self, record: NDArray[np.uint8]) -> int:
        """Returns the number of a record's form, counted from 1."""
        front = front_of(record)
        if front.left_out:
            return _LEFT_OUT
        header = front.header(record)
        with self._forms_lock:
            number = self._numbers.get(header, 0)
            if not number and len(self._forms) < _MOST_FORMS:
                self._forms.append(layout_of(header))
                number = self._numbers.setdefault(header, len(self._forms))
        return number or _STRANGE


@dataclass(frozen=True)
class _Open:
    process: int
    store: Store


_OPEN: weakref.WeakKeyDictionary[Cache, _Open] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
# A child must not wait for a thread that is not in it.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def store_of(cache: Cache, examples: int) -> Store:
    """Returns what this process has of a cache, for as long as its definition lives."""
    found = _OPEN.get(cache)
    # A forked child appends to files of its own.
    if found is None or found.process != os.getpid():
        with _LOCK:
            found = _OPEN.get(cache)
            if found is None or found.process != os.getpid():
                found = _OPEN[cache] = _opened(cache, examples)
    return found.store


def _opened(cache: Cache, examples: int) -> _Open:
    if cache.folder is None:
        limit = cache.limit or 0
        return _Open(os.getpid(), Store(MemoryShards(limit), examples, limit, "the cache in memory"))
    folder = Path(cache.folder)
    held, notices = claim(folder, cache.key, cache.about)
    for other in [other for other in _OPEN if other.folder == cache.folder and other.key != cache.key]:
        # Its files are gone.
        del _OPEN[other]
    store = Store(FileShards(folder, claim=held), examples, cache.limit, f"the cache in {folder}")
    store.tell(notices)
    return _Open(os.getpid(), store)
